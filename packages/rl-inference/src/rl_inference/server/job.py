"""One generation inside the server: how it is asked for, what there is of it so far, how it ends and is told.

Everything that can be wrong with a request is found here, before it reaches the decode thread.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from rl_inference.server.model import SlotModel

_TYPES: dict[str, type | tuple[type, ...]] = {
    "max_new_tokens": int,
    "min_new_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "min_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "repetition_penalty": (int, float),
    "stop": (str, list),
    "stop_token_ids": list,
    "ignore_eos": bool,
    "sampling_seed": int,
}
_MARGIN = 8
"""Tokens decoded beyond the longest stop string: a character can span tokens, and the first one may lose a
leading space."""


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

    def told(self, start: int, tokenizer: Any | None, version: int, logprobs: bool) -> dict[str, Any]:
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
        return text[: text.find(matched)] if isinstance(matched, str) and matched in text else text

    def matched_stop(self, tokenizer: Any) -> str | None:
        """The first of the stop strings that its answer now contains, once it has its minimum length.

        A token is at least one byte, so a stop string of b bytes ends within the last b tokens of the answer.
        Tokens that the prompt brought along from an interrupted answer count as part of it."""
        if len(self.output_ids) < self.generation.min_new_tokens:
            return None
        window = max(len(text.encode()) for text in self.generation.stop) + _MARGIN
        tail = self.output_ids[-window:]
        if len(tail) < window and self.resumed:
            earlier = self.prompt[-min(self.resumed, window - len(tail)) :]
            tail = earlier + tail
        text = tokenizer.decode(tail, skip_special_tokens=False)
        return next((stop for stop in self.generation.stop if stop in text), None)


@dataclass
class Limits:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    end_ids: frozenset[int]
    has_tokenizer: bool

    @classmethod
    def of(cls, model: SlotModel) -> Limits:
        """Those of a loaded model."""
        return cls(model.vocab_size, model.context_length, model.end_ids, model.tokenizer is not None)


def parse_jobs(body: dict[str, Any], limits: Limits) -> list[GenerationJob]:
    """The jobs of a `/generate` body: one, or one per row of `input_ids`.

    Raises:
        InferenceError: says what is wrong.
    """
    rows = body.get("input_ids")
    rid = body.get("rid") or secrets.token_hex(8)
    if not isinstance(rid, str):
        raise InferenceError(f"rid: expected a string, found {rid!r}.")
    params = body.get("sampling_params") or {}
    resumed = body.get("resumed_tokens", 0)
    if not is_batch(body):
        return [_parse_job(rows, params, rid, resumed, limits)]
    assert isinstance(rows, list)
    many = params if isinstance(params, list) else [params] * len(rows)
    if len(many) != len(rows):
        raise InferenceError(f"sampling_params: expected {len(rows)}, one per prompt, found {len(many)}.")
    return [_parse_job(row, many[i], f"{rid}-{i}", 0, limits) for i, row in enumerate(rows)]


def is_batch(body: dict[str, Any]) -> bool:
    """Whether `input_ids` holds several prompts."""
    rows = body.get("input_ids")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], list)


def parse_ids(value: Any, limits: Limits) -> list[int]:
    """Check a list of token ids.

    Raises:
        InferenceError: not a list of integers, empty, outside the vocabulary or too long.
    """
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InferenceError("input_ids: expected a list of token ids.")
    if not value:
        raise InferenceError("input_ids: the prompt is empty; expected at least one token.")
    for token in (min(value), max(value)):
        if not 0 <= token < limits.vocab_size:
            raise InferenceError(f"input_ids: token {token} is outside the vocabulary of {limits.vocab_size}.")
    if len(value) > limits.context_length:
        raise InferenceError(f"input_ids: {len(value)} tokens are more than the context of {limits.context_length}.")
    return value


def _parse_job(ids: Any, params: Any, rid: str, resumed: Any, limits: Limits) -> GenerationJob:
    prompt = parse_ids(ids, limits)
    generation, seed = _parse_params(params)
    room = limits.context_length - len(prompt)
    if room < 1:
        raise InferenceError(
            f"prompt: {len(prompt)} tokens leave no room for an answer in the context of {limits.context_length}."
        )
    if generation.max_new_tokens > room:  # the answer ends at the context's end, as one that reached its own limit
        least = min(generation.min_new_tokens, room)
        generation = replace(generation, max_new_tokens=room, min_new_tokens=least)
    if generation.stop and not limits.has_tokenizer:
        raise InferenceError("stop: the model's directory has no tokenizer, so stop strings cannot be found.")
    if type(resumed) is not int or not 0 <= resumed < len(prompt):
        raise InferenceError(
            f"resumed_tokens: expected 0 to {len(prompt) - 1} (of the prompt's tokens), found {resumed!r}."
        )
    end_ids = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else limits.end_ids)
    blocked = end_ids if generation.min_new_tokens == 0 else end_ids | limits.end_ids
    outside = [token for token in blocked if not 0 <= token < limits.vocab_size]
    if outside:
        raise InferenceError(f"stop_token_ids: {outside[0]} is outside the vocabulary of {limits.vocab_size}.")
    return GenerationJob(rid, prompt, generation, seed, end_ids, blocked, resumed)


def _parse_params(params: Any) -> tuple[GenerationConfig, int]:
    if not isinstance(params, dict):
        raise InferenceError("sampling_params: expected an object.")
    values = dict(params)
    for name, value in values.items():
        if name not in _TYPES:
            near = difflib.get_close_matches(name, _TYPES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_TYPES)}."
            raise InferenceError(f"sampling_params: unknown parameter {name!r}{hint}")
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] is not bool):
            raise InferenceError(f"sampling_params.{name}: found {value!r}, which has the wrong type.")
    seed = values.pop("sampling_seed", None)
    seed = secrets.randbits(63) if seed is None else seed
    if not -(2**63) <= seed < 2**63:
        raise InferenceError(f"sampling_params.sampling_seed: expected a 64-bit integer, found {seed}.")
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if not all(isinstance(text, str) and text for text in values.get("stop", [])):
        raise InferenceError("sampling_params.stop: expected strings that are not empty.")
    if not all(type(token) is int for token in values.get("stop_token_ids", [])):
        raise InferenceError("sampling_params.stop_token_ids: expected a list of token ids.")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        return GenerationConfig(**values), seed
    except ConfigError as error:
        raise InferenceError(str(error).replace("generation.", "sampling_params.")) from error
