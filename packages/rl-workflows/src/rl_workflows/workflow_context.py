"""What code inside an episode may know of it: whose episode it is, what its group shares, and in which stage it is.

The stage is what the watchdog names when nothing moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_contracts.clock import Clock

WORKFLOW = "workflow"
"""Stage of an episode while it is in nothing that has a name of its own."""


class EpisodeContext:
    """One episode that runs."""

    __slots__ = ("cache", "clock", "epoch", "group_id", "prompt_id", "sample", "since", "stage")

    def __init__(
        self, prompt_id: int, group_id: int, sample: int, epoch: int, cache: dict[str, Any], clock: Clock
    ) -> None:
        self.prompt_id = prompt_id
        """Data row that is answered."""
        self.group_id = group_id
        """Admission of the prompt."""
        self.sample = sample
        """Which of the group's episodes this is."""
        self.epoch = epoch
        """Pass over the data."""
        self.cache = cache
        """Shared by the group: what depends on the prompt alone is computed once."""
        self.clock = clock
        """The runtime's clock."""
        self.stage = WORKFLOW
        """What it is doing."""
        self.since = clock.now()
        """Since when, in seconds of the clock."""

    def enter(self, stage: str) -> None:
        """Say what the episode does from now on."""
        self.stage, self.since = stage, self.clock.now()


_current: ContextVar[EpisodeContext | None] = ContextVar("rl_episode", default=None)


def current_episode() -> EpisodeContext | None:
    """The episode in which this code runs; None outside of the runtime, for example in a test of a workflow."""
    return _current.get()


def set_current_episode(context: EpisodeContext) -> None:
    """Bind the running task to an episode."""
    _current.set(context)


def episode_of(task: asyncio.Task[Any]) -> EpisodeContext | None:
    """The episode to which a task is bound."""
    return task.get_context().get(_current)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name what an episode does inside the block, for example `reward`."""
    context = _current.get()
    if context is None:
        yield
        return
    before = context.stage
    context.enter(name)
    try:
        yield
    finally:
        context.enter(before)


def group_cache() -> dict[str, Any]:
    """A dictionary that all episodes of the group share; a new one outside of the runtime."""
    context = _current.get()
    return {} if context is None else context.cache
