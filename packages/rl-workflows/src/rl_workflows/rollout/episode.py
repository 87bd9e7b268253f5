"""State of one running episode, and the engine handle that its workflow receives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from rl_contracts.data import ModelRequest, ModelResponse
from rl_contracts.errors import DataError, InferenceError, RLError
from rl_contracts.inference import Capabilities, InferenceEngine

if TYPE_CHECKING:
    from rl_contracts.config import GenerationConfig
    from rl_contracts.runtime.clock import Clock
    from rl_contracts.workflow import RolloutWorkflow

WORKFLOW = "workflow"
"""Stage of an episode outside of any named stage, such as `reward`."""


@dataclass(eq=False, slots=True)
class Episodes:
    """Settings and running episodes that share one purpose: training, or one evaluation."""

    workflow: RolloutWorkflow
    """Workflow that each episode runs."""
    engine: InferenceEngine
    """Inference engine of all episodes."""
    clock: Clock
    """Clock for all times and timeouts."""
    seed: int
    """Seed of the run."""
    label: str = "train"
    """Prefix of the request ids, which distinguishes training from evaluation."""
    generation: GenerationConfig | None = None
    """Sampling settings for evaluation, which replace the workflow's. The workflow's stop strings and stop token
    ids are added to them."""
    running: dict[EpisodeContext, asyncio.Task[None]] = field(default_factory=dict)
    """Running episodes and their tasks, oldest first."""
    last_moved: float = field(init=False)
    """Time of the last progress, in clock seconds: a completion, the end of a group, or more tokens on the servers."""
    tokens: int = 0
    """Tokens generated since the counter was last read."""

    def __post_init__(self) -> None:
        self.record_progress()

    def record_progress(self) -> None:
        """Record that progress was made now."""
        self.last_moved = self.clock.now()


class EpisodeContext:
    """Ids and current stage of one running episode."""

    __slots__ = ("cache", "clock", "epoch", "group_id", "prompt_id", "sample", "since", "stage")

    def __init__(
        self, prompt_id: int, group_id: int, sample: int, epoch: int, cache: dict[str, Any], clock: Clock
    ) -> None:
        self.prompt_id = prompt_id
        """Id of the example."""
        self.group_id = group_id
        """Id of the group."""
        self.sample = sample
        """Index of the episode within its group."""
        self.epoch = epoch
        """Epoch of the example; -1 in evaluation."""
        self.cache = cache
        """Dictionary shared by the group, for values that depend on the prompt alone."""
        self.clock = clock
        """Clock of the runtime."""
        self.stage = WORKFLOW
        """Current activity of the episode. The watchdog reports it in a stall."""
        self.since = clock.now()
        """Start of the current stage, in clock seconds."""

    def enter(self, stage: str) -> None:
        """Set the current stage."""
        self.stage, self.since = stage, self.clock.now()

    def __str__(self) -> str:
        return f"prompt {self.prompt_id} (group {self.group_id}, sample {self.sample})"


_current: ContextVar[EpisodeContext | None] = ContextVar("rl_episode", default=None)


def current_episode() -> EpisodeContext | None:
    """Return the episode that runs this code, or None outside of the runtime, for example in a test of a workflow."""
    return _current.get()


def set_current_episode(context: EpisodeContext) -> None:
    """Bind the running task to an episode."""
    _current.set(context)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name the activity of the current episode inside the block, for example `reward`."""
    context = _current.get()
    if context is None:
        yield
        return
    previous_stage = context.stage
    context.enter(name)
    try:
        yield
    finally:
        context.enter(previous_stage)


def group_cache() -> dict[str, Any]:
    """Return the dictionary that all episodes of the group share, or a new one outside of the runtime."""
    context = _current.get()
    return {} if context is None else context.cache


def sampling_seed(seed: int, prompt_id: int, epoch: int, sample: int, call: int = 0) -> int:
    """Return the seed of one generation, 0 to 2**63 - 1: a stable hash of the arguments, independent of timing.

    Args:
        seed: seed of the run.
        prompt_id: id of the example.
        epoch: epoch of the example.
        sample: index of the episode within its group.
        call: index of the generation within its episode.
    """
    digest = hashlib.blake2b(b"%d/%d/%d/%d/%d" % (seed, prompt_id, epoch, sample, call), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class EpisodeEngine(InferenceEngine):
    """Engine handle of one episode. It adds the episode's seeds, request ids and group, and cannot control servers."""

    __slots__ = ("_calls", "_context", "_episodes")

    def __init__(self, episodes: Episodes, context: EpisodeContext) -> None:
        self._episodes, self._context = episodes, context
        self._calls = 0

    @property
    def version(self) -> int:
        return self._episodes.engine.version

    @property
    def capabilities(self) -> Capabilities:
        return self._episodes.engine.capabilities

    @property
    def served_dtype(self) -> str:
        return self._episodes.engine.served_dtype

    @property
    def servers(self) -> list[str]:
        return self._episodes.engine.servers

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate with the engine. The episode supplies the seed, request id and group if the request has none."""
        episodes, context, call = self._episodes, self._context, self._calls
        self._calls += 1
        seed = request.seed
        if seed is None:
            seed = sampling_seed(episodes.seed, context.prompt_id, context.epoch, context.sample, call)
        group = f"{episodes.label}-{context.group_id}"
        request = ModelRequest(  # `replace` would take twice the time per completion
            input_ids=request.input_ids,
            generation=self._limit_length(self._sampling_settings(request.generation), len(request.input_ids)),
            request_id=request.request_id or f"{group}-{context.sample}-{call}",
            seed=seed,
            group=request.group or group,
            schema=request.schema,
            images=request.images,
        )
        previous_stage = context.stage
        context.enter("generation")
        try:
            response = await episodes.engine.agenerate(request)
        finally:
            context.enter(previous_stage)
        episodes.tokens += len(response.output_ids)
        episodes.last_moved = context.since
        return response

    def _sampling_settings(self, requested: GenerationConfig) -> GenerationConfig:
        override = self._episodes.generation
        if override is None:
            return requested
        return replace(
            override,
            stop=list(dict.fromkeys([*override.stop, *requested.stop])),
            stop_token_ids=list(dict.fromkeys([*override.stop_token_ids, *requested.stop_token_ids])),
        )

    def _limit_length(self, generation: GenerationConfig, prompt_length: int) -> GenerationConfig:
        max_length = self._episodes.workflow.max_length
        if max_length is None or prompt_length + generation.max_new_tokens <= max_length:
            return generation
        available = max_length - prompt_length
        if available < 1:
            raise DataError(
                f"the prompt has {prompt_length} tokens, but prompt and completion together may have at most "
                f"{max_length} (data.max_length, or the model's context). Raise that limit, or drop such examples "
                "(data.overlong=drop)."
            )
        return replace(generation, max_new_tokens=available, min_new_tokens=min(generation.min_new_tokens, available))

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        return await self._episodes.engine.score(input_ids, temperature, server)

    async def stats(self) -> dict[str, float]:
        return await self._episodes.engine.stats()

    def _reject_control(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InferenceError(
            "an episode's engine handle can only generate and score; the training loop controls the servers."
        )

    server_spec = initialize = follow_discovery = sync_version = stage_weights = commit_weights = _reject_control
    pause = resume = sleep = wake = destroy = _reject_control


async def call_user_code[T](work: Callable[[], Awaitable[T]], name: str, seconds: float, boundary: type[RLError]) -> T:
    """Run code of the user with a time limit and return its result.

    Args:
        work: starts the code.
        name: name of the code in error messages.
        seconds: time limit.
        boundary: class of the error for a timeout and for exceptions that are no `RLError`.

    Raises:
        RLError: an `RLError` of the code passes unchanged. All other exceptions become `boundary`, including
            `SystemExit` and cancellations that the caller did not request.
    """
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await work()
    except RLError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if deadline.expired():
            raise boundary(f"{name} did not end within {seconds:g} s.") from error
        raise boundary(f"{name} raised {type(error).__name__}: {error}") from error
