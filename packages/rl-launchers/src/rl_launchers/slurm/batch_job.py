"""Slurm batch job of a run: render its script, submit it and follow it to its end.

In the run directory, `slurm/` has the script (`job.sh`) and the id of the job (`job.json`). The script writes the
job id and the exit code to `ended`, so that they are known even if Slurm has deleted its record of the job.
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
"""Seconds added to the grace period for the signal before the time limit, since Slurm times this signal only to the
minute."""
POLL_SECONDS = 5.0
"""Seconds between two queries of Slurm's controller, which all users of the cluster share."""
CONTACT_SECONDS = 600.0
"""Seconds without a reply from the controller after which following a job fails."""
LOG_EVERY = 0.2
"""Seconds between two reads of the log."""
LAST_LINES = 10
"""Number of earlier log lines shown when following an existing job."""

REMEDIES = {
    "partition": "Set launcher.options.partition to one that `sinfo` shows.",
    "account": "Set launcher.options.account to one that you may use.",
    "qos": "Set launcher.options.sbatch_args=[--qos=NAME], with a name that you may use.",
    "reservation": "Set launcher.options.sbatch_args=[--reservation=NAME], with a name of `scontrol show reservation`.",
    "feature": "Set launcher.options.constraint to features that `sinfo -o %f` shows.",
    "time": "Set launcher.options.time_limit, for example to 4:00:00, within the partition's limit.",
    "node configuration": "Lower cluster.nodes, cluster.cores or cluster.devices to what `sinfo -N -l` shows.",
}
"""Remedies by a word in the error message of `sbatch`."""


def render(submission: JobSubmission, template: str, variables: Mapping[str, object]) -> str:
    """Render the batch script.

    Args:
        submission: the run.
        template: path of a Jinja template; empty for `TEMPLATE`.
        variables: template variables `parts` (for each component of the job, its list of `sbatch` options), `requeue`,
            `max_requeues`, `spare_nodes` and `setup`.

    Raises:
        ConfigError: the template cannot be read or rendered, for example because it uses an unknown variable.
    """
    import jinja2

    file, run_dir = Path(template or TEMPLATE), submission.run_dir
    if "\\" in str(run_dir):
        raise ConfigError(
            f"run_dir={run_dir} must not contain a backslash, which Slurm interprets. Choose another run_dir."
        )
    values = {
        "template": file.name,
        "name": run_dir.name,
        "log": str(_log_path(run_dir)).replace("%", "%%"),  # Slurm replaces %j and similar patterns
        "directory": Path.cwd(),
        "ended": run_dir / "slurm" / "ended",
        "key_file": run_dir / "slurm" / "key" if os.environ.get(RUN_KEY_VARIABLE) else "",
        "warning_seconds": int(submission.grace) + EARLY,
        "command": shlex.join(submission.command),
    }
    try:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters["quote"] = lambda value: shlex.quote(str(value))
        return environment.from_string(file.read_text(encoding="utf-8")).render(values | dict(variables)) + "\n"
    except (OSError, jinja2.TemplateError) as error:
        raise ConfigError(f"launcher.options.template={file}: cannot render this template: {error}") from error


def submit(submission: JobSubmission, script: str, commands: Commands | None = None) -> int:
    """Submit a run and follow its job; see `SchedulerConfig.submit`."""
    commands, run_dir = commands or Commands(), submission.run_dir
    directory = run_dir / "slurm"
    directory.mkdir(parents=True, exist_ok=True)
    _log_path(run_dir).parent.mkdir(exist_ok=True)
    with (directory / "submit.lock").open("w") as lock:
        with suppress(OSError):  # a file system without lock support
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            is_existing = state(run_dir, commands)  # a concurrent command may have submitted the run
            job = _read_job_id(run_dir) if is_existing else _run_sbatch(directory, submission, script, commands)
        except ConfigError:
            (directory / "key").unlink(missing_ok=True)
            raise
    log = _log_path(run_dir)
    _print(f"job {job} {'already exists' if is_existing else 'was submitted'}; its script is {directory / 'job.sh'}")
    return follow(commands, job, run_dir, log.stat().st_size if log.exists() else 0)


def _run_sbatch(directory: Path, submission: JobSubmission, script: str, commands: Commands) -> str:
    """Run `sbatch` and return the id of the new job."""
    (directory / "job.sh").write_text(script, encoding="utf-8")
    (directory / "ended").unlink(missing_ok=True)
    env = dict(os.environ)
    if key := env.pop(RUN_KEY_VARIABLE, ""):  # Slurm would store the environment with the job
        (directory / "key").unlink(missing_ok=True)
        with open(os.open(directory / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
    try:
        job = commands.output("sbatch", "--parsable", str(directory / "job.sh"), env=env).strip().partition(";")[0]
    except SlurmMissingError as error:
        raise ConfigError(
            f"launcher.kind=slurm: {error.output}. Run this on a machine with Slurm's commands, or set launcher=local."
        ) from error
    except SlurmError as error:
        message = re.sub(r"sbatch: (error: )?", "", error.output)
        remedies = (text for word, text in REMEDIES.items() if word in message.lower())
        remedy = next(remedies, f"Change launcher.options; the script is {directory / 'job.sh'}.")
        raise ConfigError(f"launcher.kind=slurm: sbatch rejected the job: {message.rstrip('.')}. {remedy}") from error
    (directory / "job.json").write_text(json.dumps({"job": job, "command": submission.command}), encoding="utf-8")
    return job


def attach(run_dir: Path, commands: Commands | None = None) -> int | None:
    """Follow a job that was submitted earlier and has not ended; see `SchedulerConfig.attach`."""
    commands = commands or Commands()
    try:
        job = _read_job_id(run_dir)
        status = find_job(commands, job)
    except (FileNotFoundError, ValueError, SlurmMissingError):
        return None
    if status is None or status.is_finished:
        return None
    log = _log_path(run_dir)
    _print(f"job {job} of this run already exists; following it. The last lines of {log}:")
    _print(run_files.tail(log, LAST_LINES))
    return follow(commands, job, run_dir, log.stat().st_size if log.exists() else 0)


def state(run_dir: Path, commands: Commands | None = None) -> str:
    """Return the state of a run's job; see `SchedulerConfig.job_state`."""
    try:
        job = _read_job_id(run_dir)
        status = find_job(commands or Commands(), job)
    except (FileNotFoundError, ValueError, SlurmError):
        return ""
    if status is None or status.is_finished:
        return ""
    reason = f", Slurm's reason is {status.reason}" if status.reason != "None" else ""
    return f"{status.state.lower()} (job {job}{reason})"


def cancel(run_dir: Path, commands: Commands | None = None) -> None:
    """Cancel the job of a run; see `SchedulerConfig.cancel`."""
    (commands or Commands()).output("scancel", _read_job_id(run_dir))
    (run_dir / "slurm" / "key").unlink(missing_ok=True)


def follow(commands: Commands, job: str, run_dir: Path, position: int) -> int:
    """Print the log of a job until the job has ended.

    Args:
        commands: runner of Slurm commands.
        job: id of the job.
        run_dir: directory of the run.
        position: offset in the log, in bytes, from which to print.

    Returns:
        the exit code of the job, or 130 after Ctrl-C, which does not stop the job.

    Raises:
        LaunchError: the controller did not answer for `CONTACT_SECONDS`, or the outcome of the job is unknown.
    """
    description, last_reply, reader = "", time.monotonic(), _Reader(_log_path(run_dir), position)
    try:
        while True:
            try:
                status, last_reply = find_job(commands, job), time.monotonic()
            except SlurmError as error:
                if time.monotonic() - last_reply > CONTACT_SECONDS:
                    raise LaunchError(
                        f"{error} (for {CONTACT_SECONDS:g} s). Job {job} may still run; "
                        "the same command follows it again."
                    ) from error
                status = Job("UNKNOWN", error.output, 0, 0)
            if status is None or status.is_finished:
                return _finish(job, status, run_dir, reader)
            if description != (description := _describe(status)):
                _print(f"job {job}: {description}")
            deadline = time.monotonic() + POLL_SECONDS
            while (remaining := deadline - time.monotonic()) > 0:
                reader.show()
                time.sleep(min(LOG_EVERY, remaining))
    except KeyboardInterrupt:
        _print(
            f"\nJob {job} continues, but is no longer followed. The same command follows it again; `rl logs {run_dir}` "
            f"shows its logs, `rl stop {run_dir}` stops it.",
        )
        return 130


def _finish(job: str, last_state: Job | None, run_dir: Path, reader: _Reader) -> int:
    """Print the outcome of a finished job and return its exit code."""
    time.sleep(LOG_EVERY)  # a shared file system may show the last lines late
    reader.show()
    code: int | None = None
    with suppress(FileNotFoundError, ValueError):
        *job_ids, code_text = (run_dir / "slurm" / "ended").read_text().split()
        code = int(code_text) if job_ids in ([], [job]) else None
    if last_state is None and code is None:
        raise LaunchError(
            f"the outcome of job {job} is unknown: Slurm has no record of it, so it was cancelled or killed. The same "
            f"command submits it again. Log: {_log_path(run_dir)}"
        )
    state = last_state.state if last_state else "ended"
    if code is None:
        code = 0 if state == "COMPLETED" else (last_state.exit_code if last_state else 0) or 1
    _print(f"job {job}: {state}, exit code {code}")
    return code


def _describe(job: Job) -> str:
    restarts = f", restarted {job.restarts} time(s)" if job.restarts else ""
    return job.state + (f" ({job.reason})" if job.reason != "None" else "") + restarts


def _read_job_id(run_dir: Path) -> str:
    """Return the id of a run's job.

    Raises:
        FileNotFoundError, ValueError: no job of this run was submitted.
    """
    return str(json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))["job"])


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _log_path(run_dir: Path) -> Path:
    return run_dir / "logs" / "launcher.log"


class _Reader:
    """Prints the bytes that are appended to a file."""

    def __init__(self, file: Path, position: int) -> None:
        self._file, self._position = file, position

    def show(self) -> None:
        """Print the text that was appended since the last call."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._position)
            while chunk := file.read(1 << 16):
                self._position += len(chunk)
                sys.stdout.write(chunk.decode(errors="replace"))
        sys.stdout.flush()
