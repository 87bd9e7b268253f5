"""An inference engine without a server, which returns completions after a simulated time; for tests and planning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_contracts.config import ClientConfig, require, require_choice
from rl_contracts.data import (
    RENDEZVOUS_ROUTES,
    ModelRequest,
    ModelResponse,
    ServeSpec,
    StopReason,
    WeightReceipt,
    WeightUpdateMeta,
)
from rl_contracts.errors import ConfigError, InferenceError, WeightUpdateError
from rl_contracts.inference import Canary, InferenceEngine, ServerConfig
from rl_contracts.runtime.clock import Clock, SystemClock
from rl_contracts.scheduler import JobSpec
from rl_contracts.testing.null_model import NullModel, request_rng
from rl_contracts.testing.null_timeline import Slots, Timeline

if TYPE_CHECKING:
    import numpy as np

INTERRUPTS = ("keep", "recompute", "wait")


@dataclass
class NullInferenceEngineConfig(ServerConfig):
    """Lengths, times and vocabulary of the null engine."""

    mean_tokens: float = 32.0
    """Mean length of a completion in tokens, including its end token, before limits apply."""
    sigma: float = 0.0
    """Sigma of the lognormal distribution of the length; 0 gives every completion `mean_tokens`."""
    seconds_per_token: float = 0.01
    """Seconds from one token to the next."""
    latency: float = 0.0
    """Seconds added before the first token."""
    commit_seconds: float = 0.0
    """Seconds for which a commit pauses generation."""
    max_running: int = 0
    """Maximum number of requests that generate at the same time; further requests are queued. 0: no limit."""
    vocab_size: int = 64
    """Vocabulary size; generated token ids are 0 to vocab_size - 1."""
    eos_token_id: int = 0
    """Token that ends a completion."""
    context_length: int = 1 << 20
    """Maximum length of prompt and completion in tokens; a prompt that leaves no room for a completion is rejected."""
    read_weights: bool = True
    """Read staged weights and return their checksums. False returns none, for tests without weight files."""
    seed: int = 0
    """Seed of the model, and of requests that have no seed."""

    def __post_init__(self) -> None:
        require(self.mean_tokens >= 1, "NullInferenceEngineConfig.mean_tokens", "at least 1", self.mean_tokens)
        require(self.sigma >= 0, "NullInferenceEngineConfig.sigma", "0 (constant) or more", self.sigma)
        require(
            self.seconds_per_token >= 0,
            "NullInferenceEngineConfig.seconds_per_token",
            "0 or more",
            self.seconds_per_token,
        )
        require(self.latency >= 0, "NullInferenceEngineConfig.latency", "0 or more", self.latency)
        require(self.commit_seconds >= 0, "NullInferenceEngineConfig.commit_seconds", "0 or more", self.commit_seconds)
        require(
            self.max_running >= 0, "NullInferenceEngineConfig.max_running", "0 (no limit) or more", self.max_running
        )
        require(self.vocab_size >= 2, "NullInferenceEngineConfig.vocab_size", "at least 2", self.vocab_size)
        require(
            0 <= self.eos_token_id < self.vocab_size,
            "NullInferenceEngineConfig.eos_token_id",
            f"between 0 and vocab_size - 1 ({self.vocab_size - 1})",
            self.eos_token_id,
        )


@dataclass
class Faults:
    """Faults to inject. Each hook may be replaced at any time and returns the error to raise, or None."""

    generate: Callable[[ModelRequest], Exception | None] = field(default=lambda request: None)
    """Error to raise when the completion of the request would be done."""
    hang: Callable[[ModelRequest], bool] = field(default=lambda request: False)
    """True if the request hangs until it is cancelled or `destroy` is called."""
    stage: Callable[[WeightUpdateMeta], Exception | None] = field(default=lambda meta: None)
    """Error that `stage_weights` raises."""
    commit: Callable[[int], Exception | None] = field(default=lambda version: None)
    """Error that `commit_weights` raises before the new version is served."""
    corrupt: Callable[[str], bool] = field(default=lambda name: False)
    """True if the receipt has a wrong checksum for this parameter."""


class NullInferenceEngine(InferenceEngine):
    """Complete in-memory implementation of the contract, with one timer for all outstanding requests.

    Tokens and log-probs come from a fixed distribution and the request's seed, independent of the weights. Every token
    carries the version that was committed at its time on the clock.

    Args:
        config: lengths, times and vocabulary.
        spec: only its `version` is used, the version served at first.
        client: ignored, since no connection can fail.
        clock: clock of the engine; None is real time, tests pass a `SimulatedClock`.
        answer: function that returns the token ids of a request's completion (with an end token if it should have
            one), or None to sample it. The ids are cut at the first stop id and at `max_new_tokens`.
    """

    def __init__(
        self,
        config: NullInferenceEngineConfig | None = None,
        spec: ServeSpec | None = None,
        client: ClientConfig | None = None,
        *,
        clock: Clock | None = None,
        answer: Callable[[ModelRequest], Sequence[int] | np.ndarray | None] | None = None,
    ) -> None:
        self.config = config or NullInferenceEngineConfig()
        self.clock: Clock = clock or SystemClock()
        self.faults = Faults()
        self._answer = answer
        self._model = NullModel(self.config.vocab_size, self.config.seed)
        self._timeline = Timeline(self.clock, (spec or ServeSpec()).version)
        self._staged: WeightUpdateMeta | None = None
        self._committing = asyncio.Lock()
        self._slots = Slots(self.config.max_running)
        self._closed = False
        self._unseeded = self._generated = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._addresses = ["null"]

    @classmethod
    def server_spec(cls, config: NullInferenceEngineConfig, spec: ServeSpec) -> JobSpec:
        """Return a job of 0 processes: the engine needs no server."""
        return JobSpec(role="rollout", command=("true",), count=0)

    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Store the addresses, which become the names of the simulated servers."""
        if not addresses:
            raise ConfigError("inference: expected at least one server address, found none.")
        self._addresses = list(addresses)

    @property
    def served_dtype(self) -> str:
        return "float32"

    @property
    def servers(self) -> list[str]:
        return list(self._addresses)

    @property
    def version(self) -> int:
        return self._timeline.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self._check_request(request)
        submitted = self.clock.now()
        task = self._register()
        try:
            await self._slots.acquire()
            self._timeline.set_busy(True)
            try:
                if self.faults.hang(request):
                    await asyncio.Event().wait()
                began = self._timeline.generated_until_now()
                ids, reason = self._tokens(request)
                seconds = self._seconds(len(ids))
                await self._timeline.after(seconds)
            finally:
                self._slots.release()
                self._timeline.set_busy(self._slots.running > 0)
        except asyncio.CancelledError:
            if self._closed and task.uncancel() <= 0:
                raise InferenceError("null engine: destroyed while the request waited.") from None
            raise
        finally:
            del self._tasks[task]
        self._raise_injected_fault(request)
        self._generated += len(ids)
        return ModelResponse(
            input_ids=list(request.input_ids),
            output_ids=ids.tolist(),
            logprobs=self._model.logprobs(ids, len(request.input_ids), request.generation.temperature),
            versions=self._timeline.versions_between(began + self._seconds(1), self.config.seconds_per_token, len(ids)),
            stop_reason=reason,
            server=self._addresses[0],
            seconds=self.clock.now() - submitted,
            resubmissions=self._timeline.recomputes_between(began, began + seconds),
        )

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        import numpy as np

        if server not in (None, *self.servers):
            raise InferenceError(f"null engine: expected one of the servers {self.servers}, found {server!r}.")
        self._check_ids(input_ids, self.config.context_length)
        return [0.0, *self._model.logprobs(np.asarray(input_ids[1:], dtype=np.int64), 1, temperature)]

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        from rl_contracts.weights import checksum, open_weights

        error = self.faults.stage(meta)
        if error is not None:
            raise error
        sums: dict[str, int] = {}
        if meta.route in RENDEZVOUS_ROUTES:
            sums = await asyncio.to_thread(_receive, meta)
        elif self.config.read_weights:
            sums = {name: checksum(tensor) for name, tensor in open_weights(meta)}
        sums = {name: value ^ 1 if self.faults.corrupt(name) else value for name, value in sums.items()}
        self._staged = meta
        return [WeightReceipt(server, meta.version, sums) for server in self._addresses]

    async def commit_weights(self, version: int, interrupt: str = "keep", canary: Canary | None = None) -> float:
        require_choice("interrupt", interrupt, INTERRUPTS)
        async with self._committing:
            error = self.faults.commit(version)
            if error is not None:
                raise error
            if self._staged is None or self._staged.version != version:
                staged = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise WeightUpdateError(f"commit of version {version}: {staged} is staged. Call stage_weights first.")
            try:
                if interrupt == "wait":
                    await self._slots.drain()
                began = self.clock.now()
                self._timeline.pause("commit")
                if self.config.commit_seconds:
                    await self.clock.sleep(self.config.commit_seconds)
                self._timeline.commit(version, recompute=interrupt == "recompute")
                self._staged = None
            finally:
                self._timeline.resume("commit")
                self._slots.reopen()
            return self.clock.now() - began

    async def pause(self) -> None:
        self._timeline.pause("caller")

    async def resume(self) -> None:
        self._timeline.resume("caller")

    async def stats(self) -> dict[str, float]:
        return {
            "servers": float(len(self._addresses)),
            "running": float(self._slots.running),
            "waiting": float(len(self._tasks) - self._slots.running),
            "generated_tokens": float(self._generated),
            "busy_seconds": self._timeline.busy_seconds(),
        }

    async def destroy(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        self._timeline.close()

    def _register(self) -> asyncio.Task[Any]:
        """Register the current task, so that `destroy` cancels it, and return it."""
        if self._closed:
            raise InferenceError("null engine: used after destroy(); create a new engine.")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        return task

    def _raise_injected_fault(self, request: ModelRequest) -> None:
        error = self.faults.generate(request)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame

    def _seconds(self, tokens: int) -> float:
        """Return the generation time of the first `tokens` tokens of a completion."""
        return self.config.latency + tokens * self.config.seconds_per_token

    def _check_request(self, request: ModelRequest) -> None:
        self._check_ids(request.input_ids, self.config.context_length - 1)
        if request.generation.stop:
            raise InferenceError(
                f"null engine: stop strings {request.generation.stop!r} need a tokenizer, which this engine lacks; "
                "use stop_token_ids."
            )

    def _check_ids(self, ids: list[int], max_length: int) -> None:
        if not ids or min(ids) < 0:
            actual = f"{min(ids)}" if ids else "none"
            raise InferenceError(f"null engine: expected at least one token id, each 0 or more, found {actual}.")
        if len(ids) > max_length:
            raise InferenceError(
                f"null engine: {len(ids)} prompt tokens leave no room in a context of {self.config.context_length}; "
                "shorten the prompt or raise context_length."
            )

    def _tokens(self, request: ModelRequest) -> tuple[np.ndarray, StopReason]:
        """Return the token ids of the completion, int64, and its stop reason."""
        import numpy as np

        generation, config = request.generation, self.config
        room = min(generation.max_new_tokens, config.context_length - len(request.input_ids))
        ends = set(generation.stop_token_ids)
        if not generation.ignore_eos:
            ends.add(config.eos_token_id)
        scripted = None if self._answer is None else self._answer(request)
        if scripted is None:
            ids = self._sample(request, room)
        else:
            ids = np.asarray(scripted, dtype=np.int64)
            if not len(ids):
                raise InferenceError("null engine: `answer` returned no token; expected at least one, or None.")
        first = generation.min_new_tokens
        if ends:
            for index, token in enumerate(ids[first:room].tolist(), start=first):
                if token in ends:
                    return ids[: index + 1], StopReason.STOP
        ended = scripted is not None and len(ids) <= room and not generation.ignore_eos
        return ids if len(ids) <= room else ids[:room], StopReason.STOP if ended else StopReason.LENGTH

    def _sample(self, request: ModelRequest, room: int) -> np.ndarray:
        """Sample a length, then that many ids with an end token as the last one.

        If the length is above `room`, or the request ignores the end token, sample `room` ids without an end token.
        """
        generation, config = request.generation, self.config
        rng = request_rng(config.seed, self._seed(request), request.input_ids)
        drawn = config.mean_tokens
        if config.sigma:
            drawn *= float(rng.lognormal(-(config.sigma**2) / 2, config.sigma))
        length = max(round(drawn), generation.min_new_tokens + 1)
        ends = length <= room and not generation.ignore_eos
        length = length if ends else room
        banned = frozenset() if generation.ignore_eos else frozenset({config.eos_token_id})
        ids = self._model.sample(length, len(request.input_ids), generation.temperature, banned, rng)
        if ends:
            ids[-1] = config.eos_token_id
        return ids

    def _seed(self, request: ModelRequest) -> int | None:
        if request.generation.greedy or request.seed is not None:
            return None if request.generation.greedy else request.seed
        self._unseeded += 1
        return -self._unseeded


def _receive(meta: WeightUpdateMeta) -> dict[str, int]:
    """Receive a weight transfer as its only receiver, and return the checksums of the tensors."""
    import torch

    from rl_contracts.weights import WeightReceiver, with_rank

    receiver = WeightReceiver()
    targets = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in meta.params}
    try:
        return receiver.receive(with_rank(meta, 1, 2), targets)
    finally:
        receiver.close()
