"""Servers and trainer that have the same memory, in turn: the servers sleep while the trainer learns."""

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
    """Puts the servers to sleep until weights are committed (collective: every rank of the engine has one). Answers
    that are under way go on when they are awake. Servers that cannot sleep are left alone.

    Args:
        engine: what learns meanwhile.
        inference: the client of the servers; that of rank 0 speaks to them.
        loop: on which it runs.
        timeout: seconds for each of the two.
    """

    def __init__(self, engine: TrainEngine, inference: InferenceEngine, loop: LoopThread, timeout: float) -> None:
        self.engine, self.inference, self.loop, self.timeout = engine, inference, loop, timeout

    @property
    def _is_client_rank(self) -> bool:
        return self.engine.parallel.is_main and self.inference.capabilities.sleeps

    def sleep(self) -> dict[str, float]:
        """Give the servers' memory back.

        Returns:
            `sharing/freed_gib`: how much of it; on a GPU what it has more for all, else what the servers say.

        Raises:
            EngineError, StalledError: they did not; on every rank.
        """
        freed = 0.0
        with self.engine.parallel.agree_on_errors("putting the servers to sleep"):
            if self._is_client_rank:
                before = self._free()
                freed = self.loop.run(self.inference.sleep(), self.timeout)
                freed = self._free() - before or freed
        return {"sharing/freed_gib": freed / GIB}

    def wake(self) -> None:
        """Undo `sleep` where nothing is published; a commit does so by itself.

        Raises:
            EngineError, StalledError: they did not wake; on every rank.
        """
        with self.engine.parallel.agree_on_errors("waking the servers"):
            if self._is_client_rank:
                self.loop.run(self.inference.wake(), self.timeout)

    @contextmanager
    def servers_awake(self) -> Iterator[None]:
        """Wake the servers for a block, and put them to sleep after it, also when it raises (collective)."""
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    def _free(self) -> float:
        """Bytes that a GPU has for anybody; 0 of a CPU."""
        import torch

        device = self.engine.parallel.device
        return float(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else 0.0
