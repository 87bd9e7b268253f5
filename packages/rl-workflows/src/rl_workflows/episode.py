"""One episode: its handle on the engine, its seeds and its ids."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_contracts.inference import InferenceEngine
from rl_workflows.workflow_context import EpisodeContext

if TYPE_CHECKING:
    from rl_contracts.clock import Clock
    from rl_contracts.config import GenerationConfig
    from rl_contracts.scheduler import JobSpec


class Progress:
    """When something last moved, and how much was generated. One per head, touched by every episode."""

    __slots__ = ("_clock", "last", "tokens")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.last = clock.now()
        """Clock seconds of the last event."""
        self.tokens = 0
        """Tokens generated since the counter was last read."""

    def touch(self) -> None:
        """Something moved."""
        self.last = self._clock.now()

    def answered(self, tokens: int, now: float) -> None:
        """An answer of so many tokens came at `now`."""
        self.tokens += tokens
        self.last = now


def sampling_seed(seed: int, prompt_id: int, epoch: int, sample: int, call: int = 0) -> int:
    """Seed of one generation, 0 to 2**63 - 1: a stable hash of what is asked, never of when.

    Args:
        seed: of the run.
        prompt_id: the data row.
        epoch: pass over the data.
        sample: which of the group's episodes.
        call: which of the episode's generations.
    """
    digest = hashlib.blake2b(b"%d/%d/%d/%d/%d" % (seed, prompt_id, epoch, sample, call), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class EpisodeEngine(InferenceEngine):
    """An episode's own handle: its requests get the episode's seeds, ids and group. It cannot control servers.

    Args:
        engine: the engine behind it.
        context: the episode.
        progress: told of every answer.
        seed: of the run.
        label: first part of the request ids; tells training from evaluation.
        generation: sampling that replaces the workflow's own, for evaluation. What ends an answer is kept: the
            workflow's stop ids and strings are added.
    """

    __slots__ = ("_calls", "_context", "_engine", "_generation", "_label", "_progress", "_seed")

    def __init__(
        self,
        engine: InferenceEngine,
        context: EpisodeContext,
        progress: Progress,
        seed: int,
        label: str = "train",
        generation: GenerationConfig | None = None,
    ) -> None:
        self._engine, self._context, self._progress = engine, context, progress
        self._seed, self._label, self._generation = seed, label, generation
        self._calls = 0

    @property
    def served_dtype(self) -> str:
        return self._engine.served_dtype

    @property
    def servers(self) -> list[str]:
        return self._engine.servers

    @property
    def version(self) -> int:
        return self._engine.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """As the engine's, with the episode's seed, request id and group where the request has none."""
        context, call = self._context, self._calls
        self._calls += 1
        seed = request.seed
        if seed is None:
            seed = sampling_seed(self._seed, context.prompt_id, context.epoch, context.sample, call)
        group = f"{self._label}-{context.group_id}"
        before = context.stage
        context.enter("generation")
        response = await self._engine.agenerate(
            ModelRequest(
                input_ids=request.input_ids,
                generation=self._sampling(request.generation),
                request_id=request.request_id or f"{group}-{context.sample}-{call}",
                seed=seed,
                group=request.group or group,
            )
        )
        context.enter(before)
        self._progress.answered(len(response.output_ids), context.since)
        return response

    def _sampling(self, own: GenerationConfig) -> GenerationConfig:
        given = self._generation
        if given is None:
            return own
        return replace(
            given,
            stop=list(dict.fromkeys([*given.stop, *own.stop])),
            stop_token_ids=list(dict.fromkeys([*given.stop_token_ids, *own.stop_token_ids])),
        )

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        return await self._engine.score(input_ids, temperature, server)

    async def stats(self) -> dict[str, float]:
        return await self._engine.stats()

    @classmethod
    def server_spec(cls, config: Any, spec: ServeSpec) -> JobSpec:
        _refuse("server_spec")

    def initialize(self, addresses: list[str], key: str = "") -> None:
        _refuse("initialize")

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        _refuse("stage_weights")

    async def commit_weights(self, version: int, interrupt: str = "keep") -> float:
        _refuse("commit_weights")

    async def pause(self) -> None:
        _refuse("pause")

    async def resume(self) -> None:
        _refuse("resume")

    async def destroy(self) -> None:
        _refuse("destroy")


def _refuse(method: str) -> NoReturn:
    raise InferenceError(
        f"{method}: an episode's handle only generates and scores; servers are controlled by the training loop."
    )
