"""Slurm's commands, and parsers of their output.

Nothing here needs `sacct`, which many clusters lack.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import Node

ANSWER_SECONDS = 60.0
"""Timeout of a command, in seconds. The controller of a busy cluster is slow."""
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
"""States of finished jobs."""
USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
"""States of nodes that can run jobs, now or later."""


class SlurmError(LaunchError):
    """A Slurm command failed. `output` is the text of its error output."""

    def __init__(self, command: Sequence[str], output: str) -> None:
        self.output = " ".join(output.split())
        super().__init__(f"{command[0]} failed: {self.output}")


class SlurmMissingError(SlurmError):
    """Slurm's commands are not installed on this machine."""


class Step(Protocol):
    """Running `srun` process, with the job step that it started."""

    def poll(self) -> int | None:
        """Return the exit code of `srun`, or None while `srun` runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal to `srun`."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of `srun` and return its exit code. Raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """Kill `srun`, and with it the step."""

    def leave(self) -> None:
        """Kill `srun` but let the step run."""


class _Srun(subprocess.Popen[bytes]):
    """Implementation of `Step`."""

    def leave(self) -> None:
        """Kill `srun` together with its forked helper, which would otherwise end the step. Both share a group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Commands:
    """Runner of Slurm commands."""

    def output(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command and return its standard output.

        Raises:
            SlurmError: the command is not installed, fails, or takes longer than `ANSWER_SECONDS`.
        """
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, env=env
            )
        except FileNotFoundError:
            raise SlurmMissingError(command, f"no program {command[0]} on PATH") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SlurmError(command, str(error)) from error
        if done.returncode:
            raise SlurmError(command, done.stderr or f"exit code {done.returncode}")
        return done.stdout

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Step:
        """Start a command in the background and append its output to a file."""
        with log.open("ab") as file:
            return _Srun(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal must reach only the launcher
            )


@dataclass(frozen=True)
class Job:
    """State of a job, as Slurm reports it."""

    state: str
    """State, for example `PENDING`, `RUNNING` or `COMPLETED`."""
    reason: str
    """Reason why the job waits, or the text `None`."""
    restarts: int
    """Number of times that the job was requeued."""
    exit_code: int
    """Exit code of the script as in a shell: 128 plus the number of the signal that ended it."""

    @property
    def is_finished(self) -> bool:
        """True if the job has ended."""
        return self.state in ENDED


def fields(line: str) -> dict[str, str]:
    """Parse a line of `scontrol show ... -o` into its fields."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(.*?)(?=\s[A-Za-z][\w/:]*=|\s*$)", line))


def find_job(commands: Commands, job: str) -> Job | None:
    """Return the state of a job, or None if Slurm has no record of it.

    Raises:
        SlurmError: Slurm does not answer, or its reply has no state.
    """
    try:
        job_fields = fields(commands.output("scontrol", "show", "job", "-o", job).partition("\n")[0])
    except SlurmError as error:
        if "Invalid job id" in error.output:
            return None
        raise
    if "JobState" not in job_fields:
        raise SlurmError(("scontrol",), f"its output has no JobState for job {job}")
    code, _, signal_number = job_fields.get("ExitCode", "0:0").partition(":")
    exit_code = 128 + int(signal_number) if int(signal_number) else int(code)
    return Job(job_fields["JobState"], job_fields.get("Reason", "None"), int(job_fields.get("Restarts", 0)), exit_code)


@dataclass(frozen=True)
class Share:
    """Allocation of a job on machines with equal resources."""

    part: int
    """Index of the component of a heterogeneous job; 0 for other jobs."""
    hosts: str
    """Host list in Slurm's format, for example `g[1-2]`."""
    cores: int
    gpus: int


def shares(text: str) -> Iterator[Share]:
    """Yield the machines of an allocation, parsed from `scontrol show job -d -o`."""
    for line in text.splitlines():
        part = int(fields(line).get("HetJobOffset", 0))
        for hosts, ids, gres in re.findall(r"\sNodes=(\S+) CPU_IDs=(\S*) Mem=\S* GRES=(\S*)", line):
            yield Share(part, hosts, _count(ids), gpus_in(gres))


def gpus_in(gres: str) -> int:
    """Return the number of GPUs in generic resources (GRES) such as `gpu:a100:8(S:0-1),nvme:1`."""
    return sum(int(number) for number in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


def node_resources(text: str, partition: str, constraint: str) -> list[Node]:
    """Return the usable machines of a partition, sorted by GPUs and cores in descending order.

    Args:
        text: output of `sinfo -h -N -o "%P|%N|%c|%G|%T|%f"`.
        partition: name of the partition, or several separated by commas; empty for the default partition.
        constraint: feature that the machines must have. An expression with several features is ignored.
    """
    wanted_partitions, nodes = set(filter(None, partition.split(","))), {}
    for line in filter(None, text.splitlines()):
        name, node, cores, gres, state, features = line.strip().split("|")
        is_in_partition = name.rstrip("*") in wanted_partitions if wanted_partitions else name.endswith("*")
        has_feature = not re.fullmatch(r"[\w.-]+", constraint) or constraint in features.split(",")
        if is_in_partition and has_feature and not state.endswith("*") and state.rstrip("~#!%$@^+-") in USABLE:
            nodes[node] = Node(node, node, int(cores.rstrip("+")), gpus_in(gres))
    return sorted(nodes.values(), key=lambda node: (-node.gpus, -node.cores))


def partitions(text: str) -> list[str]:
    """Return the names of the partitions in the output of the `sinfo` command of `node_resources`."""
    return sorted({line.partition("|")[0].strip().rstrip("*") for line in text.splitlines() if line})


def _count(ids: str) -> int:
    """Return how many integers a list such as `0-3,8` has."""
    ranges = [text.partition("-") for text in ids.split(",") if text]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
