"""Fault injection at random times: killed and stopped processes, a full disk, truncated recovery checkpoints.

The same command is restarted after each failure, as a user or a cluster would, until it succeeds.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_contracts.errors import RewardError
from rl_contracts.runtime.run_files import find_damage, read_json, recovery_checkpoint_steps
from rl_monitor.run_directory import names_of

EXPECTED_CAUSES = (
    "was killed by SIG",
    "FAILED, exit code 137",  # Slurm, if the launcher of a job was killed
    "Communication connection failure",  # srun, if a node was lost before its agent ran
    "sent no heartbeat for",
    "failed its readiness checks for",
    "No space left on device",
    "is in use by process",
    "is in use by trainers of a command that is gone",
)
"""Causes that a failed command may report."""
_ERROR = re.compile(r"^gsm8k-grpo: \w+: ", re.MULTILINE)
"""Start of the error message of a failed command."""
EARLY_FRACTION = 0.25
"""Fraction of the faults that do not wait for a training step after the previous fault."""
EXIT_SECONDS = 15.0
"""Seconds after the end of a run within which all its processes must exit."""
STUCK_SECONDS = 240.0
"""Seconds without a new step, fault or start after which a run counts as stuck."""


def reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    """Fail for a tenth of the prompts, and return equal rewards for a third, which dynamic sampling rejects."""
    return _reward(zlib.crc32(prompt.encode()) % 30, completion_ids)


def scene_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], *, answer: str, **_: Any
) -> float:
    """Fail for scenes with one shape, and return equal rewards for those with two; their questions are the same."""
    return _reward({"1": 0, "2": 3}.get(answer, 13), completion_ids)


def _reward(kind: int, completion_ids: list[int]) -> float:
    """Return a reward after a delay, which takes most of the time of a step, so that a run takes minutes."""
    time.sleep(0.05)
    if kind < 3:
        raise RewardError("injected fault")
    return 1.0 if kind < 13 else float(sum(completion_ids) % 2)


@dataclass
class ChaosRun:
    """A run and the faults injected into it.

    Args:
        command: training command, restarted after each failure.
        run_dir: run directory of the command.
        log: file for the output of the commands and the time of each fault.
        seed: seed of the kinds and times of the faults.
        faults: number of faults to inject.
        kinds: methods of this class that inject a fault. Each draw prefers kinds that were not injected yet.
        fault_interval: minimum and maximum seconds between two faults. Most faults also wait for a training step.
        once: whether to inject each kind at most once.
        disk: file system to fill, or None to fill none.
        kill_node: kills a random node of the run's cluster for a while and returns its name.
    """

    command: list[str]
    run_dir: Path
    log: Path
    seed: int
    faults: int
    kinds: tuple[str, ...]
    fault_interval: tuple[float, float] = (5.0, 15.0)
    once: bool = False
    disk: Path | None = None
    kill_node: Callable[[random.Random], str] | None = None

    def __post_init__(self) -> None:
        self.rng, self.injected, self.starts = random.Random(self.seed), Counter[str](), 0
        self.times: list[float] = []
        self._fault_step, self._skip_step, self.seconds = 0, False, 0.0
        self._shared = _shared_memory()

    def run(self, seconds: float) -> None:
        """Restart the command until it succeeds, and inject faults meanwhile.

        Raises:
            AssertionError: the run takes longer than `seconds`, is stuck, leaves processes behind, or fails for another
                reason than the faults.
        """
        begin = time.monotonic()
        self._next_fault = begin + self.rng.uniform(*self.fault_interval)
        code = None
        while code != 0:
            with self.log.open("a") as log:
                position = log.tell()
                log.write(f"--- start {self.starts + 1} after {time.monotonic() - begin:.0f} s\n")
                log.flush()
                self._command = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self.starts += 1
            code = self._supervise(begin + seconds)
            text = self.log.read_text(errors="replace")[position:]
            if code:
                was_killed = code == -signal.SIGKILL and self._killed_command
                assert was_killed or is_expected_failure(text), f"exit code {code} without a fault:\n{text[-6000:]}"
        self.seconds = time.monotonic() - begin
        while leftover := self._leftover_processes():
            assert time.monotonic() - begin < self.seconds + EXIT_SECONDS, f"leftover processes: {leftover}"
            time.sleep(0.1)

    def fault_intervals(self) -> list[int]:
        """Return the sorted seconds between consecutive faults."""
        return sorted(round(after - before) for before, after in pairwise(self.times))

    def missing_kinds(self) -> list[str]:
        """Return the kinds that were never possible. Each draw tries the kinds without an injection first."""
        return [kind for kind in self.kinds if not self.injected[kind]] if self.faults >= len(self.kinds) else []

    def leftover_shared_memory(self) -> list[str]:
        """Return the shared-memory segments created since the start, which killed processes may leave."""
        return sorted(_shared_memory() - self._shared)

    def _supervise(self, deadline: float) -> int:
        """Inject faults until the command ends, and return its exit code."""
        self._killed_command = False
        last_change, last_progress = time.monotonic(), (0, 0)
        try:
            while (code := self._command.poll()) is None:
                now, progress = time.monotonic(), (self._step(), self.injected.total())
                if progress != last_progress:
                    last_change, last_progress = now, progress
                assert now < deadline, f"deadline exceeded at step {progress[0]}: {self._tail()}"
                assert now - last_change < STUCK_SECONDS, f"stuck at step {progress[0]}: {self._tail()}"
                if (
                    self.injected.total() < self.faults
                    and now >= self._next_fault
                    and (progress[0] != self._fault_step or self._skip_step)
                ):
                    self._inject_fault()
                time.sleep(0.1)
        except BaseException:
            self._command.kill()  # its reaper kills its workers
            raise
        return code

    def _inject_fault(self) -> None:
        """Inject one fault, of the first kind that is possible now."""
        for kind in sorted(self.rng.sample(self.kinds, len(self.kinds)), key=lambda kind: self.injected[kind] > 0):
            if self.once and self.injected[kind]:
                continue
            begin = time.monotonic()
            if effect := getattr(self, kind)():
                self.injected[kind] += 1
                self.times.append(begin)
                self._next_fault, self._fault_step = (
                    time.monotonic() + self.rng.uniform(*self.fault_interval),
                    self._step(),
                )
                self._skip_step = self.rng.random() < EARLY_FRACTION
                with self.log.open("a") as log:
                    log.write(f"--- {time.strftime('%H:%M:%S')} {kind}: {effect} (step {self._step()})\n")
                return
        self._next_fault = time.monotonic() + 1.0

    def kill_server(self) -> str:
        return self._send("rollout", signal.SIGKILL)

    def stop_server(self) -> str:
        return self._send("rollout", signal.SIGSTOP)

    def kill_trainer(self) -> str:
        return self._send("actor", signal.SIGKILL)

    def stop_trainer(self) -> str:
        return self._send("actor", signal.SIGSTOP)

    def kill_reward(self) -> str:
        return self._send_reward(signal.SIGKILL)

    def stop_reward(self) -> str:
        return self._send_reward(signal.SIGSTOP)

    def kill_launcher(self) -> str:
        """Kill the command, or the launcher process of a job."""
        pid = self._launcher()
        self._killed_command = pid == self._command.pid
        return _signal(pid, signal.SIGKILL)

    def stop_launcher(self) -> str:
        """Stop the launcher for a while, then continue it or kill it, as a user might."""
        pid = self._launcher()
        if not (effect := _signal(pid, signal.SIGSTOP)):
            return ""
        seconds, kill = self.rng.uniform(2, 20), self.rng.random() < 0.5
        time.sleep(seconds)
        self._killed_command = kill and pid == self._command.pid
        _signal(pid, signal.SIGKILL if kill else signal.SIGCONT)
        return f"{effect} for {seconds:.0f} s, then {'killed' if kill else 'continued'}"

    def fill_disk(self) -> str:
        """Fill the disk completely for a while."""
        if self.disk is None or not self._has_step():
            return ""
        filler, seconds = self.disk / "filler", self.rng.uniform(3, 20)
        until = time.monotonic() + seconds
        try:
            with filler.open("ab", buffering=0) as file:
                while time.monotonic() < until and self._command.poll() is None:
                    with suppress(OSError):
                        while file.write(bytes(1 << 20)):
                            pass
                    with suppress(OSError):
                        while file.write(b"0"):
                            pass
                    time.sleep(0.05)
        finally:
            filler.unlink()
        return f"for {seconds:.0f} s"

    def truncate_checkpoint(self) -> str:
        """Truncate a file of the newest recovery checkpoint if there is an older one, then force a restart."""
        complete = [
            step
            for step in recovery_checkpoint_steps(self.run_dir)
            if not find_damage(self.run_dir / "recover" / f"step_{step}")
        ]
        if len(complete) < 2:
            return ""
        checkpoint = self.run_dir / "recover" / f"step_{complete[-1]}"
        file = self.rng.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
        os.truncate(file, self.rng.randrange(file.stat().st_size))
        kill = self.kill_launcher() if self.rng.random() < 0.5 else self.kill_trainer()
        return f"{file.relative_to(self.run_dir)}, then {kill}"

    def lose_node(self) -> str:
        """Kill a node of the cluster for a while."""
        return self.kill_node(self.rng) if self.kill_node and self._has_step() else ""

    def _send(self, role: str, number: int) -> str:
        """Send a signal to a random worker of a role. Return a description, or an empty text without a worker."""
        workers = [worker for worker in self._workers() if worker["name"].startswith(f"{role}-") and worker["pid"]]
        if not workers:
            return ""
        worker = self.rng.choice(workers)
        return (effect := _signal(worker["pid"], number)) and f"{worker['name']} {effect}"

    def _send_reward(self, number: int) -> str:
        trainers = {worker["pid"] for worker in self._workers() if worker["name"].startswith("actor-")}
        workers = [pid for pid in _pids() if "-m rl_contracts.reward_worker" in _command_line(pid)]
        pids = [pid for pid in workers if _parent(_parent(pid)) in trainers]  # the parent of a worker is its reaper
        return _signal(self.rng.choice(pids), number) if pids else ""

    def _workers(self) -> list[dict[str, Any]]:
        """Return the workers in the launcher's list."""
        with suppress(OSError, ValueError):
            workers: list[dict[str, Any]] = read_json(names_of(self.run_dir), "workers") or []
            return workers
        return []

    def _launcher(self) -> int:
        """Return the process id of the running launcher, or 0."""
        with suppress(OSError, ValueError):
            status = read_json(names_of(self.run_dir), "status") or {"state": "unknown"}
            return int(status["pid"]) if status["state"] in ("preparing", "starting", "running", "restarting") else 0
        return 0

    def _step(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.run_dir / "metrics.jsonl").read_bytes().splitlines()[-1])["step"])
        return 0

    def _has_step(self) -> bool:
        return self._step() > 0

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def _leftover_processes(self) -> list[str]:
        """Return the processes with the run directory in their command line, or with an open file in it."""
        run_dir = str(self.run_dir)
        return [
            f"{pid} {_command_line(pid)}" for pid in _pids() if run_dir in _command_line(pid) or _holds(pid, run_dir)
        ]


def is_expected_failure(text: str) -> bool:
    """Return whether the last error of a command, or its last line if there is no error, names an expected cause.

    Lines of injected faults start with `--- ` and are ignored.
    """
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("--- "))
    errors = [*_ERROR.finditer(text)]
    last = text[errors[-1].start() :] if errors else "".join(text.strip().splitlines()[-1:])
    return any(cause in last for cause in EXPECTED_CAUSES)


def _signal(pid: int, number: int) -> str:
    """Send a signal. Return a description, or an empty text if there is no such process."""
    try:
        if pid <= 0:
            return ""
        os.kill(pid, number)
    except ProcessLookupError:
        return ""
    return f"{signal.Signals(number).name} to {pid}"


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _holds(pid: int, directory: str) -> bool:
    with suppress(OSError):
        return any(os.readlink(file).startswith(directory) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def grpo_command(model: Path, run_dir: Path, prompts: int, epochs: int, **more: object) -> list[str]:
    """Return a training command with a small model and timeouts of seconds."""
    settings = {
        "run_dir": run_dir,
        "model.path": model,
        "recipe": "embedded",
        "cluster.device": "cpu",
        "allocation": "embedded:d2+fsdp:d2",
        "total_steps": 100_000,
        "total_epochs": epochs,
        "data.options.size": prompts,
        "data.batch_size": 4,
        "evaluation.examples": 0,
        "rollout.group_size": 3,
        "rollout.dynamic_sampling": "true",
        "rollout.generation.max_new_tokens": 24,
        "rollout.reward": "chaos:reward",
        "rollout.trial_episode": "false",
        "rollout.reward_timeout": 5,
        "rollout.failure_budget": 0.9,
        "rollout.client.progress_timeout": 13,
        "rollout.server.ready_timeout": 60,
        "checkpoint.save_batches": "true",
        "recover.every": 2,
        "launcher.health_timeout": 10,
    }
    arguments = [f"{key}={value}" for key, value in (settings | more).items()]
    return [str(Path(sys.executable).parent / "gsm8k-grpo"), *arguments]
