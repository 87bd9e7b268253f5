"""A run as a job of Slurm: its batch script, handing it in, and following it to its end.

In the run directory `slurm/` holds `job.sh`, the script; `job.json`, the number of the job; and `ended`, which the
script writes: that number and the exit code, so that it is known when Slurm has forgotten the job.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.runtime import run_files
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSubmission
from rl_launchers.slurm.commands import Commands, Job, SlurmError, SlurmMissingError, find_job

TEMPLATE = Path(__file__).with_name("templates") / "slurm.sh.jinja"
EARLY = 60
"""Seconds by which Slurm's warning of the time limit may come early or late."""
CONTACT_SECONDS = 600.0
"""Seconds without an answer of the controller after which a job is not followed any more."""
LOG_EVERY = 0.2
"""Seconds between two looks at the log."""
LAST_LINES = 10
"""Lines of the log shown of a job that was there before."""

REMEDIES = {
    "partition": "Set launcher.options.partition to one that `sinfo` shows.",
    "account": "Set launcher.options.account to one that you may use.",
    "qos": "Set launcher.options.qos to one that you may use.",
    "reservation": "Set launcher.options.reservation to one that `scontrol show reservation` shows.",
    "feature": "Set launcher.options.constraint to features that `sinfo -o %f` shows.",
    "time": "Set launcher.options.time_limit, for example to 4:00:00, within the partition's limit.",
    "node configuration": "Lower launcher.options.nodes, cores_per_node or gpus_per_node to what `sinfo -N -l` shows.",
}
"""What to do, by a word of what `sbatch` says."""


def render(submission: JobSubmission, template: str, variables: Mapping[str, object]) -> str:
    """The batch script.

    Args:
        submission: the run.
        template: file; empty: ours.
        variables: `parts` (options of `sbatch`, a list for each part of the job), `requeue`, `max_requeues`,
            `spare_nodes` and `setup`, as in ours.

    Raises:
        ConfigError: the template cannot be read, or asks for what there is not.
    """
    import jinja2

    file, run_dir = Path(template or TEMPLATE), submission.run_dir
    if "\\" in str(run_dir):
        raise ConfigError(
            f"run_dir={run_dir}: expected no backslash, in which Slurm sees more. Choose another run_dir."
        )
    own = {
        "template": file.name,
        "name": run_dir.name,
        "log": str(_log(run_dir)).replace("%", "%%"),  # Slurm fills in %j and others
        "directory": Path.cwd(),
        "ended": run_dir / "slurm" / "ended",
        "key_file": run_dir / "slurm" / "key" if os.environ.get(RUN_KEY_VARIABLE) else "",
        "warning_seconds": int(submission.grace) + EARLY,
        "command": shlex.join(submission.command),
    }
    try:
        made = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        made.filters["quote"] = lambda value: shlex.quote(str(value))
        return made.from_string(file.read_text(encoding="utf-8")).render(own | dict(variables)) + "\n"
    except (OSError, jinja2.TemplateError) as error:
        raise ConfigError(f"launcher.options.template={file}: it cannot be made into a script: {error}") from error


def submit(submission: JobSubmission, script: str, poll_seconds: float, commands: Commands | None = None) -> int:
    """Hand a run in and follow it; see `SchedulerConfig.submit`."""
    commands, run_dir = commands or Commands(), submission.run_dir
    directory = run_dir / "slurm"
    directory.mkdir(parents=True, exist_ok=True)
    _log(run_dir).parent.mkdir(exist_ok=True)
    with (directory / "submit.lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            there = state(run_dir, commands)  # another command was faster
            job = _number(run_dir) if there else _submission_error(directory, submission, script, commands)
        except ConfigError:
            (directory / "key").unlink(missing_ok=True)
            raise
    log = _log(run_dir)
    _say(f"job {job} {'is there already' if there else 'was submitted'}; its script is {directory / 'job.sh'}")
    return follow(commands, job, run_dir, poll_seconds, log.stat().st_size if log.exists() else 0)


def _submission_error(directory: Path, submission: JobSubmission, script: str, commands: Commands) -> str:
    """The number of the job that `sbatch` made."""
    (directory / "job.sh").write_text(script, encoding="utf-8")
    (directory / "ended").unlink(missing_ok=True)
    env = dict(os.environ)
    if key := env.pop(RUN_KEY_VARIABLE, ""):  # of servers that run already; Slurm would keep it with the job
        (directory / "key").unlink(missing_ok=True)
        with open(os.open(directory / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
    try:
        job = commands.output("sbatch", "--parsable", str(directory / "job.sh"), env=env).strip().partition(";")[0]
    except SlurmMissingError as error:
        raise ConfigError(
            f"launcher.kind=slurm: {error.said}. Run this where Slurm's commands are, or set launcher=local."
        ) from error
    except SlurmError as error:
        said = re.sub(r"sbatch: (error: )?", "", error.said)
        found = (text for word, text in REMEDIES.items() if word in said.lower())
        remedy = next(found, f"Change launcher.options; the script is {directory / 'job.sh'}.")
        raise ConfigError(f"launcher.kind=slurm: sbatch refused the job: {said.rstrip('.')}. {remedy}") from error
    (directory / "job.json").write_text(json.dumps({"job": job, "command": submission.command}), encoding="utf-8")
    return job


def attach(run_dir: Path, poll_seconds: float, commands: Commands | None = None) -> int | None:
    """Follow a job that was handed in before and lives; see `SchedulerConfig.attach`."""
    commands = commands or Commands()
    try:
        job = _number(run_dir)
        found = find_job(commands, job)
    except (FileNotFoundError, ValueError, SlurmMissingError):
        return None
    if found is None or found.is_finished:
        return None
    log = _log(run_dir)
    _say(f"job {job} of this run is there already; following it. The last lines of {log}:")
    _say(run_files.tail(log, LAST_LINES))
    return follow(commands, job, run_dir, poll_seconds, log.stat().st_size if log.exists() else 0)


def state(run_dir: Path, commands: Commands | None = None) -> str:
    """See `SchedulerConfig.job_state`."""
    try:
        job = _number(run_dir)
        found = find_job(commands or Commands(), job)
    except (FileNotFoundError, ValueError, SlurmError):
        return ""
    if found is None or found.is_finished:
        return ""
    reason = f", Slurm's reason is {found.reason}" if found.reason != "None" else ""
    return f"{found.state.lower()} (job {job}{reason})"


def cancel(run_dir: Path, commands: Commands | None = None) -> None:
    """See `SchedulerConfig.cancel`."""
    (commands or Commands()).output("scancel", _number(run_dir))
    (run_dir / "slurm" / "key").unlink(missing_ok=True)


def follow(commands: Commands, job: str, run_dir: Path, poll_seconds: float, position: int) -> int:
    """Print what a job logs, until it has ended.

    Args:
        commands: Slurm's.
        job: its number.
        run_dir: of the run.
        poll_seconds: between two questions to the controller.
        position: byte of the log from which on it is printed.

    Returns:
        its exit code, or 130 after a Ctrl-C, which leaves the job alone.

    Raises:
        LaunchError: the controller did not answer for long, or nobody knows how the job ended.
    """
    told, heard, reader = "", time.monotonic(), _Reader(_log(run_dir), position)
    try:
        while True:
            try:
                found, heard = find_job(commands, job), time.monotonic()
            except SlurmError as error:
                if time.monotonic() - heard > CONTACT_SECONDS:
                    raise LaunchError(
                        f"{error} (for {CONTACT_SECONDS:g} s). Job {job} may go on; the same command follows it again."
                    ) from error
                found = Job("UNKNOWN", error.said, 0, 0)
            if found is None or found.is_finished:
                return _end(job, found, run_dir, reader)
            if told != (told := _describe(found)):
                _say(f"job {job}: {told}")
            deadline = time.monotonic() + poll_seconds
            while (left := deadline - time.monotonic()) > 0:
                reader.show()
                time.sleep(min(LOG_EVERY, left))
    except KeyboardInterrupt:
        _say(
            f"\nJob {job} goes on without being followed. The same command follows it again; `rl logs {run_dir}` shows "
            f"its logs, `rl stop {run_dir}` stops it.",
        )
        return 130


def _end(job: str, found: Job | None, run_dir: Path, reader: _Reader) -> int:
    """The exit code of a job that is over."""
    time.sleep(LOG_EVERY)  # a shared file system
    reader.show()
    code: int | None = None
    with suppress(FileNotFoundError, ValueError):
        *whose, said = (run_dir / "slurm" / "ended").read_text().split()
        code = int(said) if whose in ([], [job]) else None
    if found is None and code is None:
        raise LaunchError(
            f"Slurm has forgotten job {job}, and it did not say how it ended: it was cancelled or killed. The same "
            f"command starts it again. Log: {_log(run_dir)}"
        )
    state = found.state if found else "over"
    if code is None:
        code = 0 if state == "COMPLETED" else (found.exit_code if found else 0) or 1
    _say(f"job {job}: {state}, exit code {code}")
    return code


def _describe(job: Job) -> str:
    again = f", started again {job.restarts} time(s)" if job.restarts else ""
    return job.state + (f" ({job.reason})" if job.reason != "None" else "") + again


def _number(run_dir: Path) -> str:
    """Of the job of a run.

    Raises:
        FileNotFoundError, ValueError: there is none.
    """
    return str(json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))["job"])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _log(run_dir: Path) -> Path:
    return run_dir / "logs" / "launcher.log"


class _Reader:
    """Prints what is added to a file."""

    def __init__(self, file: Path, position: int) -> None:
        self._file, self._position = file, position

    def show(self) -> None:
        """What is new."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._position)
            while part := file.read(1 << 16):
                self._position += len(part)
                sys.stdout.write(part.decode(errors="replace"))
        sys.stdout.flush()
