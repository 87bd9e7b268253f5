"""One generation inside the server: how it is asked for, what there is of it so far, how it ends and is told.

Everything that can be wrong with a request is found here, before it reaches the decode thread.
"""

from __future__ import annotations

import difflib
import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from rl_inference.server.model import SlotModel

_PARAMETERS = {item.name: str(item.type) for item in fields(GenerationConfig)} | {"sampling_seed": "int"}
"""Sampling parameters and their types."""
_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}
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
        earlier = self.prompt[len(self.prompt) - min(self.resumed, window) :]
        tail = (earlier + self.output_ids[-window:])[-window:]
        text = tokenizer.decode(tail, skip_special_tokens=False)
        return next((stop for stop in self.generation.stop if stop in text), None)


def expect(condition: bool, name: str, expected: str, found: object) -> None:
    """Refuse a request unless `condition` holds.

    Raises:
        InferenceError: names the field, what was expected and what was found.
    """
    if not condition:
        raise InferenceError(f"{name}: expected {expected}, found {shown(found)}.")


def parse_jobs(body: dict[str, Any], model: SlotModel) -> list[GenerationJob]:
    """The jobs of a `/generate` body: one, or one per row of `input_ids`.

    Raises:
        InferenceError: says what is wrong.
    """
    rid = body.get("rid") or secrets.token_hex(8)
    expect(isinstance(rid, str), "rid", "a string", rid)
    params = body.get("sampling_params") or {}
    if not is_batch(body):
        return [_parse_job(body.get("input_ids"), params, rid, body.get("resumed_tokens", 0), model)]
    rows = body["input_ids"]
    many = params if isinstance(params, list) else [params] * len(rows)
    expect(len(many) == len(rows), "sampling_params", f"{len(rows)}, one per prompt", len(many))
    return [_parse_job(row, many[i], f"{rid}-{i}", 0, model) for i, row in enumerate(rows)]


def is_batch(body: dict[str, Any]) -> bool:
    """Whether `input_ids` holds several prompts."""
    rows = body.get("input_ids")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], list)


def parse_ids(value: Any, model: SlotModel) -> list[int]:
    """Check a list of token ids.

    Raises:
        InferenceError: not a list of integers, empty, outside the vocabulary or too long.
    """
    are_ids = isinstance(value, list) and all(type(token) is int for token in value)
    expect(are_ids, "input_ids", "a list of token ids", value)
    expect(bool(value), "input_ids", "a prompt of at least one token", value)
    for token in (min(value), max(value)):
        expect(0 <= token < model.vocab_size, "input_ids", f"tokens of the vocabulary of {model.vocab_size}", token)
    longest = model.context_length
    expect(len(value) <= longest, "input_ids", f"at most {longest} tokens, which is the context", len(value))
    ids: list[int] = value
    return ids


def _parse_job(ids: Any, params: Any, rid: str, resumed: Any, model: SlotModel) -> GenerationJob:
    prompt = parse_ids(ids, model)
    generation, seed = _parse_params(params)
    room = model.context_length - len(prompt)
    fewer = f"fewer tokens than the context of {model.context_length}, to leave room for an answer"
    expect(room >= 1, "input_ids", fewer, len(prompt))
    if generation.max_new_tokens > room:  # the answer ends at the context's end, as one that reached its own limit
        least = min(generation.min_new_tokens, room)
        generation = replace(generation, max_new_tokens=room, min_new_tokens=least)
    findable = not generation.stop or model.tokenizer is not None
    expect(findable, "sampling_params.stop", "none, because the model's directory has no tokenizer", generation.stop)
    known = type(resumed) is int and 0 <= resumed < len(prompt)
    expect(known, "resumed_tokens", f"0 to {len(prompt) - 1} of the prompt's tokens", resumed)
    end_ids = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else model.end_ids)
    blocked = end_ids if generation.min_new_tokens == 0 else end_ids | model.end_ids
    for token in blocked:
        valid = 0 <= token < model.vocab_size
        expect(valid, "sampling_params.stop_token_ids", f"tokens of the vocabulary of {model.vocab_size}", token)
    return GenerationJob(rid, prompt, generation, seed, end_ids, blocked, resumed)


def _parse_params(params: Any) -> tuple[GenerationConfig, int]:
    expect(isinstance(params, dict), "sampling_params", "an object", params)
    values = dict(params)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    for name, value in values.items():
        if name not in _PARAMETERS:
            near = difflib.get_close_matches(name, _PARAMETERS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_PARAMETERS)}."
            raise InferenceError(f"sampling_params: unknown parameter {name!r}{hint}")
        expect(_fits(value, _PARAMETERS[name]), f"sampling_params.{name}", f"a {_PARAMETERS[name]}", value)
    seed: int = values.pop("sampling_seed", secrets.randbits(63))
    expect(-(2**63) <= seed < 2**63, "sampling_params.sampling_seed", "a 64-bit integer", seed)
    expect(all(values.get("stop", ())), "sampling_params.stop", "strings that are not empty", values.get("stop"))
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        return GenerationConfig(**values), seed
    except ConfigError as error:
        raise InferenceError(str(error).replace("generation.", "sampling_params.")) from error


def _fits(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type, which is written as in `_PARAMETERS`."""
    if kind.startswith("list["):
        return isinstance(value, list) and all(_fits(entry, kind[5:-1]) for entry in value)
    return isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "bool")
