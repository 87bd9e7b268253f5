"""One generation inside the server: what was asked, what there is so far, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rl_contracts.config import GenerationConfig


@dataclass(eq=False)
class GenerationJob:
    """A request and its answer so far. The decode thread appends; the HTTP thread only reads, up to
    `len(logprobs)`."""

    rid: str
    """The client's name for it."""
    prompt: list[int]
    """Token ids to continue; the end of an interrupted answer included."""
    generation: GenerationConfig
    """How to sample. `max_new_tokens` and `min_new_tokens` count from the end of `prompt`."""
    seed: int
    """Sampling seed, int64."""
    end_ids: frozenset[int]
    """Every token that ends the answer."""
    blocked_ids: frozenset[int] = frozenset()
    """Tokens that may not be sampled before the minimum length: those, and the model's own end tokens even
    where they are ignored."""
    resumed: int = 0
    """How many of the last prompt tokens belong to the answer already (for stop strings that straddle the
    seam)."""
    wake: Callable[[], None] | None = None
    """Called in the decode thread when the job has ended."""
    output_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probs; appended after the token, so its length says how much can be read."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, first index) of each run of tokens made by one version of the weights."""
    finish_reason: dict[str, Any] | None = None
    """How it ended; None while it runs."""
    slot: int = -1
    """Where it lies in the cache while it runs."""
    read: int = 0
    """Tokens of prompt and answer that are in the cache, while the prompt is being read."""
    cache_version: int = -1
    """Version of the weights that read all of what is in the cache."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together; the position of the next one."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.output_ids

    @property
    def first_stop_position(self) -> int:
        """Before this position no end token may be sampled."""
        return len(self.prompt) + self.generation.min_new_tokens

    def append(self, token: int, logprob: float | None, version: int) -> None:
        """Add a generated token; without its log-prob, it is not shown before `logprobs` is set."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output_ids)))
        self.output_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)

    def finish(self, reason: dict[str, Any]) -> None:
        """End it, once."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self.wake is not None:
                self.wake()

    def version_spans(self, start: int, end: int) -> list[dict[str, int]]:
        """The versions of tokens start..end as `[{version, start, end}]`, with indices counted from
        `start`."""
        result = []
        for i, (version, first) in enumerate(self.spans):
            last = self.spans[i + 1][1] if i + 1 < len(self.spans) else end
            low, high = max(first, start), min(last, end)
            if low < high:
                result.append({"version": version, "start": low - start, "end": high - start})
        return result
