"""Slurm's commands, and what they print. There is no `sacct` on many clusters, so nothing here asks for it."""

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
"""Time for a command; the controller of a busy cluster is slow."""
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
"""States of jobs that are over."""
USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
"""States of nodes that run jobs, now or later."""


class SlurmError(LaunchError):
    """One of Slurm's commands failed. `said`: its own words."""

    def __init__(self, command: Sequence[str], output: str) -> None:
        self.said = " ".join(output.split())
        super().__init__(f"{command[0]} failed: {self.said}")


class SlurmMissingError(SlurmError):
    """Slurm's commands are not on this machine."""


class Step(Protocol):
    """What was started by `srun`."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def send_signal(self, number: int) -> None:
        """To `srun`."""

    def wait(self, timeout: float | None = None) -> int:
        """For its end; raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """`srun`, and with it its step."""

    def leave(self) -> None:
        """End `srun`, but not its step."""


class _Srun(subprocess.Popen[bytes]):
    """See `Step`."""

    def leave(self) -> None:
        """With the process that it forks, and that ends the step where it dies; both are of one group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Commands:
    """Runs Slurm's commands."""

    def output(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """What a command prints.

        Raises:
            SlurmError: it is not there, fails, or does not answer.
        """
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, env=env
            )
        except FileNotFoundError:
            raise SlurmMissingError(command, f"there is no {command[0]} on PATH") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SlurmError(command, str(error)) from error
        if done.returncode:
            raise SlurmError(command, done.stderr or f"exit code {done.returncode}")
        return done.stdout

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Step:
        """Start a command that goes on, with its output at the end of a file."""
        with log.open("ab") as file:
            return _Srun(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is the launcher's
            )


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job."""

    state: str
    """Such as `PENDING`, `RUNNING`, `COMPLETED`."""
    reason: str
    """Why it waits; `None` where nothing is said."""
    restarts: int
    """How often it was requeued."""
    exit_code: int
    """Of its script, as a shell gives it: 128 and the signal where one ended it."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes."""
        return self.state in ENDED


def fields(line: str) -> dict[str, str]:
    """A line of `scontrol show ... -o`."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(.*?)(?=\s[A-Za-z][\w/:]*=|\s*$)", line))


def find_job(commands: Commands, job: str) -> Job | None:
    """The state of a job; None: Slurm has forgotten it.

    Raises:
        SlurmError: it cannot be asked now.
    """
    try:
        found = fields(commands.output("scontrol", "show", "job", "-o", job).partition("\n")[0])
    except SlurmError as error:
        if "Invalid job id" in error.said:
            return None
        raise
    if "JobState" not in found:
        raise SlurmError(("scontrol",), f"it says nothing of the state of job {job}")
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    exit_code = 128 + int(number) if int(number) else int(code)
    return Job(found["JobState"], found.get("Reason", "None"), int(found.get("Restarts", 0)), exit_code)


@dataclass(frozen=True)
class Share:
    """What a job has on some machines that have the same."""

    part: int
    """Of a heterogeneous job; else 0."""
    hosts: str
    """Slurm's list of the machines."""
    cores: int
    gpus: int


def shares(text: str) -> Iterator[Share]:
    """The machines of an allocation, from `scontrol show job -d -o`."""
    for line in text.splitlines():
        part = int(fields(line).get("HetJobOffset", 0))
        for hosts, ids, gres in re.findall(r"\sNodes=(\S+) CPU_IDs=(\S*) Mem=\S* GRES=(\S*)", line):
            yield Share(part, hosts, _count(ids), gpus_in(gres))


def gpus_in(gres: str) -> int:
    """GPUs in a list of generic resources, such as `gpu:a100:8(S:0-1),nvme:1`."""
    return sum(int(number) for number in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


def node_resources(text: str, partition: str, constraint: str) -> list[Node]:
    """The machines of a partition that run jobs, those with the most GPUs and cores first.

    Args:
        text: from `sinfo -h -N -o "%P|%N|%c|%G|%T|%f"`.
        partition: its name, or several with commas; empty: the default one.
        constraint: a feature that machines must have; a combination of several is not looked at.
    """
    wanted, found = set(filter(None, partition.split(","))), {}
    for line in filter(None, text.splitlines()):
        name, node, cores, gres, state, features = line.strip().split("|")
        inside = name.rstrip("*") in wanted if wanted else name.endswith("*")
        fits = not re.fullmatch(r"[\w.-]+", constraint) or constraint in features.split(",")
        if inside and fits and not state.endswith("*") and state.rstrip("~#!%$@^+-") in USABLE:
            found[node] = Node(node, node, int(cores.rstrip("+")), gpus_in(gres))
    return sorted(found.values(), key=lambda node: (-node.gpus, -node.cores))


def partitions(text: str) -> list[str]:
    """The names in the same text."""
    return sorted({line.partition("|")[0].strip().rstrip("*") for line in text.splitlines() if line})


def _count(ids: str) -> int:
    """How many numbers are in `0-3,8`."""
    ends = [part.partition("-") for part in ids.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
