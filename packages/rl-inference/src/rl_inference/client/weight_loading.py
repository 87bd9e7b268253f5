"""How servers take a version: beside the one that they serve, or in its place. This is all in which the two differ;
who is live, paused and committed is decided by `rl_inference.client.weight_update`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rl_contracts.config import GenerationConfig
from rl_contracts.data import WeightPart, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.inference import Canary, CanaryCompletion
from rl_contracts.weights import CommittedWeights, verify_receipt
from rl_inference.client.all_servers import FOREVER, AllServers
from rl_inference.client.transport import Server, ServerBusyError, ServerFailedError, ServerLostError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files that are not taken over from the first model."""


class StagedLoad:
    """stage: load beside the served version, with a receipt. commit: swap. Where receipts have no checksums, servers
    answer the canary after the swap, while requests are held back.

    Args:
        fleet: the servers.
        model_path: directory of the model that they were started with; empty: not known.
    """

    def __init__(self, fleet: AllServers, model_path: str = "") -> None:
        self.fleet = fleet
        self.model_path = model_path
        self._canary: Canary | None = None

    @property
    def needs_proof(self) -> bool:
        """Whether `prove` asks anything."""
        return self._canary is not None

    async def prepare(self, meta: WeightUpdateMeta) -> None:
        """Before a version is staged anywhere."""

    async def stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        """See that a server can commit a version; what it holds of it."""
        timeout = self.fleet.config.update_timeout
        receipt = await self.fleet.transport.call_until_evicted(
            server, self.fleet.protocol.load(meta, timeout), timeout
        )
        return receipt or WeightReceipt(server.address, meta.version, {})

    async def before_pause(self, version: int, canary: Canary | None, paused: bool) -> None:
        """Before a commit pauses anybody, unless all are `paused` already."""
        self._canary = canary
        if canary is not None:
            self.fleet.router.close()
            if not paused:  # so that it lies in the prefix caches
                what = "answer the canary before the update"
                await self.fleet.call_all(lambda s: self._generate(s, canary, 1), what)

    async def commit(self, server: Server, version: int, mode: str) -> None:
        """Let a paused server serve the staged version."""
        await self.fleet.transport.call_until_evicted(server, self.fleet.protocol.commit(version, mode))
        server.version = version

    async def prove(self, version: int) -> None:
        """After all go on: let each server show what it serves, if receipts do not."""
        canary = self._canary
        if canary is not None:
            answers = await self.fleet.call_all(lambda s: self._answer(s, canary), "answer the canary")
            await canary.judge(version, answers)

    def release(self) -> None:
        """Let requests in, however the commit ended."""
        self.fleet.router.open()

    def is_complete(self, server: Server) -> bool:
        """Whether a server that came back holds all of the version that it says, as far as is known here."""
        return True

    async def load_committed(self, server: Server, known: CommittedWeights) -> None:
        """Load the committed version on a server that came back with another one."""
        receipt = await self.stage(server, known.meta)
        if self.fleet.protocol.capabilities.checksums:
            verify_receipt(known.receipt, receipt, known.meta.route)
        await self.commit(server, known.version, "keep")

    async def check(self, server: Server, known: CommittedWeights) -> None:
        """Compare what a server that came back serves with the committed version."""
        fleet = self.fleet
        if fleet.protocol.capabilities.checksums:
            await self._check_receipt(server, known)
        if self._canary is not None:
            await fleet.transport.call_until_evicted(server, fleet.protocol.resume())
            await self._canary.judge(known.version, [await self._answer(server, self._canary)])

    async def _check_receipt(self, server: Server, known: CommittedWeights) -> None:
        """Compare checksums. A server that has none of the weights that it was started with gets them once more."""
        fleet = self.fleet
        try:
            found = await fleet.transport.call_until_evicted(
                server, fleet.protocol.receipt(), fleet.config.update_timeout
            )
        except (ServerBusyError, ServerLostError):
            raise
        except InferenceError:
            if not known.readable:
                raise
            await self.load_committed(server, known)
        else:
            # a live receipt has a sum under every name of a tied parameter, and of what is never sent
            sums = {name: found.checksums[name] for name in known.receipt.checksums if name in found.checksums}
            verify_receipt(known.receipt, replace(found, checksums=sums), known.meta.route)

    async def _answer(self, server: Server, canary: Canary) -> CanaryCompletion:
        """Let a server show what it serves: its scores of a prompt, and greedy tokens after it."""
        fleet = self.fleet
        asked = fleet.transport.call_until_evicted(server, fleet.protocol.score(canary.input_ids, 1.0), FOREVER)
        scores = await self._await_progress(server, asked)
        ids, logprobs = await self._generate(server, canary, canary.tokens)
        return CanaryCompletion(server.address, scores, ids, logprobs)

    async def _generate(self, server: Server, canary: Canary, tokens: int) -> tuple[list[int], list[float]]:
        return await self._await_progress(server, server.run(self._read(server, canary, tokens), step=True))

    async def _await_progress[T](self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """It may wait behind answers that go on, for as long as they do."""
        limit = self.fleet.config.update_timeout
        error = ServerLostError(f"{server.address}: no answer to the canary within {limit:g} s (client.update_timeout)")
        return await self.fleet.await_progress(server, work, limit, error)

    async def _read(self, server: Server, canary: Canary, tokens: int) -> tuple[list[int], list[float]]:
        greedy = GenerationConfig(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        call = self.fleet.protocol.generate(f"canary-{secrets.token_hex(8)}", canary.input_ids, greedy, None, 0)
        ids, logprobs = list[int](), list[float]()
        async with contextlib.aclosing(self.fleet.transport.stream(server, call)) as chunks:
            async for chunk in chunks:
                if chunk is not None and chunk.error is not None:
                    raise ServerFailedError(f"{server.address}: {chunk.error}")
                if chunk is not None:
                    ids += chunk.output_ids
                    logprobs += chunk.logprobs
        if len(ids) != tokens:
            raise ServerFailedError(f"{server.address}: expected {tokens} greedy tokens, found {len(ids)}")
        return ids, logprobs


class InPlaceLoad(StagedLoad):
    """stage: see that the weights are there, in one directory that the server can load. commit: load over the served
    version.

    A server whose load failed has no whole set of weights: it is evicted, and rejoins as one that was started again.
    """

    def __init__(self, fleet: AllServers, model_path: str = "") -> None:
        super().__init__(fleet, model_path)
        self._staged: WeightUpdateMeta | None = None
        self._spoiled: WeakKeyDictionary[Server, str] = WeakKeyDictionary()
        """Servers whose load failed, and in which life."""

    async def prepare(self, meta: WeightUpdateMeta) -> None:
        self._staged = None
        self._staged = await asyncio.to_thread(model_directory, meta, self.model_path)

    async def stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        await self.fleet.transport.call_until_evicted(
            server, self.fleet.protocol.health(), self.fleet.config.update_timeout
        )
        return WeightReceipt(server.address, meta.version, {})

    async def before_pause(self, version: int, canary: Canary | None, paused: bool) -> None:
        if self._staged is None or self._staged.version != version:
            staged = "nothing" if self._staged is None else f"version {self._staged.version}"
            raise WeightUpdateError(f"commit of version {version}: {staged} is staged. Call stage_weights first.")
        await super().before_pause(version, canary, paused)

    async def commit(self, server: Server, version: int, mode: str) -> None:
        assert self._staged is not None
        await self._load(server, self._staged, mode)

    async def _load(self, server: Server, meta: WeightUpdateMeta, mode: str) -> None:
        fleet, timeout = self.fleet, self.fleet.config.update_timeout
        try:
            await fleet.transport.call_until_evicted(server, fleet.protocol.load(meta, timeout), timeout)
            await super().commit(server, meta.version, mode)
        except BaseException as error:
            self._spoiled[server] = server.instance
            fleet.router.evict(server, f"did not load version {meta.version}: {error}")
            raise
        self._spoiled.pop(server, None)

    def is_complete(self, server: Server) -> bool:
        life = self._spoiled.get(server)
        return life is None or bool(life and server.instance and server.instance != life)

    async def load_committed(self, server: Server, known: CommittedWeights) -> None:
        meta = await asyncio.to_thread(model_directory, known.meta, self.model_path)
        await self.fleet.pause(server, "recompute")
        await self._load(server, meta, "recompute")


def model_directory(meta: WeightUpdateMeta, model_path: str) -> WeightUpdateMeta:
    """Make one directory that a server can load as a model: links to the files of all parts, and to what else lies
    beside the weights of its first model.

    Returns:
        `meta` with that directory as its only part.

    Raises:
        WeightUpdateError: the route keeps no files, or they are missing or of other parameters.
    """
    from rl_contracts.weights.stored import FILE, check_files

    if meta.route != "disk":
        raise WeightUpdateError(
            f"route {meta.route}: these servers load files, over the weights that they serve. Use publish.route=disk."
        )
    check_files(meta)
    directory = Path(meta.parts[0].location).parent / f"model-{meta.version % 2}"
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    for number, part in enumerate(meta.parts):
        (directory / f"model-{number:05d}.safetensors").symlink_to(Path(part.location).resolve() / FILE)
    beside = Path(model_path).iterdir() if model_path and Path(model_path).is_dir() else ()
    for file in beside:
        if file.is_file() and file.suffix not in _WEIGHTS and ".index." not in file.name:
            (directory / file.name).symlink_to(file.resolve())
    return replace(meta, parts=(WeightPart(str(directory.resolve()), meta.params),))
