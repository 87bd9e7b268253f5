"""The life of a command: parse, check, show or launch, and say what came of it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import Any

from rl_apps import compose
from rl_apps.app import App, Run
from rl_apps.checks import check_run
from rl_apps.layout import Devices, devices_of, layout_of, run_directory
from rl_apps.parts import server_jobs, weights_directory
from rl_contracts import registry
from rl_contracts.errors import ConfigError, DataError, ModelError, RLError
from rl_contracts.scheduler import JobSpec, Worker


def main(reference: str, argv: list[str] | None = None) -> int:
    """Run an app.

    Args:
        reference: where it is: a name in the entry-point group `rl.apps`, or a dotted path `package.module:APP`.
        argv: arguments; None: those of this process.

    Returns:
        the exit code: 0, 1 (the run failed), 2 (it could not be started), 130 or 143 (it was stopped).
    """
    name = reference
    if "" not in sys.path:
        sys.path.append("")  # a script's directory stands there; dotted paths may name files of the current one
    try:
        app: App = registry.load("rl.apps", reference)
        name = app.name
        return _main(reference, app, sys.argv[1:] if argv is None else argv)
    except RLError as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | ModelError) else 1
    except KeyboardInterrupt:
        return 130


def _main(reference: str, app: App, argv: list[str]) -> int:
    line = compose.parse(argv)
    config = app.config(line.overrides, line.config)
    if line.help:
        print(compose.render_help(f"{app.name}: {app.title}", config))
        return 0
    if line.cfg:
        print(compose.to_yaml(config), end="")
        return 0
    layout = layout_of(config.allocation, app.servers)
    devices = devices_of(layout, config.cluster, config.launcher)
    resumes = config.recover.resume and config.recover.every > 0
    run_dir = run_directory(config.run_dir, config.experiment, config.trial, resumes)
    run = Run(config, layout, run_dir, devices.kind)
    check_run(run)
    arithmetic = app.check(run)
    if line.dry_run:
        print(_plan(reference, app, run, devices, arithmetic))
        return 0
    return launch(reference, app, run, devices)


def launch(reference: str, app: App, run: Run[Any], devices: Devices) -> int:
    """Make the model, start servers and trainers, show progress, and close with what was learned."""
    from rl_apps.model import make_model
    from rl_apps.progress import RunProgress
    from rl_launchers import Launcher
    from rl_trainers.recover import drop_lost_steps

    config, run_dir = run.config, run.directory
    print(devices.sentence, flush=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    drop_lost_steps(run_dir, config.recover)  # before anybody reads them
    # a run that was killed may have left weights there, which the servers would take for this run's
    weights = weights_directory(run_dir, config.publish.route if run.layout.rollout else "")
    shutil.rmtree(weights, ignore_errors=True)
    with RunProgress(run_dir / "metrics.jsonl", config.total_steps, app.columns) as progress:
        model = make_model(config.model, config.data, config.seed, app.form, app.warm_up, progress.say)
        config = replace(config, model=replace(config.model, path=str(model)))
        run = replace(run, config=config)
        (run_dir / "config.yaml").write_text(compose.to_yaml(config))
        launcher = Launcher(config.launcher.scheduler(run_dir / "logs"), config.launcher)
        progress.say("starting servers and trainers")
        try:
            code = launcher.run(
                server_jobs(run, devices),
                lambda servers: [trainer_job(reference, run, devices, servers)],
                on_tick=lambda _: progress.tick(),
            )
        finally:  # a trainer that was killed leaves its weights in memory
            shutil.rmtree(weights, ignore_errors=True)
    print("\n".join(app.closing(config, run_dir) if code == 0 else [f"Stopped. Files: {run_dir}"]))
    return code


def trainer_job(reference: str, run: Run[Any], devices: Devices, servers: list[Worker]) -> JobSpec:
    """The role of the trainer processes: `python -m rl_apps.worker`, which finds the app as the command did."""
    addresses = ",".join(worker.address for worker in servers)
    actor = run.layout.actor
    return JobSpec(
        role=actor.name,
        command=(sys.executable, "-m", "rl_apps.worker", reference, str(run.directory), run.device, addresses),
        count=actor.world_size,
        cpus=devices.cores_each,
        gpus=int(run.device == "cuda"),
        spmd=True,
    )


def _plan(reference: str, app: App, run: Run[Any], devices: Devices, arithmetic: list[str]) -> str:
    jobs = [*server_jobs(run, devices), trainer_job(reference, run, devices, [])]
    parts = [
        compose.to_yaml(run.config).rstrip(),
        "# A step",
        *(f"#   {text}" for text in arithmetic),
        f"# Devices: {devices.sentence}",
        f"# Processes ({devices.cores_each} core(s) each)",
        *(f"#   {job.count} x {job.role}: {' '.join(job.command)}" for job in jobs),
        f"# Run directory: {run.directory}",
    ]
    return "\n".join(parts)
