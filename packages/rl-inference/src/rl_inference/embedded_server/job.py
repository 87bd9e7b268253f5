"""One generation inside the server: what there is of it so far, how it ends and is told."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rl_contracts.config import GenerationConfig
from rl_inference.client.stop_strings import completed, longest_stop_length


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
    batch: str = ""
    """The client's name for the request that it came with; of one alone the same as `rid`."""
    ended: Future[None] = field(default_factory=Future)
    """Done when the job has ended."""
    output_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probs; appended after the token, so its length says how much can be read."""
    versions: list[int] = field(default_factory=list)
    """Versions of the weights that made them."""
    finish_reason: dict[str, Any] | None = None
    """How it ended; None while it runs."""
    slot: int = -1
    """Where it lies in the cache while it runs."""
    read: int = 0
    """Tokens of prompt and answer that are in the cache, while the prompt is being read."""
    prefix_keys: list[int] = field(default_factory=list)
    """Hashes by which what others have read of its first `keyed_length` tokens is found."""
    keyed_length: int = 0
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
        self.versions.append(version)
        self.output_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)

    def finish(self, reason: dict[str, Any]) -> None:
        """End it, once."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.ended.set_result(None)

    def version_spans(self, start: int, end: int) -> list[dict[str, int]]:
        """The versions of tokens start..end as `[{version, start, end}]`, with indices counted from
        `start`."""
        spans, first = [], 0
        for version, run in groupby(self.versions[start:end]):
            last = first + len(list(run))
            spans.append({"version": version, "start": first, "end": last})
            first = last
        return spans

    def to_reply(self, start: int, tokenizer: Any | None, version: int, logprobs: bool) -> dict[str, Any]:
        """What is new since token `start`; the whole answer for 0.

        Args:
            tokenizer: makes the text, which only the last part of an answer carries (whole, its stop string cut off).
            version: the version served now.
            logprobs: whether log-probs are wanted.
        """
        reason = self.finish_reason
        end = len(self.logprobs)
        if reason is None:
            # The newest token may turn out to be the last one. Were it sent without that word and the server died now,
            # the answer would be continued elsewhere past its end.
            end = max(start, end - 1)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": end,
            "weight_version": version,
            "weight_versions": self.version_spans(start, end),
        }
        ids = self.output_ids[start:end]
        if logprobs:
            meta["output_token_logprobs"] = [
                [p, token, None] for p, token in zip(self.logprobs[start:end], ids, strict=True)
            ]
        result: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if reason is not None:
            result["text"] = self._text(tokenizer)
        return result

    def _text(self, tokenizer: Any | None) -> str:
        if tokenizer is None:
            return ""
        text: str = tokenizer.decode(self.output_ids, skip_special_tokens=True)
        matched = (self.finish_reason or {}).get("matched")
        return text[: text.rfind(matched)] if isinstance(matched, str) and matched in text else text

    def matched_stop(self, tokenizer: Any) -> str | None:
        """The first of the stop strings that its newest token completed, once it has its minimum length.

        Tokens that the prompt brought along from an interrupted answer count as part of it. A string that was there
        before the minimum length stays where it is."""
        if len(self.output_ids) < self.generation.min_new_tokens:
            return None
        window = longest_stop_length(self.generation.stop)
        earlier = self.prompt[len(self.prompt) - min(self.resumed, window) :]
        return completed(self.generation.stop, earlier + self.output_ids[-window:], tokenizer)
