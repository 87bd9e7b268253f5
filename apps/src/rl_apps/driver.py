"""The life of a command: parse, check, show or launch, and say what came of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_apps import compose
from rl_apps.config import RunConfig
from rl_apps.layout import Layout, run_directory
from rl_contracts.errors import ConfigError, RLError
from rl_contracts.scheduler import JobSpec, Worker


@dataclass(frozen=True)
class App:
    """One command.

    The checks run before any process starts, and say in a few lines what would happen. `train` runs in every trainer.
    """

    name: str
    """Command; with underscores, its module and its config file."""
    title: str
    """One line for `--help`."""
    schema: type[RunConfig]
    """Its config."""
    layout: Callable[[Any], Layout]
    """`(config) -> layout`, or a ConfigError."""
    check: Callable[[Any, Layout], list[str]]
    """`(config, layout) -> lines of arithmetic`; raises what is wrong with data, model or batch."""
    make_model: Callable[[Any, Callable[[str], None]], Path]
    """`(config, say) -> model directory`, made on the spot if need be."""
    servers: Callable[[Any, Layout, Path], list[JobSpec]]
    """`(config, layout, run directory) -> roles of servers`."""
    train: Callable[[Any, Layout, Path, list[str]], None]
    """`(config, layout, run directory, server addresses)`: the work of one trainer process."""
    columns: dict[str, tuple[str, str]]
    """What a step's line shows."""
    closing: Callable[[Any, Path], list[str]]
    """`(config, run directory) -> lines`: what was learned, and what to try next."""

    @property
    def stem(self) -> str:
        """Name of its module and config file."""
        return self.name.replace("-", "_")


def main(app: App, argv: list[str] | None = None) -> int:
    """Run a command. Returns its exit code: 0, 1 (the run failed), 2 (it could not be started), 130 or 143."""
    from rl_contracts.errors import DataError, ModelError

    try:
        return _main(app, sys.argv[1:] if argv is None else argv)
    except RLError as error:
        print(f"{app.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | ModelError) else 1
    except KeyboardInterrupt:
        return 130


def _main(app: App, argv: list[str]) -> int:
    line = compose.parse(argv)
    if line.show_help:
        from rl_apps.settings_help import render

        print(render(f"{app.name}: {app.title}", compose.compose(app.stem, app.schema, line.overrides)))
        return 0
    config = compose.compose(app.stem, app.schema, line.overrides)
    if line.show_config:
        print(compose.to_yaml(config), end="")
        return 0
    layout = app.layout(config)
    config.engine_config().check(layout.actor.strategy, config.finetune_spec())
    arithmetic = app.check(config, layout)
    resumes = config.recover.resume and config.recover.every > 0
    run_dir = run_directory(config.run_dir, config.experiment, config.trial, resumes)
    if line.dry_run:
        print(_plan(app, config, layout, run_dir, arithmetic))
        return 0
    return launch(app, config, layout, run_dir)


def launch(app: App, config: Any, layout: Layout, run_dir: Path) -> int:
    """Make the model, start servers and trainers, show progress, and close with what was learned."""
    from rl_apps.parts import publish_config, weights_directory
    from rl_apps.progress import RunProgress
    from rl_launchers import Launcher
    from rl_trainers.recover import drop_lost_steps

    run_dir.mkdir(parents=True, exist_ok=True)
    drop_lost_steps(run_dir, config.recover)  # before anybody reads them
    # a run that was killed may have left weights there, which the servers would take for this run's
    weights = weights_directory(run_dir, publish_config(config).route)
    shutil.rmtree(weights, ignore_errors=True)
    with RunProgress(run_dir / "metrics.jsonl", config.total_steps, app.columns) as progress:
        model = app.make_model(config, progress.say)
        config = replace(config, run_dir=str(run_dir), model=replace(config.model, path=str(model)))
        (run_dir / "config.yaml").write_text(compose.to_yaml(config))
        launcher = Launcher(config.launcher.scheduler(run_dir / "logs"), config.launcher)
        progress.say("starting servers and trainers")
        try:
            code = launcher.run(
                app.servers(config, layout, run_dir),
                lambda servers: [trainer_job(app, layout, run_dir, servers)],
                on_tick=lambda _: progress.tick(),
            )
        finally:  # a trainer that was killed leaves its weights in memory
            shutil.rmtree(weights, ignore_errors=True)
    print("\n".join(app.closing(config, run_dir) if code == 0 else [f"Stopped. Files: {run_dir}"]))
    return code


def trainer_job(app: App, layout: Layout, run_dir: Path, servers: list[Worker]) -> JobSpec:
    """The role of the trainer processes: `python -m rl_apps.worker`."""
    addresses = ",".join(worker.address for worker in servers)
    command = (sys.executable, "-m", "rl_apps.worker", app.name, str(run_dir), addresses)
    return JobSpec(
        role=layout.actor.name,
        command=command,
        count=layout.actor.world_size,
        cpus=layout.cores_each,
        gpus=layout.gpus_each,
        spmd=True,
    )


def _plan(app: App, config: Any, layout: Layout, run_dir: Path, arithmetic: list[str]) -> str:
    roles = [f"{spec.count} x {spec.role}: {' '.join(spec.command)}" for spec in app.servers(config, layout, run_dir)]
    trainer = trainer_job(app, layout, run_dir, [])
    roles.append(f"{trainer.count} x {trainer.role}: {' '.join(trainer.command)}")
    parts = [
        compose.to_yaml(config).rstrip(),
        "# A step",
        *(f"#   {text}" for text in arithmetic),
        f"# Processes ({layout.cores_each} core(s) each)",
        *(f"#   {text}" for text in roles),
        f"# Run directory: {run_dir}",
    ]
    return "\n".join(parts)
