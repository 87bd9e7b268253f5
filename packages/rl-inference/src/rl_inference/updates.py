"""A weight update over all servers: two phases, and whoever does not acknowledge is out before anyone goes
on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from rl_contracts.clock import Clock
from rl_contracts.config import require_choice
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.logging import get_logger
from rl_inference.config import InferenceConfig
from rl_inference.protocol import EmbeddedProtocol
from rl_inference.routing import Router, Server
from rl_inference.transport import ServerLostError, Transport

logger = get_logger("inference.client")


class WeightUpdates:
    """stage on all -> pause all -> commit on all -> resume all.

    Invariant: when a server resumes, every live server has committed the same version.
    """

    def __init__(
        self,
        config: InferenceConfig,
        router: Router,
        transport: Transport,
        protocol: EmbeddedProtocol,
        clock: Clock,
    ) -> None:
        self._config = config
        self._router = router
        self._transport = transport
        self._protocol = protocol
        self._clock = clock
        self._lock = asyncio.Lock()
        self._held = False

    async def stage(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a version beside the served one everywhere. See `InferenceEngine.stage_weights`."""

        async def one(server: Server) -> WeightReceipt:
            call = self._protocol.stage(meta)
            return self._protocol.parse_receipt(
                await self._transport.call(server, call, timeout=self._config.update_timeout)
            )

        async with self._lock:
            return await self._everywhere(one, f"stage version {meta.version}")

    async def commit(self, version: int, interrupt: str) -> float:
        """Serve the staged version everywhere. See `InferenceEngine.commit_weights`."""
        require_choice("interrupt", interrupt, ("keep", "recompute", "wait"))
        async with self._lock:
            try:
                await self._everywhere(lambda s: self._pause(s, interrupt), f"pause for version {version}")
                await self._everywhere(lambda s: self._commit(s, version, interrupt), f"commit version {version}")
            except BaseException:
                # nobody may stay paused; what went wrong first is what counts
                with contextlib.suppress(WeightUpdateError):
                    await self._resume_all()
                raise
            return max(await self._resume_all(), default=0.0)

    async def pause(self) -> None:
        """Pause everywhere until `resume`; updates in between do not resume either."""
        async with self._lock:
            self._held = True
            await self._everywhere(lambda server: self._pause(server, "keep"), "pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        async with self._lock:
            self._held = False
            await self._resume_all()

    async def _pause(self, server: Server, mode: str) -> None:
        """Wait for the pause; a drain may take as long as it makes tokens."""
        before, since = -1.0, self._clock.now()
        while True:
            value = await self._transport.call(server, self._protocol.pause(mode))
            if value["paused"]:
                return
            if value["generated_tokens"] != before:
                before, since = value["generated_tokens"], self._clock.now()
            elif self._clock.now() - since > self._config.progress_timeout:
                raise ServerLostError(f"{server.address}: drained no further for {self._config.progress_timeout:g} s")

    async def _commit(self, server: Server, version: int, mode: str) -> None:
        await self._transport.call(server, self._protocol.commit(version, mode))
        server.version = version

    async def _resume_all(self) -> list[float]:
        """Let all live servers go on, unless their owner holds them paused.

        Returns:
            how long each stood still, in seconds.
        """
        if self._held:
            return []

        async def one(server: Server) -> float:
            return float((await self._transport.call(server, self._protocol.resume()))["paused_seconds"])

        return await self._everywhere(one, "resume")

    async def _everywhere(self, action: Callable[[Server], Awaitable[Any]], what: str) -> list[Any]:
        """Do something on all live servers at once; those that fail are evicted.

        Raises:
            WeightUpdateError: none succeeded.
        """
        servers = self._router.live
        results = await asyncio.gather(*(action(server) for server in servers), return_exceptions=True)
        good, reasons = [], []
        for server, result in zip(servers, results, strict=True):
            if not isinstance(result, BaseException):
                good.append(result)
            elif isinstance(result, (InferenceError, KeyError, TypeError, ValueError)):
                reasons.append((server, f"could not {what}: {result}"))
            else:
                raise result
        if not good:
            listed = "; ".join(f"{server.address} {reason}" for server, reason in reasons) or "all were evicted before"
            raise WeightUpdateError(f"no live server could {what}: {listed}.")
        for server, reason in reasons:
            self._router.evict(server, reason)
        return good
