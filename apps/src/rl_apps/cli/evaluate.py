"""`rl evaluate`: evaluate models on data sets, without a trainer."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rl_apps.cli.driver import trainer_job
from rl_apps.preflight.servers import check_attached, check_program
from rl_apps.programs.evaluate import HELD_OUT, RESULT, check, try_episodes
from rl_apps.run.app import Run
from rl_apps.run.chat_template import save_tokenizer
from rl_apps.run.components import attached, server_jobs
from rl_apps.run.directory import lock_run_directory, write_config
from rl_apps.run.summary import read_metrics
from rl_apps.settings.compose import compose
from rl_apps.settings.config import EvaluateConfig, SamplingSettings
from rl_apps.settings.data import DataConfig
from rl_apps.settings.device_layout import Devices, devices_of, layout_of, run_directory
from rl_apps.settings.dtypes import gpus_have_bfloat16, resolve_dtypes
from rl_apps.settings.evaluation_sets import EvaluationSettings, config_of, evaluated_configs
from rl_apps.settings.model import MADE, find_models, make_model
from rl_contracts.allocation import Allocation
from rl_contracts.config import require
from rl_contracts.errors import ModelError
from rl_contracts.runtime.run_files import read_stage, steps_in
from rl_contracts.scheduler import RUN_KEY_VARIABLE, Worker
from rl_launchers import Launcher, RunControl, uv_parent
from rl_monitor.run_directory import names_of, read_config

REFERENCE = "rl_apps.programs.evaluate:APP"
MESSAGE_SECONDS = 10.0
"""Seconds between two lines of progress."""
NOT_INHERITED = {"model": ("path", "directories", "chat_template"), "rollout": ("port",)}
"""Settings of a run that its evaluation does not inherit. A checkpoint has the chat template of its run."""


@dataclass(frozen=True)
class Model:
    """A model to evaluate."""

    path: str
    """Directory or hub id."""
    run: Path | None = None
    """Directory of the run that trained it, whose settings are the defaults; None: no run is known."""


def find_model(text: str) -> Model:
    """Return the model of a run, a checkpoint, a directory or a hub id.

    Raises:
        ModelError: a run has no checkpoint.
    """
    path = Path(text).expanduser()
    if (path / "config.yaml").is_file() or (path / "checkpoints").is_dir():
        return Model(str(best_checkpoint(path)), path)
    run = path.parent.parent
    if path.parent.name == "checkpoints" and (run / "config.yaml").is_file():
        return Model(str(path), run)
    return Model(text)


def best_checkpoint(run: Path) -> Path:
    """Return the best checkpoint of a run if it ranks them (`checkpoint.keep_best`), otherwise the newest.

    Raises:
        ModelError: the run has no checkpoint.
    """
    directory = run / "checkpoints"
    steps = steps_in(directory)
    if not steps:
        raise ModelError(f"{run}: expected a run with a checkpoint, found none in {directory}.")
    settings = read_config(run / "config.yaml").get("checkpoint") or {} if (run / "config.yaml").is_file() else {}
    rated: dict[int, float] = {}
    if settings.get("keep_best"):
        metric, sign = settings["best_metric"], 1 if settings["best_mode"] == "max" else -1
        records = (record for record in read_metrics(run) if record.get(metric) is not None)
        rated = {record["step"]: sign * record[metric] for record in records if record["step"] in steps}
    return directory / f"step_{max(rated, key=lambda step: (rated[step], step)) if rated else steps[-1]}"


def inherited_settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run that apply to its evaluation: data, evaluation, servers, workflow and sampling."""
    saved = read_config(run / "config.yaml")
    servers = Allocation.parse(str(saved.get("allocation", ""))).inference
    settings: dict[str, Any] = {"allocation": str(servers[0])} if servers else {}
    settings |= {name: saved[name] for name in ("seed", "deterministic") if name in saved}
    for section, kind in (("data", DataConfig), ("evaluation", EvaluationSettings), ("rollout", SamplingSettings)):
        known = {item.name for item in fields(kind)} - {*NOT_INHERITED.get(section, ())}
        settings[section] = {name: value for name, value in (saved.get(section) or {}).items() if name in known}
    model = (saved.get("model") or {}).items()
    settings["model"] = {name: value for name, value in model if name not in NOT_INHERITED["model"]}
    (settings["rollout"].get("server") or {}).pop("addresses", None)
    return settings


def compose_config(model: Model, overrides: Sequence[str], by: Sequence[str]) -> EvaluateConfig:
    """Return the settings of the evaluation of one model."""
    has_settings = model.run is not None and (model.run / "config.yaml").is_file()
    with tempfile.TemporaryDirectory(prefix="rl-evaluate-") as scratch:
        file = Path(scratch) / "run.yaml"
        file.write_text(yaml.safe_dump(inherited_settings(model.run) if has_settings and model.run else {}))
        config = compose(EvaluateConfig, [file], overrides)
    config.model.path, config.by = model.path, [*config.by, *by]
    config.publish.route = "broadcast"  # nothing is published; this route needs no directory
    config.total_steps = 0
    options = config.launcher.options
    expected = "a launcher that starts processes, such as local"
    require(options is not None and not options.submits(), "launcher.kind", expected, config.launcher.kind)
    return config


def evaluate(
    words: Sequence[str],
    by: Sequence[str] = (),
    json_file: Path | None = None,
    page: Path | None = None,
    dry_run: bool = False,
) -> int:
    """Evaluate models one after another, print a table of their scores, and write the files.

    Args:
        words: models, and settings as `key=value`.
        by: columns of the data for whose values to report scores.
        json_file: file for all numbers, or None.
        page: file for a page with the completions, or None.
        dry_run: whether to end after all checks.

    Returns:
        the exit code.
    """
    parent = uv_parent()
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    models = [find_model(word) for word in words if word not in overrides]
    require(bool(models), "rl evaluate", "a run, a checkpoint, a model directory or a hub id", list(words))
    configs = [compose_config(model, overrides, by) for model in models]
    with ExitStack() as claim:
        if dry_run:
            base = Path(claim.enter_context(tempfile.TemporaryDirectory(prefix="rl-evaluate-")))
        else:
            base = run_directory(configs[0].run_dir, configs[0].experiment, configs[0].trial)
            claim.enter_context(lock_run_directory(base))
        directories = _directories(base, models)
        prepared = [_prepare(*each) for each in zip(configs, directories, strict=True)]
        _print(*try_episodes(prepared[0][0]))
        results: list[dict[str, Any]] = []
        code = 0
        for model, (run, devices) in zip(models, prepared, strict=True):
            sets = ", ".join(name or HELD_OUT for name in evaluated_configs(run.config))
            _print(f"{'would evaluate' if dry_run else 'evaluating'} {model.path} on {sets}: {devices.sentence}")
            code = 0 if dry_run else _launch(run, devices, parent)
            if code:
                _print("Stopped.")
                break
            results += [] if dry_run else [_result(model, run)]
        if results:
            _print("", "\n\n".join([table(results), *tables_by(results)]), "")
            _print(f"Files: {base} (completions: rl show {directories[0]} --evaluation)")
            _write(results, json_file, page)
    return code


def _print(*texts: str) -> None:
    for text in texts:
        print(text, flush=True)


def _directories(base: Path, models: Sequence[Model]) -> list[Path]:
    """Return the directory of each model, in which the files of its evaluation are written."""
    names = [f"{number}-{Path(model.path).name}" for number, model in enumerate(models, 1)]
    directories = [base / name for name in names] if len(models) > 1 else [base]
    used = [str(directory) for directory in directories if (directory / "config.yaml").exists()]
    require(not used, "run_dir", "a directory without an earlier run or evaluation", used)
    return directories


def _write(results: Sequence[dict[str, Any]], json_file: Path | None, page: Path | None) -> None:
    """Write the files that the user requested."""
    if json_file is not None:
        json_file.write_text(json.dumps({"models": results}, indent=2) + "\n", encoding="utf-8")
    if page is not None:
        from rl_monitor.report.page import write_report

        write_report([Path(result["directory"]) for result in results], page)


def _prepare(config: EvaluateConfig, directory: Path) -> tuple[Run[EvaluateConfig], Devices]:
    """Check the evaluation of one model before any process starts."""
    layout = layout_of(config.allocation, "alone")
    started = replace(layout, rollout=None) if attached(config, layout) else layout
    devices = devices_of(started, config.cluster, config.launcher)
    if devices.kind == "cuda":
        config.cluster.require_there(config.launcher)
    resolve_dtypes(config, devices.kind == "cuda" and gpus_have_bfloat16())
    run = Run(config, layout, directory, devices.kind)
    config.model.directories = find_models(config.model_paths())
    if config.model.path in MADE:
        made = make_model(config.model, config.data, config.seed, "rl", "answers", True, _print)
        config.model.directories[config.model.path] = str(made)
    if config.model.chat_template:
        save_tokenizer(config.model, run.tokenizer)
    _print(*check(run))
    check_program(run, _print)
    check_attached(run, 0)
    return run, devices


def _launch(run: Run[EvaluateConfig], devices: Devices, parent: int) -> int:
    """Start the servers and the evaluating process, and wait for its end. Returns the exit code."""
    run.directory.mkdir(parents=True, exist_ok=True)
    addresses = attached(run.config, run.layout)
    key = os.environ.get(RUN_KEY_VARIABLE, "") if addresses else ""
    with RunControl(names_of(run.directory)) as control:
        write_config(run)
        scheduler = run.config.launcher.scheduler(run.directory / "logs")
        launcher = Launcher(scheduler, run.config.launcher, parent, key, control)
        return launcher.run(
            server_jobs(run, devices),
            lambda workers: [
                replace(trainer_job(REFERENCE, run, devices, addresses or [w.address for w in workers]), gpus=0)
            ],
            on_tick=_Progress(run.directory),
            together=True,
        )


class _Progress:
    """Prints the state of an evaluation every `MESSAGE_SECONDS`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin = time.monotonic()
        self._next = MESSAGE_SECONDS

    def __call__(self, workers: Sequence[Worker]) -> None:
        """Print the state if it is time."""
        seconds = time.monotonic() - self._begin
        if seconds >= self._next:
            self._next = seconds + MESSAGE_SECONDS
            starting = ", ".join(worker.name for worker in workers if worker.status == "starting")
            stage = read_stage(self._directory) or {"stage": "preparing the evaluation", "progress": []}
            progress = ", {} of {} examples".format(*stage["progress"]) if stage["progress"] else ""
            _print(f"{seconds:.0f} s, {f'waiting for {starting} to start' if starting else stage['stage'] + progress}")


def _result(model: Model, run: Run[EvaluateConfig]) -> dict[str, Any]:
    """Return all numbers of the evaluation of one model, with the sampling settings."""
    sets = json.loads((run.directory / RESULT).read_text(encoding="utf-8"))
    for name, result in sets.items():
        config = config_of(run.config, name) if name in run.config.evaluation.sets else run.config
        settings = config.evaluation
        result |= {
            "data": {key: getattr(config.data, key) for key in ("name", "path", "test_split")},
            "reward": config.rollout.reward,
            "n": settings.n,
            "k": settings.ks,
            "sampling": asdict(settings.sampling(config.generation)),
        }
    config = run.config
    facts = {
        "allocation": config.allocation,
        "dtype": getattr(config.rollout.server, "dtype", ""),
        "workflow": config.rollout.workflow,
        "seed": config.seed,
    }
    return {"model": model.path, "directory": str(run.directory), **facts, "sets": sets}


LAST = ("length", "truncated", "examples", "failed")
"""Scores at the end of a row."""


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of scores, with a row for each model and set."""
    rows = [
        {"model": result["model"], "set": name, **_cells(of_set["scores"])}
        | {"seconds": f"{of_set['seconds']:.1f}", "tokens": str(of_set["tokens"])}
        for result in results
        for name, of_set in result["sets"].items()
    ]
    return _format(rows)


def tables_by(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table for each column of the data that was requested, with a row for each model, set and value."""
    columns = dict.fromkeys(column for result in results for each in result["sets"].values() for column in each["by"])
    return [
        _format(
            [
                {"model": result["model"], "set": name, column: value} | _cells(scores)
                for result in results
                for name, of_set in result["sets"].items()
                for value, scores in of_set["by"].get(column, {}).items()
            ]
        )
        for column in columns
    ]


def _cells(scores: dict[str, float | None]) -> dict[str, str]:
    """Return the scores as text, with the standard error next to accuracy or reward."""
    main = "accuracy" if "accuracy" in scores else "reward"
    at_k = [name for name in scores if "@" in name and not name.startswith("avg@")]
    cells = {name: _number(scores[name], 3) for name in (main, *at_k)}
    if scores["standard_error"] is not None:
        cells[main] += f" ± {scores['standard_error']:.3f}"
    return cells | {name: _number(scores[name], digits) for name, digits in zip(LAST, (1, 3, 0, 0), strict=True)}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _format(rows: Sequence[dict[str, str]]) -> str:
    """Return rows as aligned columns; a row may lack some of them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns.sort(key=lambda column: column in (*LAST, "seconds", "tokens"))  # rows may differ in their values of k
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
