"""Share GPU memory between servers and trainer: the servers sleep while the trainer learns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread

GIB = 2**30


class MemorySharing:
    """Puts the servers to sleep until weights are committed (collective: every rank of the engine has one).

    Unfinished completions continue when the servers wake. Servers that cannot sleep are left alone.

    Args:
        engine: the trainer, which uses the memory meanwhile.
        inference: client of the servers; only rank 0 uses it.
        loop: thread that runs the client's coroutines.
        timeout: seconds for each call of `sleep` and `wake`.
    """

    def __init__(self, engine: TrainEngine, inference: InferenceEngine, loop: LoopThread, timeout: float) -> None:
        self.engine, self.inference, self.loop, self.timeout = engine, inference, loop, timeout

    @property
    def _is_client_rank(self) -> bool:
        return self.engine.parallel.is_main and self.inference.capabilities.sleeps

    def sleep(self) -> dict[str, float]:
        """Release the servers' memory.

        Returns:
            `sharing/freed_gib`: the released memory. On a GPU it is the increase in free memory as CUDA reports it. If
            that is 0, it is the amount that the servers report.

        Raises:
            EngineError, StalledError: the servers did not sleep; raised on every rank.
        """
        freed = 0.0
        with self.engine.parallel.agree_on_errors("putting the servers to sleep"):
            if self._is_client_rank:
                before = self._free()
                freed = self.loop.run(self.inference.sleep(), self.timeout)
                freed = self._free() - before or freed
        return {"sharing/freed_gib": freed / GIB}

    def wake(self) -> None:
        """Undo `sleep` where no weights are published; a commit wakes the servers automatically.

        Raises:
            EngineError, StalledError: the servers did not wake; raised on every rank.
        """
        with self.engine.parallel.agree_on_errors("waking the servers"):
            if self._is_client_rank:
                self.loop.run(self.inference.wake(), self.timeout)

    @contextmanager
    def servers_awake(self) -> Iterator[None]:
        """Wake the servers for a block and put them to sleep after it, even if it raises (collective)."""
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    def _free(self) -> float:
        """Return the free bytes of the GPU over all processes, or 0 on a CPU."""
        import torch

        device = self.engine.parallel.device
        return float(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else 0.0
