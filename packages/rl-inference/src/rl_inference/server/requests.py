"""Reading requests: everything that can be wrong with one is found here, before it reaches the decode
thread."""

from __future__ import annotations

import difflib
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import ConfigError, InferenceError
from rl_inference.server.job import GenerationJob

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
