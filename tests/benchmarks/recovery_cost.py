"""Cost of recovery checkpoints; used by `recovery.py`.

An `FSDPEngine` on the CPU trains as in a run, with a recovery checkpoint every `INTERVAL` steps
(`rl_trainers.RecoveryCheckpoints`). `blocked_s` is the additional time of `after_step` when a checkpoint is due.
`writer_cpu_s` is the CPU time of the writer thread. `cost` is their sum divided by the time of `INTERVAL` steps without
checkpoints. It is measured for the demo's model and batch, and for a larger model. `min_interval_steps` is the smallest
interval at which the cost stays within the limit.

The peers save the same state of the same engine while nothing else runs: `torch.save` followed by fsync, and
`async_save` of `torch.distributed.checkpoint`. Their CPU time is that of the whole process.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

INTERVAL = 20
"""Steps between two recovery checkpoints."""
REQUIRED = 0.02
"""Limit of the cost."""
SIZES = {
    # sequences, longest sequence, vocabulary, hidden
    "demo": (256, 96, 259, 64),
    "larger": (32, 256, 8192, 384),
}


def thread_seconds(name: str) -> float:
    """Return the CPU seconds so far of all threads with this name."""
    clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.name == name and t.ident]
    return sum(time.clock_gettime(clock) for clock in clocks)


class RolloutState:
    """Component whose state is as large as the groups that wait for a batch."""

    def __init__(self, rows: int) -> None:
        import torch

        self.groups = torch.zeros(rows, 64, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"step": 1, "groups": self.groups, "in_flight": [{"prompt": "a word problem" * 10}] * 100}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def measure(size: str, checkpoints: int, directory: Path, quick: bool = False) -> dict[str, Any]:
    """Measure one size: steps, recovery checkpoints and the peers."""
    from train_step import EngineSide, make_workload

    from rl_trainers import RecoverConfig, RecoveryCheckpoints

    rows, longest, vocabulary, hidden = SIZES[size]
    rows = rows // 16 if quick else rows
    side = EngineSide(make_workload(directory / f"{size}-model", rows, longest, 4096, vocabulary, hidden))
    side.step()
    run_dir = directory / size
    recover = RecoveryCheckpoints(
        run_dir, RecoverConfig(INTERVAL), {"actor": side.engine}, {"rollout": RolloutState(rows)}
    )
    steps, idle, blocked = list[float](), list[float](), list[float]()
    recover.save(0)  # the first checkpoint allocates the memory of the copies
    cpu_before = thread_seconds("writer")
    for step in range(1, INTERVAL * checkpoints + 1):
        begin = time.perf_counter()
        side.step()
        middle = time.perf_counter()
        recover.after_step(step)
        (blocked if step % INTERVAL == 0 else idle).append(time.perf_counter() - middle)
        if (step - 1) % INTERVAL > INTERVAL // 2:
            steps.append(middle - begin)  # the writer has finished in the second half of an interval
    recover.finish()
    cpu = (thread_seconds("writer") - cpu_before) / checkpoints
    blocked_seconds = statistics.mean(blocked) - statistics.median(idle)
    step_seconds = statistics.median(steps)
    state = side.engine._state()
    result = {
        "step_s": step_seconds,
        "blocked_s": blocked_seconds,
        "writer_cpu_s": cpu,
        "cost": (blocked_seconds + cpu) / (INTERVAL * step_seconds),
        "ok": (blocked_seconds + cpu) / (INTERVAL * step_seconds) <= REQUIRED,
        "min_interval_steps": math.ceil((blocked_seconds + cpu) / (REQUIRED * step_seconds)),
        "mebibytes": sum(f.stat().st_size for f in (run_dir / "recover").rglob("*.safetensors")) / 2**21,
    }
    if not quick:
        result["peers"] = {
            "torch.save": measure_peer(lambda: save_plain(state, directory / "plain.pt"), checkpoints),
            "dcp.async_save": measure_peer(lambda: save_async(state, directory / "dcp"), checkpoints),
        }
    side.engine.destroy()
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in result.items()}


def measure_peer(save: Callable[[], Callable[[], object]], checkpoints: int) -> dict[str, float]:
    """Return the mean seconds until `save` returns, and the mean CPU seconds until everything is written."""
    save()()
    blocked, cpu = list[float](), list[float]()
    for _ in range(checkpoints):
        begin, cpu_before = time.perf_counter(), time.process_time()
        wait = save()
        blocked.append(time.perf_counter() - begin)
        wait()
        cpu.append(time.process_time() - cpu_before)
    return {"blocked_s": round(statistics.mean(blocked), 5), "cpu_s": round(statistics.mean(cpu), 5)}


def save_plain(state: dict[str, Any], path: Path) -> Callable[[], object]:
    """Save with `torch.save` and fsync."""
    import torch

    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def save_async(state: dict[str, Any], path: Path) -> Callable[[], object]:
    """Start `async_save` in a single process; return the function that waits for it."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    shutil.rmtree(path, ignore_errors=True)
    future: Any = async_save(state, checkpoint_id=path, no_dist=True)
    return future.result  # type: ignore[no-any-return]
