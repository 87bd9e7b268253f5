"""Run a command: parse and check its settings, then print them or launch the run, and print its summary."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rl_apps.cli.help import render_help
from rl_apps.preflight.checks import check_architectures, check_limits, check_run, choose_route, on_this_machine
from rl_apps.preflight.expectation import expectation
from rl_apps.preflight.servers import check_attached, check_program, command_of
from rl_apps.preflight.trial_episode import check_golds, run_trial_episode, try_evaluation_sets, try_policy_loss
from rl_apps.preflight.warnings import WARNING, passes_over, warnings_for
from rl_apps.run.app import App, Run
from rl_apps.run.chat_template import save_tokenizer
from rl_apps.run.components import attached, memory_of, server_jobs, weights_directory
from rl_apps.run.directory import (
    check_started_from,
    leftover_files,
    lock_run_directory,
    previous_run,
    resumption,
    step_seconds,
    stored_settings,
    write_config,
)
from rl_apps.run.resuming import named_point, step_of, take_over
from rl_apps.settings import compose
from rl_apps.settings.command_line import parse, print_all, setting
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import load_rows
from rl_apps.settings.device_layout import Devices, devices_of, layout_of, run_directory
from rl_apps.settings.dtypes import describe_dtypes, gpus_have_bfloat16, resolve_dtypes
from rl_apps.settings.model import EMBEDDED, find_models, make_model, newest_checkpoint
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import (
    ConfigError,
    DataError,
    LaunchError,
    ModelError,
    RLError,
    ServerStartError,
    WeightUpdateError,
    raised_at,
)
from rl_contracts.runtime.json_lines import FOR_A_WHILE
from rl_contracts.runtime.logging import Repeats
from rl_contracts.runtime.run_files import STAGE_FILE, tail
from rl_contracts.runtime.terminal import hide_deprecations, leave_pipe, replace_what_no_terminal_shows
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, JobSubmission, Worker
from rl_launchers import Launcher, Resume, RunControl, uv_parent
from rl_launchers.supervise.interrupts import Interrupted
from rl_monitor.progress import describe_stage
from rl_monitor.run_directory import FINISHED, JOB, last_record, names_of, progress_of
from rl_trainers.recovery.lookup import resumed_step, truncate_to_checkpoint
from rl_trainers.run_log.tracking import Tracking, hanging_trackers

if TYPE_CHECKING:
    from rl_monitor.progress import RunProgress

__all__ = ["main"]

MESSAGE_SECONDS = 5.0
"""Seconds between two lines that report the cause of the wait."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"(\([^)]*\) )?(([A-Z]+ )?[\d-]+ [\d:.]+ ([A-Z]+ )?\[\S+\] )?")
"""Prefix of a log line of this project or of vLLM: process, time and level."""
_LIBRARY_WARNING = re.compile(r"^(W\d{4} [\d:.]+ .*|\S+:\d+: \w*Warning: .*(\n  .*)?)$", re.MULTILINE)
"""Warning of torch, or of Python with the line of code that it quotes, in a log."""


def main(reference: str, argv: list[str] | None = None) -> int:
    """Run an app.

    Args:
        reference: name in the entry-point group `rl.apps`, or dotted path `package.module:APP`.
        argv: arguments, or None to use `sys.argv`.

    Returns:
        the exit code: 0, 1 (the run failed), 2 (the run could not start), 130 or 143 (the run was stopped).
    """
    code = _run(reference, argv)
    if hanging_trackers():  # a tracker library may wait for its thread at exit, forever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(reference: str, argv: list[str] | None) -> int:
    replace_what_no_terminal_shows()
    hide_deprecations()
    if logging.lastResort is not None:  # warnings of this process go through this handler
        logging.lastResort.filters[:] = [Repeats()]
    name, parent = reference, uv_parent()  # the parent may exit before the launch
    if "" not in sys.path:
        sys.path.append("")  # sys.path[0] is the script's directory; dotted paths may name files in the current one
    try:
        app: App = registry.load("rl.apps", reference)
        expected = "an `rl_apps.run.app.App`, see docs/own-app.md"
        require(isinstance(app, App), f"app {reference}", expected, type(app).__name__)
        name = app.name
        return _main(reference, app, sys.argv[1:] if argv is None else argv, parent)
    except RLError as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | ModelError | ServerStartError) else 1
    except BrokenPipeError:
        return leave_pipe()
    except KeyboardInterrupt:
        print("Stopped.")
        return 130
    except Interrupted as stop:  # `rl stop`
        print("Stopped before the run started.")
        return 128 + stop.number
    except Exception as error:  # report errors of user code and full disks; re-raise all others
        is_disk_full, place = isinstance(error, OSError) and error.errno in FOR_A_WHILE, raised_at(error)
        if not (is_disk_full or place):
            raise
        print(f"{name}: {type(error).__name__}: {error}{place}", file=sys.stderr)
        return 1 if is_disk_full else 2


def _main(reference: str, app: App, argv: list[str], parent: int) -> int:
    line = parse(argv, app.name, lambda name: compose.nearest_setting(name, app.config()))
    config = app.config(line.overrides, line.config)
    if line.help is not None:
        command = f"rl run {reference}" if ":" in reference else app.name
        print_all(render_help(app, config, line.help, command))
        return 0
    if line.cfg:
        print_all(compose.to_yaml(config).rstrip("\n"))
        return 0
    app.require_settings(config)
    layout = layout_of(config.allocation, app.servers)
    started = replace(layout, rollout=None) if attached(config, layout) else layout
    devices = devices_of(started, config.cluster, config.launcher, line.dry_run)
    choose_route(config, layout, devices)
    run = Run(config, layout, run_directory(config.run_dir, config.experiment, config.trial), devices.kind)
    has_bfloat16 = devices.kind == "cuda" and gpus_have_bfloat16()
    resolve_dtypes(config, has_bfloat16, stored_settings(run.directory))
    options = config.launcher.options
    assert options is not None
    if not line.dry_run and options.submits() and (code := options.attach(run.directory)) is not None:
        return code
    with ExitStack() as claim:
        if not line.dry_run:
            if devices.kind == "cuda":
                config.cluster.require_there(config.launcher)
            claim.enter_context(lock_run_directory(run.directory))
        point = named_point(run)
        past = previous_run(run, step_of(point) if point else 0)
        if past.finished:
            print(f"{app.name}: this run is already finished. Files: {run.directory}")
            return 0
        config.model.directories = find_models(config.model_paths(), fetch=not line.dry_run)
        if past.step:
            check_started_from(run, point)
        check_run(run)
        if not line.dry_run:
            headline = f"resuming after step {past.step} of {config.total_steps}" if past.step else "run directory"
            last_step, _ = progress_of(run.directory)
            if past.step and last_step > past.step:
                headline += f", {point or 'the newest recovery checkpoint'}; steps up to {last_step} run again"
            changes = [*(f"  {change}" for change in past.changes), *leftover_files(run.directory)]
            print(
                devices.sentence,
                f"dtype: {describe_dtypes(config)}",
                f"{headline}: {run.directory}",
                *changes,
                "loading and checking the data",
                sep="\n",
                flush=True,
            )
        step_notes = app.check(run)
        check_architectures(run)
        job = submission(reference, run, devices, [word for word in argv if word != "--dry-run"])
        options.check(job.roles)
        check_program(run, (lambda _: None) if line.dry_run else partial(print, flush=True))
        if line.dry_run:
            check_limits(run)
            if Path(config.model.directory()).is_dir():
                with TemporaryDirectory(prefix="rl-plan-") as scratch:
                    step_notes += _run_preflight(app, replace(run, directory=Path(scratch)), lambda _: None)
            step_notes += warnings_for(run, app.form)
            print_all(_plan(app, run, devices, step_notes, job))
            return 0
        if options.submits():
            names_of(run.directory).add(JOB, json.dumps(config.launcher.kind), replace=True)
            claim.close()  # the job locks the run directory
            return options.submit(job)
        return launch(reference, app, run, devices, parent, past.step)


def launch(reference: str, app: App, run: Run[Any], devices: Devices, parent: int, step: int = 0) -> int:
    """Prepare the model, start servers and trainers, show progress, and print the summary.

    Args:
        parent: result of `uv_parent` at the start of the command.
        step: step to resume after.
    """
    from rl_monitor.progress import RunProgress
    from rl_monitor.report.page import RunReport

    config, run_dir = run.config, run.directory
    steps = config.total_steps
    if config.total_epochs:
        steps = config.steps_with(len(load_rows(config.data, "train", app.form, config.seed)), app.form)
    weights = _clear_weights(run)
    metrics = run_dir / "metrics.jsonl"
    with (
        RunReport(run_dir, sys.argv) as report,
        RunControl(names_of(run_dir)) as control,
        RunProgress(metrics, steps, app.columns) as progress,
    ):
        make = partial(_initial_model, app, run, progress.print_message)
        config.model.directories[config.model.path] = str(make(warm_up=False))
        if step:
            check_started_from(run, named_point(run))
        if addresses := attached(config, run.layout):
            progress.print_message(f"checking the servers at {', '.join(addresses)}")
            check_attached(run, step)
        check_limits(run)
        for sentence in (*_run_preflight(app, run, progress.print_message), *warnings_for(run, app.form)):
            progress.console.print(sentence, soft_wrap=True)
        take_over(run)  # all checks have passed
        truncate_to_checkpoint(run_dir, config.recover)
        progress.rewind()
        # the warm-up takes half a minute, so it follows the checks
        config.model.directories[config.model.path] = str(make(warm_up=app.warm_up))
        write_config(run)
        report.begin()
        key = os.environ.get(RUN_KEY_VARIABLE, "") if addresses else ""
        scheduler = config.launcher.scheduler(run_dir / "logs")
        launcher = Launcher(scheduler, config.launcher, parent, key, control)
        say = partial(progress.console.print, soft_wrap=True, markup=False)
        tracking = Tracking(config.trackers, run_dir, config.experiment, compose.to_plain(config), say)
        servers, waiting = server_jobs(run, devices), WaitingDisplay(progress, metrics)
        if sentence := expectation(app, run, devices.cores_each):
            say(sentence)
        waiting.show("starting servers and trainers" if servers else "starting trainers")
        try:
            with tracking:
                code = launcher.run(
                    servers,
                    lambda workers: [trainer_job(reference, run, devices, addresses or [w.address for w in workers])],
                    on_tick=waiting.tick,
                    together=True,
                    resume=Resume(
                        partial(progress_of, run_dir),
                        partial(_prepare_restart, run, waiting),
                        partial(step_seconds, run_dir),
                    ),
                )
        except RLError as error:
            if not (run_dir / "config.yaml").exists():
                raise LaunchError(
                    f"{run_dir}: the run directory was deleted during the run, so the run cannot be resumed. "
                    "Start the command again, and keep the directory until the run ends."
                ) from error
            raise
        finally:  # a killed trainer leaves its weights in memory
            shutil.rmtree(weights, ignore_errors=True)
    if code and not (run_dir / FINISHED).exists():
        print(f"Stopped. {resumption(run_dir)} Files: {run_dir}")
        return code
    (run_dir / FINISHED).touch()
    print("\n".join(app.summary(config, run_dir)))
    return 0


def _initial_model(app: App, run: Run[Any], say: Callable[[str], None], warm_up: bool) -> Path:
    """Return the directory of the initial policy; see `App.starts_from` and `make_model`."""
    config = run.config
    if app.starts_from and config.model.path == EMBEDDED:
        return newest_checkpoint(app.starts_from)
    return make_model(config.model, config.data, config.seed, app.form, app.lessons, warm_up, say)


def submission(reference: str, run: Run[Any], devices: Devices, argv: Sequence[str]) -> JobSubmission:
    """Return this command as a job, with an explicit run directory, because its default name may contain the time."""
    words = [word for word in argv if not word.startswith("run_dir=")]
    command = (
        sys.executable,
        "-m",
        "rl_apps.cli.main",
        "run",
        reference,
        *words,
        setting("run_dir", str(run.directory)),
    )
    roles = (*server_jobs(run, devices), trainer_job(reference, run, devices, []))
    return JobSubmission(command, run.directory, roles, run.config.launcher.grace_seconds)


def _clear_weights(run: Run[Any]) -> Path:
    """Delete the weights that a killed run left, since the servers would load them. Return their directory.

    Raises:
        ConfigError: another user created the directory.
    """
    from rl_contracts.weights.committed_record import make_private

    weights = weights_directory(run.directory, run.config.publish.route if run.layout.rollout else "")
    shutil.rmtree(weights, ignore_errors=True)
    if memory_of(run):  # before another user creates it
        try:
            make_private(weights)
        except WeightUpdateError as error:
            raise ConfigError(str(error)) from error
    return weights


def _prepare_restart(run: Run[Any], waiting: WaitingDisplay) -> int:
    """Prepare a restart after a loss of trainers, and return the step after which the run resumes.

    Raises:
        ConfigError: no recovery checkpoint exists, or servers that the user started serve a later version.
    """
    recover, step = run.config.recover, resumed_step(run.directory, run.config.recover)
    if not (step or (recover.regular and recover.resume)):
        raise ConfigError("no recovery checkpoint to resume from; recover.every_minutes=10 saves them")
    if attached(run.config, run.layout):
        check_attached(run, step)
    truncate_to_checkpoint(run.directory, recover)
    _clear_weights(run)
    (run.directory / FINISHED).unlink(missing_ok=True)
    waiting.begin()
    return step


def _run_preflight(app: App, run: Run[Any], say: Callable[[str], None]) -> list[str]:
    """Run the trial episode, score the gold answers and measure all examples, with the tokenizer of the run's model.

    Returns:
        sentences about the gold answers and the lengths of the examples.

    Raises:
        ConfigError, DataError, ModelError: see `run_trial_episode` and `App.measure`.
    """
    if run.config.model.chat_template:
        save_tokenizer(run.config.model, run.tokenizer)
    if run.layout.rollout is not None and run.config.rollout.trial_episode:
        say("running a trial episode on one example")
        run_trial_episode(run, app.form)
        if isinstance(run.config, GRPOConfig):
            try_policy_loss(run.config.algorithm.loss)
        say("scoring the gold answers")
        messages = check_golds(run, app.form) + try_evaluation_sets(run)
    else:
        messages = []
    say("measuring sequence lengths")
    return messages + app.measure(run)


class WaitingDisplay:
    """Report why a run waits, until it writes the record of its first step.

    Args:
        progress: display of the messages, and of the records later.
        metrics: file of the records.
    """

    def __init__(self, progress: RunProgress, metrics: Path) -> None:
        self._progress, self._metrics = progress, metrics
        self.begin()

    def begin(self) -> None:
        """Begin to wait: the run starts or restarts."""
        (self._metrics.parent / STAGE_FILE).unlink(missing_ok=True)  # of a killed trainer
        self._progress.rewind()
        self._before = _size(self._metrics)
        self._begin, self._next_message, self._starting = time.monotonic(), 0.0, set[str]()
        self._ended, self._message = False, ""
        self._old: dict[Path, int] = {}  # size of each log in bytes at the first tick

    def tick(self, workers: Sequence[Worker]) -> None:
        """Check the state of the workers and report why the run waits."""
        self._progress.tick()
        if self._ended:
            return
        evaluated = _size(self._metrics) > self._before
        if evaluated and not last_record(self._metrics.parent).get("evaluation"):
            self._ended = True
            return
        seconds, starting = time.monotonic() - self._begin, {w.name for w in workers if w.status == "starting"}
        running = {w.name for w in workers if w.status == "running"}
        ready, self._starting = self._starting & running, starting
        grown_logs = [w.log for w in workers if _size(w.log) > self._old.setdefault(w.log, _size(w.log))]
        stage = "" if starting else describe_stage(self._metrics.parent)
        if ready:
            self.show(f"{', '.join(sorted(ready))} ready after {seconds:.0f} s")
        if seconds >= self._next_message + MESSAGE_SECONDS:
            self._next_message = seconds
            pending = [w for w in workers if w.name in starting] or list(workers)
            names = ", ".join(w.name for w in pending[:4]) + (", ..." if len(pending) > 4 else "")
            what = f"for {names} to start" if starting else "for the first step"
            logs = (w.log for w in pending if w.log in grown_logs)
            last_line = next(
                (f"logs/{log.name}: {line}" for log in logs if (line := _last_log_line(log, self._old[log]))), ""
            )
            waiting = "" if evaluated else f"{seconds:.0f} s, waiting {what} ({last_line or 'see logs/'})"
            self.show(stage or waiting)
        if stage:
            self._message = ""
        self.show(self._message)  # a resumed run has records, so the live view would state that it is training

    def show(self, message: str) -> None:
        """Show a message until the next one, or until a stage of the trainers. An empty one shows nothing."""
        self._message = message
        if message:
            self._progress.print_message(message)


def _last_log_line(log: Path, offset: int) -> str:
    """Return the last line of a log after byte `offset`, shortened, without time, process and warnings of libraries."""
    lines = _LIBRARY_WARNING.sub("", _COLOR.sub("", tail(log, 20, offset))).splitlines()
    texts = (_LOG_PREFIX.sub("", line, count=1) for line in reversed(lines))
    return shorten(next(filter(str.strip, texts), ""), 100)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def trainer_job(reference: str, run: Run[Any], devices: Devices, servers: Sequence[str]) -> JobSpec:
    """Return the job of the trainer processes: `python -m rl_apps.run.worker` with the same app reference.

    Args:
        servers: addresses of the inference servers.
    """
    addresses, actor = ",".join(servers), run.layout.actor
    # with servers on other machines, NCCL detects its network interface unless the user sets one
    local = on_this_machine(attached(run.config, run.layout))
    env = {} if local else {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "")}
    shared = run.layout.rollout if run.layout.shared and not attached(run.config, run.layout) else None
    return JobSpec(
        role=actor.name,
        command=(sys.executable, "-m", "rl_apps.run.worker", reference, str(run.directory), run.device, addresses),
        count=actor.world_size,
        cpus=devices.cores_each,
        gpus=int(run.device == "cuda"),
        colocated_with=shared.name if shared else "",
        spmd=True,
        env=env,
        scratch=memory_of(run),
    )


def _plan(app: App, run: Run[Any], devices: Devices, notes: list[str], job: JobSubmission) -> str:
    """Return the plan of a run: a summary of seven lines, results of the checks, the processes, and the warnings."""
    assert run.config.launcher.options is not None
    script = run.config.launcher.options.script(job)
    warnings = [note for note in notes if note.startswith(WARNING)]
    parts = [
        *(f"{name}: {text}" for name, text in _plan_lines(app, run, devices).items()),
        "A step",
        *(f"  {note}" for note in notes if note not in warnings),
        f"Processes ({devices.cores_each} core(s) each)",
        *(f"  {text}" for role in job.roles for text in _locations(role, devices.places.get(role.role, ()))),
        *(f"  expected at {a}: {command_of(run, a, i)}" for i, a in enumerate(attached(run.config, run.layout))),
        *(["Batch script", *(f"  {text}".rstrip() for text in script.splitlines())] if script else []),
        *warnings,
    ]
    return "\n".join(parts)


def _plan_lines(app: App, run: Run[Any], devices: Devices) -> dict[str, str]:
    """Return the summary of a run: name of each line to its text."""
    config, data = run.config, run.config.data
    rows = load_rows(data, "train", app.form, config.seed)
    steps = config.steps_with(len(rows), app.form)
    passes = passes_over(config, app.form, rows)
    ends = f" (total_epochs={config.total_epochs})" if steps < config.total_steps else ""
    model = config.model.directory()
    placed = "" if model == config.model.path else f" ({model})"
    route = f", publish.route={config.publish.route}" if run.layout.rollout else ""
    return {
        "Devices": devices.sentence,
        "Dtype": describe_dtypes(config),
        "Data": f"{len(rows)} examples of {' '.join(filter(None, (data.name, data.path)))}, {data.batch_size} per step",
        "Steps": f"{steps}{ends}, {f'{passes:.2g}' if passes < 100 else f'{passes:,.0f}'} passes over the data",
        "Model": f"{config.model.path}{placed}, recipe {config.recipe or 'none'}",
        "Allocation": f"{config.allocation}, started by {config.launcher.kind}{route}",
        "Files": str(run.directory),
    }


def _locations(role: JobSpec, places: Sequence[str]) -> list[str]:
    """Return lines with the command of a role and the machines of its workers."""
    workers_by_place: dict[str, list[str]] = defaultdict(list)
    for index, place in enumerate(places):
        workers_by_place[place].append(f"{role.role}-{index}")
    gpus = f" with {role.gpus} GPU(s) each" if role.gpus else ""
    shortened = {
        place: [names[0], "...", names[-1]] if len(names) > 4 else names for place, names in workers_by_place.items()
    }
    lines = [f"  {place}: {', '.join(names)}{gpus}" for place, names in shortened.items()]
    return [f"{role.count} x {role.role}: {' '.join(role.command)}", *lines]
