"""Faults at random moments in a run that goes on: processes killed or stopped, a full disk, a damaged recover point.

The same command is started again whenever it has ended, as a user or a cluster would, until it ends well.
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
    "FAILED, exit code 137",  # says Slurm of a job whose launcher was killed
    "Communication connection failure",  # says srun of a node that was lost before its agent ran
    "sent no heartbeat for",
    "failed its readiness checks for",
    "No space left on device",
    "is in use by process",
    "is in use by trainers of a command that is gone",
)
"""What a command may name as the cause when it ends otherwise than well."""
_ERROR = re.compile(r"^gsm8k-grpo: \w+: ", re.MULTILINE)
"""Where the error begins with which a command ends."""
EARLY_FRACTION = 0.25
"""Share of the faults that also come before the run has taken a step since the last one."""
EXIT_SECONDS = 15.0
"""Seconds after the end of a run in which all of its processes are gone."""
STUCK_SECONDS = 240.0
"""Seconds without a new step, a fault or a new start after which a run counts as stuck."""


def reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    """Of a third of the prompts all answers are as good, so that dynamic sampling rejects them; a tenth fail. Its time
    is most of a step's, so that a run goes on for minutes on any machine."""
    time.sleep(0.05)
    kind = zlib.crc32(prompt.encode()) % 30
    if kind < 3:
        raise RewardError("planted")
    return 1.0 if kind < 13 else float(sum(completion_ids) % 2)


@dataclass
class ChaosRun:
    """One run, and what is done to it.

    Args:
        command: started again and again.
        run_dir: that it is given.
        log: file for what the commands say, and what is done when.
        seed: of what is done, and when.
        faults: that are done, before the run is left in peace.
        kinds: methods of this class; those that have not happened yet come first, drawn with equal chances, and with
            `once` none comes twice.
        pause: least and most seconds from one fault to the next; more pass where the run first has to take a step.
        disk: file system of the run directory that may be filled; None: none may.
        lose: kills a node of the run's cluster, chosen by the generator, for a while; says which.
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
        self._at, self._early, self.seconds = 0, False, 0.0
        self._shared = _shared_memory()

    def run(self, seconds: float) -> None:
        """Start the command until it ends well, and plant faults meanwhile.

        Raises:
            AssertionError: it takes longer than `seconds`, ended for another reason than the faults, is stuck, or left
                processes behind.
        """
        begin = time.monotonic()
        self._next_fault = begin + self.rng.uniform(*self.fault_interval)
        code = None
        while code != 0:
            with self.log.open("a") as log:
                place = log.tell()
                log.write(f"--- start {self.starts + 1} after {time.monotonic() - begin:.0f} s\n")
                log.flush()
                self._command = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self.starts += 1
            code = self._supervise(begin + seconds)
            text = self.log.read_text(errors="replace")[place:]
            if code:
                own = code == -signal.SIGKILL and self._killed_command
                assert own or is_expected_failure(text), f"exit code {code}, of no fault:\n{text[-6000:]}"
        self.seconds = time.monotonic() - begin
        while left := self._leftover_processes():
            assert time.monotonic() - begin < self.seconds + EXIT_SECONDS, f"processes are left: {left}"
            time.sleep(0.1)

    def fault_intervals(self) -> list[int]:
        """Seconds from each fault to the next, in order of length."""
        return sorted(round(after - before) for before, after in pairwise(self.times))

    def missing_kinds(self) -> list[str]:
        """Kinds that could not be done, though each was tried before any other came a second time."""
        return [kind for kind in self.kinds if not self.injected[kind]] if self.faults >= len(self.kinds) else []

    def leftover_shared_memory(self) -> list[str]:
        """Names of the segments that came since, of whomever: killed processes leave some."""
        return sorted(_shared_memory() - self._shared)

    def _supervise(self, deadline: float) -> int:
        """Plant faults until the command ends; its exit code."""
        self._killed_command = False
        moved, seen = time.monotonic(), (0, 0)
        try:
            while (code := self._command.poll()) is None:
                now, reached = time.monotonic(), (self._step(), self.injected.total())
                if reached != seen:
                    moved, seen = now, reached
                assert now < deadline, f"not over in time, at step {reached[0]}: {self._tail()}"
                assert now - moved < STUCK_SECONDS, f"stuck at step {reached[0]}: {self._tail()}"
                if (
                    self.injected.total() < self.faults
                    and now >= self._next_fault
                    and (reached[0] != self._at or self._early)
                ):
                    self._inject_fault()
                time.sleep(0.1)
        except BaseException:
            self._command.kill()  # whose keeper ends the rest
            raise
        return code

    def _inject_fault(self) -> None:
        """One fault of those that are possible now."""
        for kind in sorted(self.rng.sample(self.kinds, len(self.kinds)), key=lambda kind: self.injected[kind] > 0):
            if self.once and self.injected[kind]:
                continue
            begin = time.monotonic()
            if what := getattr(self, kind)():
                self.injected[kind] += 1
                self.times.append(begin)
                self._next_fault, self._at = time.monotonic() + self.rng.uniform(*self.fault_interval), self._step()
                self._early = self.rng.random() < EARLY_FRACTION
                with self.log.open("a") as log:
                    log.write(f"--- {time.strftime('%H:%M:%S')} {kind}: {what} (step {self._step()})\n")
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
        """The command itself, or the process in a job that launches."""
        pid = self._launcher()
        self._killed_command = pid == self._command.pid
        return _signal(pid, signal.SIGKILL)

    def stop_launcher(self) -> str:
        """For a while; then it goes on, or is killed as somebody would who finds it so."""
        pid = self._launcher()
        if not (what := _signal(pid, signal.SIGSTOP)):
            return ""
        seconds, kill = self.rng.uniform(2, 20), self.rng.random() < 0.5
        time.sleep(seconds)
        self._killed_command = kill and pid == self._command.pid
        _signal(pid, signal.SIGKILL if kill else signal.SIGCONT)
        return f"{what} for {seconds:.0f} s, then {'killed' if kill else 'continued'}"

    def fill_disk(self) -> str:
        """Until nothing can be written, for a while."""
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
        """The newest recover point, where there are others; somebody goes on from it at once."""
        whole = [
            step
            for step in recovery_checkpoint_steps(self.run_dir)
            if not find_damage(self.run_dir / "recover" / f"step_{step}")
        ]
        if len(whole) < 2:
            return ""
        point = self.run_dir / "recover" / f"step_{whole[-1]}"
        file = self.rng.choice(sorted(path for path in point.rglob("*") if path.is_file()))
        os.truncate(file, self.rng.randrange(file.stat().st_size))
        then = self.kill_launcher() if self.rng.random() < 0.5 else self.kill_trainer()
        return f"{file.relative_to(self.run_dir)}, then {then}"

    def lose_node(self) -> str:
        """A whole node of the cluster, which comes back after a while."""
        return self.kill_node(self.rng) if self.kill_node and self._has_step() else ""

    def _send(self, role: str, number: int) -> str:
        """A signal to some worker of a role; what was done, empty where there is none."""
        workers = [worker for worker in self._workers() if worker["name"].startswith(f"{role}-") and worker["pid"]]
        if not workers:
            return ""
        worker = self.rng.choice(workers)
        return (what := _signal(worker["pid"], number)) and f"{worker['name']} {what}"

    def _send_reward(self, number: int) -> str:
        trainers = {worker["pid"] for worker in self._workers() if worker["name"].startswith("actor-")}
        workers = [pid for pid in _pids() if "-m rl_contracts.reward_worker" in _command_line(pid)]
        pids = [pid for pid in workers if _parent(_parent(pid)) in trainers]  # its parent is its reaper
        return _signal(self.rng.choice(pids), number) if pids else ""

    def _workers(self) -> list[dict[str, Any]]:
        """What runs, as the launcher says."""
        with suppress(OSError, ValueError):
            workers: list[dict[str, Any]] = read_json(names_of(self.run_dir), "workers") or []
            return workers
        return []

    def _launcher(self) -> int:
        """0 where there is none that the run knows of."""
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
        """Processes of the run: its directory is in their command, or they hold a file in it."""
        place = str(self.run_dir)
        return [f"{pid} {_command_line(pid)}" for pid in _pids() if place in _command_line(pid) or _holds(pid, place)]


def is_expected_failure(text: str) -> bool:
    """Whether the error with which a command ended, the last that it said, names what was done to it; where there is
    none, its last line. What was done to it is written among its lines, and may come last."""
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("--- "))
    errors = [*_ERROR.finditer(text)]
    last = text[errors[-1].start() :] if errors else "".join(text.strip().splitlines()[-1:])
    return any(cause in last for cause in EXPECTED_CAUSES)


def _signal(pid: int, number: int) -> str:
    """What was done; empty where there is no such process."""
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


def _holds(pid: int, place: str) -> bool:
    with suppress(OSError):
        return any(os.readlink(file).startswith(place) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def grpo_command(model: Path, run_dir: Path, prompts: int, epochs: int, **more: object) -> list[str]:
    """The real command, on a small model; it notices in seconds what hangs."""
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
        "evaluation.rows": 0,
        "rollout.group_size": 3,
        "rollout.dynamic_sampling": "true",
        "rollout.generation.max_new_tokens": 24,
        "rollout.reward": "chaos:reward",
        "rollout.rehearsal": "false",
        "rollout.reward_timeout": 5,
        "rollout.failure_budget": 0.9,
        "rollout.client.probe_timeout": 2,
        "rollout.client.progress_timeout": 12,
        "rollout.client.rejoin_timeout": 60,
        "checkpoint.save_batches": "true",
        "recover.every": 2,
        "recover.keep": 3,
        "launcher.health_timeout": 10,
        "launcher.health_interval": 1,
    }
    words = [f"{key}={value}" for key, value in (settings | more).items()]
    return [str(Path(sys.executable).parent / "gsm8k-grpo"), *words]
