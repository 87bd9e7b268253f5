"""Loading of a version on one server: staged next to the served weights, or in place.

`rl_inference.client.weight_update` coordinates the servers; it is the same for both.
"""

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

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of weight files, which are not linked from the initial model."""


class StagedLoad:
    """Load a version next to the served weights when it is staged, and swap the weights at the commit.

    If the commit has a canary, the servers complete it after the swap, while requests are held back.

    Args:
        fleet: all servers.
        model_path: directory of the model that the servers were started with; empty if unknown.
    """

    def __init__(self, fleet: AllServers, model_path: str = "") -> None:
        self.fleet = fleet
        self.model_path = model_path
        self._canary: Canary | None = None

    @property
    def needs_proof(self) -> bool:
        """True if `prove` sends requests."""
        return self._canary is not None

    async def prepare(self, meta: WeightUpdateMeta) -> None:
        """Prepare the weights before a version is staged on any server. Does nothing by default."""

    async def stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        """Ensure that a server can commit a version, and return its receipt."""
        timeout = self.fleet.update_timeout
        receipt = await self.fleet.transport.call_until_evicted(
            server, self.fleet.protocol.load(meta, timeout), timeout
        )
        return receipt or WeightReceipt(server.address, meta.version, {})

    async def before_pause(self, version: int, canary: Canary | None, paused: bool) -> None:
        """Prepare a commit before any server is paused: hold back requests and cache the canary prompt.

        Args:
            version: version to commit.
            canary: check of the servers, or None.
            paused: whether the servers are already paused, so that they cannot complete the canary.
        """
        self._canary = canary
        if canary is not None:
            self.fleet.router.close()
            if not paused:  # puts the prompt into the prefix caches
                what = "complete the canary before the update"
                await self.fleet.call_all(lambda s: self._generate(s, canary, 1), what)

    async def commit(self, server: Server, version: int, mode: str) -> None:
        """Switch a paused server to the staged version."""
        await self.fleet.transport.call_until_evicted(server, self.fleet.protocol.commit(version, mode))
        server.record_version(version)

    async def prove(self, version: int) -> None:
        """Check with the canary, after all servers resumed, that each serves the version.

        Raises:
            WeightUpdateError: no server completed the canary, or a result is wrong.
        """
        canary = self._canary
        if canary is not None:
            completions = await self.fleet.call_all(lambda s: self._run_canary(s, canary), "complete the canary")
            await canary.judge(version, completions)

    def release(self) -> None:
        """Release the requests after a commit, successful or not."""
        self.fleet.router.open()

    def is_complete(self, server: Server) -> bool:
        """Return False if the weights of a server may be incomplete after a failed load."""
        return True

    async def load_committed(self, server: Server, committed: CommittedWeights) -> None:
        """Load the committed version on a server that returned with another version."""
        receipt = await self.stage(server, committed.meta)
        if self.fleet.protocol.capabilities.checksums:
            verify_receipt(committed.receipt, receipt, committed.meta.route)
        await self.commit(server, committed.version, "keep")

    async def check(self, server: Server, committed: CommittedWeights) -> None:
        """Compare the weights of a server that returned with the committed version.

        Raises:
            WeightUpdateError: they differ.
        """
        fleet = self.fleet
        if fleet.protocol.capabilities.checksums:
            await self._check_receipt(server, committed)
        if self._canary is not None:
            await fleet.transport.call_until_evicted(server, fleet.protocol.resume())
            await self._canary.judge(committed.version, [await self._run_canary(server, self._canary)])

    async def _check_receipt(self, server: Server, committed: CommittedWeights) -> None:
        """Compare checksums. If the server has none for its initial weights, load the committed weights again."""
        fleet = self.fleet
        try:
            receipt = await fleet.transport.call_until_evicted(server, fleet.protocol.receipt(), fleet.update_timeout)
        except (ServerBusyError, ServerLostError):
            raise
        except InferenceError:
            if not committed.readable:
                raise
            await self.load_committed(server, committed)
        else:
            # a live receipt also has checksums of tied names and of parameters that are never sent
            checksums = {
                name: receipt.checksums[name] for name in committed.receipt.checksums if name in receipt.checksums
            }
            verify_receipt(committed.receipt, replace(receipt, checksums=checksums), committed.meta.route)

    async def _run_canary(self, server: Server, canary: Canary) -> CanaryCompletion:
        """Return a server's scores of the canary prompt and its greedy completion."""
        fleet = self.fleet
        request = fleet.transport.call_until_evicted(server, fleet.protocol.score(canary.input_ids, 1.0), FOREVER)
        scores = await self._await_progress(server, request)
        ids, logprobs = await self._generate(server, canary, canary.tokens)
        return CanaryCompletion(server.address, scores, ids, logprobs)

    async def _generate(self, server: Server, canary: Canary, tokens: int) -> tuple[list[int], list[float]]:
        return await self._await_progress(server, server.run(self._complete_canary(server, canary, tokens), step=True))

    async def _await_progress[T](self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """Await a request of the canary, which may wait for running completions as long as these make progress."""
        limit = self.fleet.update_timeout
        error = ServerLostError(
            f"{server.address}: no progress on the canary for {limit:g} s. Raise publish.timeout, from which the "
            "commands derive this limit (ServeSpec.update_timeout)."
        )
        return await self.fleet.await_progress(server, work, limit, error)

    async def _complete_canary(self, server: Server, canary: Canary, tokens: int) -> tuple[list[int], list[float]]:
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
    """Prepare a directory that servers can load when a version is staged, and load it over the served weights at the
    commit.

    A server whose load failed has incomplete weights. It is evicted and must load the committed version to rejoin.
    """

    def __init__(self, fleet: AllServers, model_path: str = "") -> None:
        super().__init__(fleet, model_path)
        self._staged: WeightUpdateMeta | None = None
        self._failed_loads: WeakKeyDictionary[Server, str] = WeakKeyDictionary()
        """Servers whose load failed, with the id of their process at that time."""

    async def prepare(self, meta: WeightUpdateMeta) -> None:
        self._staged = None
        self._staged = await asyncio.to_thread(model_directory, meta, self.model_path)

    async def stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        await self.fleet.transport.call_until_evicted(server, self.fleet.protocol.health(), self.fleet.update_timeout)
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
        fleet, timeout = self.fleet, self.fleet.update_timeout
        try:
            await fleet.transport.call_until_evicted(server, fleet.protocol.load(meta, timeout), timeout)
            await super().commit(server, meta.version, mode)
        except BaseException as error:
            self._failed_loads[server] = server.instance
            fleet.router.evict(server, f"did not load version {meta.version}: {error}")
            raise
        self._failed_loads.pop(server, None)

    def is_complete(self, server: Server) -> bool:
        failed_instance = self._failed_loads.get(server)
        return failed_instance is None or bool(
            failed_instance and server.instance and server.instance != failed_instance
        )

    async def load_committed(self, server: Server, committed: CommittedWeights) -> None:
        meta = await asyncio.to_thread(model_directory, committed.meta, self.model_path)
        await self.fleet.pause(server, "recompute")
        await self._load(server, meta, "recompute")


def model_directory(meta: WeightUpdateMeta, model_path: str) -> WeightUpdateMeta:
    """Create a directory that a server can load as a model.

    It contains links to the weight files of all parts, and to the other files of the initial model, such as its config.

    Returns:
        `meta` with that directory as its only part.

    Raises:
        WeightUpdateError: the route stores no files, or the files are missing or contain other parameters.
    """
    from rl_contracts.weights.stored import FILE, check_files

    if meta.route != "disk":
        raise WeightUpdateError(
            f"publish.route={meta.route}: these servers load weights in place from files. Use publish.route=disk."
        )
    check_files(meta)
    directory = Path(meta.parts[0].location).parent / f"model-{meta.version % 2}"
    directory.mkdir(parents=True, exist_ok=True)
    for old_link in directory.iterdir():
        old_link.unlink()
    for number, part in enumerate(meta.parts):
        (directory / f"model-{number:05d}.safetensors").symlink_to(Path(part.location).resolve() / FILE)
    model_files = Path(model_path).iterdir() if model_path and Path(model_path).is_dir() else ()
    for file in model_files:
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and ".index." not in file.name:
            (directory / file.name).symlink_to(file.resolve())
    return replace(meta, parts=(WeightPart(str(directory.resolve()), meta.params),))
