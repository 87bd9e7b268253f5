"""What may be asked of the server: a schema per route with types and bounds, and what depends on the model.

Everything that can be wrong with a request is found here, before it reaches the decode thread.
"""

from __future__ import annotations

import secrets
from dataclasses import MISSING, fields, replace
from reprlib import repr as shown
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from rl_contracts.config import GenerationConfig
from rl_contracts.data import AdapterSpec, ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError
from rl_inference.embedded_server.job import GenerationJob

if TYPE_CHECKING:
    from rl_inference.embedded_server.model.slot_model import SlotModel

STAGE_SECONDS = 600.0
"""Within which a version must be there, unless its client says another time."""
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Name = Annotated[str, Meta(min_length=1, max_length=4096)]
Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_BOUNDED = {
    int: Int32,
    list[str]: Annotated[list[Text], Meta(max_length=64)] | Text,
    list[int]: Annotated[list[Int32], Meta(max_length=2**16)],
}
"""How a type of `GenerationConfig` is asked for; what its values may be, it says itself."""

_hints = get_type_hints(GenerationConfig)
SamplingParams: Any = msgspec.defstruct(
    "SamplingParams",
    [
        *(
            (
                item.name,
                _BOUNDED.get(_hints[item.name], _hints[item.name]),
                msgspec.field(default=item.default)
                if item.default_factory is MISSING
                else msgspec.field(default_factory=item.default_factory),
            )
            for item in fields(GenerationConfig)
        ),
        ("sampling_seed", Int64 | None, None),
        ("n", Annotated[int, Meta(ge=1, le=4096)], 1),
    ],
    forbid_unknown_fields=True,
)
"""`GenerationConfig`, a seed (None: any), and how many answers are wanted. Answer i of several has seed + i."""


class Generate(Struct, forbid_unknown_fields=True):
    """`/generate`."""

    input_ids: list[Size | list[Size]]
    """A prompt, or several."""
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    """For all prompts, or one for each."""
    rid: Name | None = None
    return_logprob: bool = False
    stream: bool = False
    resumed_tokens: Size = 0
    """How many of the prompt's last tokens are an interrupted answer's."""


class Abort(Struct, forbid_unknown_fields=True):
    """`/abort_request`."""

    rid: Name | None = None
    """Of one request, or of a batch."""
    abort_all: bool = False


class Score(Struct, forbid_unknown_fields=True):
    """`/score`."""

    input_ids: list[Size]
    temperature: float = 1.0
    before: bool = False
    """At the weights that were served before the last commit."""


class _Param(Struct, forbid_unknown_fields=True):
    name: Name
    shape: Annotated[list[Size], Meta(max_length=16)]
    dtype: Name


class _Part(Struct, forbid_unknown_fields=True):
    location: Annotated[str, Meta(max_length=4096, pattern=r"^[^\0]*$")]
    params: list[_Param]


class _Adapter(Struct, forbid_unknown_fields=True):
    scales: dict[Name, Annotated[float, Meta(ge=-1e9, le=1e9)]]
    base: dict[Name, Name]
    dtype: Name


class _Meta(Struct, forbid_unknown_fields=True):
    route: Name
    version: Size
    parts: Annotated[list[_Part], Meta(max_length=1024)]
    adapter: _Adapter | None = None


class Stage(Struct, forbid_unknown_fields=True):
    """`/stage_weights`."""

    meta: _Meta
    timeout: Seconds = STAGE_SECONDS
    """After which the version is given up."""

    def update(self) -> WeightUpdateMeta:
        """The update as it was told."""
        parts = tuple(
            WeightPart(part.location, tuple(ParamSpec(p.name, tuple(p.shape), p.dtype) for p in part.params))
            for part in self.meta.parts
        )
        told = self.meta.adapter
        adapter = None if told is None else AdapterSpec(told.scales, told.base, told.dtype)
        return WeightUpdateMeta(self.meta.route, self.meta.version, parts, adapter)


Mode = Literal["keep", "recompute", "wait"]


class Pause(Struct, forbid_unknown_fields=True):
    """`/pause_generation`."""

    mode: Mode = "keep"
    lease: Seconds = 300.0
    """Seconds after which generation goes on by itself, unless the pause is asked for again."""


class Commit(Struct, forbid_unknown_fields=True):
    """`/commit_weights`."""

    version: Size
    mode: Mode = "keep"


class Nothing(Struct, forbid_unknown_fields=True):
    """Routes that are told nothing."""


def expect(condition: bool, name: str, expected: str, found: object) -> None:
    """Refuse a request unless `condition` holds.

    Raises:
        InferenceError: names the field, what was expected and what was found.
    """
    if not condition:
        raise InferenceError(f"{name}: expected {expected}, found {shown(found)}.")


def to_jobs(asked: Generate, model: SlotModel, most: int) -> list[GenerationJob]:
    """The jobs of a request: for each prompt as many as it wants answers.

    Args:
        most: jobs that the server can hold.

    Raises:
        InferenceError: says what is wrong.
    """
    rid = asked.rid or secrets.token_hex(8)
    rows = asked.input_ids if is_batch(asked) else [asked.input_ids]
    params = asked.sampling_params or SamplingParams()
    many = params if isinstance(params, list) else [params] * len(rows)
    expect(len(many) == len(rows), "sampling_params", f"{len(rows)}, one per prompt", len(many))
    count = sum(each.n for each in many)
    expect(count <= most, "sampling_params.n", f"at most {most} answers in all, which the server can hold", count)
    expect(count == 1 or not asked.stream, "stream", "false for several answers; send one request each", True)
    expect(len(rows) == 1 or not asked.resumed_tokens, "resumed_tokens", "0 for several prompts", asked.resumed_tokens)
    jobs = [
        job
        for row, each in zip(rows, many, strict=True)
        for job in _jobs_of(row, each, rid, asked.resumed_tokens, model)
    ]
    if len(jobs) > 1:
        for index, job in enumerate(jobs):
            job.rid = f"{rid}-{index}"
    return jobs


def is_batch(asked: Generate) -> bool:
    """Whether there are several prompts, or a list of one."""
    return bool(asked.input_ids) and isinstance(asked.input_ids[0], list)


def check_ids(ids: Any, model: SlotModel) -> list[int]:
    """Token ids that the model can read.

    Raises:
        InferenceError: not all are integers, none, outside the vocabulary or too long.
    """
    are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
    expect(are_ids, "input_ids", "a list of token ids, or of such lists alone", ids)
    expect(bool(ids), "input_ids", "a prompt of at least one token", ids)
    expect(max(ids) < model.vocab_size, "input_ids", f"tokens of the vocabulary of {model.vocab_size}", max(ids))
    longest = model.context_length
    expect(len(ids) <= longest, "input_ids", f"at most {longest} tokens, which is the context", len(ids))
    return ids  # type: ignore[no-any-return]


def check_temperature(value: float) -> float:
    """A temperature that leaves something of the logits.

    Raises:
        InferenceError: it does not.
    """
    return _generation({"temperature": value}).temperature


def _jobs_of(ids: Any, params: Any, rid: str, resumed: int, model: SlotModel) -> list[GenerationJob]:
    prompt, generation = check_ids(ids, model), _generation(msgspec.structs.asdict(params))
    room = model.context_length - len(prompt)
    fewer = f"fewer tokens than the context of {model.context_length}, to leave room for an answer"
    expect(room >= 1, "input_ids", fewer, len(prompt))
    if generation.max_new_tokens > room:  # the answer ends at the context's end, as one that reached its own limit
        least = min(generation.min_new_tokens, room)
        generation = replace(generation, max_new_tokens=room, min_new_tokens=least)
    findable = not generation.stop or model.tokenizer is not None
    expect(findable, "sampling_params.stop", "none, because the model's directory has no tokenizer", generation.stop)
    known = resumed < len(prompt)
    expect(known, "resumed_tokens", f"0 to {len(prompt) - 1} of the prompt's tokens", resumed)
    vocabulary = f"tokens of the vocabulary of {model.vocab_size}"
    for token in generation.stop_token_ids:
        expect(0 <= token < model.vocab_size, "sampling_params.stop_token_ids", vocabulary, token)
    end_ids = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else model.end_ids)
    blocked = end_ids if generation.min_new_tokens == 0 else end_ids | model.end_ids
    left = len(blocked) < model.vocab_size
    expect(left, "sampling_params.stop_token_ids", "fewer than all tokens, to leave some for an answer", len(blocked))
    seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    return [
        GenerationJob(rid, prompt, generation, _wrapped(seed + index), end_ids, blocked, resumed, batch=rid)
        for index in range(params.n)
    ]


def _wrapped(seed: int) -> int:
    """As int64."""
    return (seed + 2**63) % 2**64 - 2**63


def _generation(values: dict[str, Any]) -> GenerationConfig:
    """Sampling parameters without those that are the request's own."""
    values = {name: value for name, value in values.items() if name in _hints}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        return GenerationConfig(**values)
    except ConfigError as error:
        raise InferenceError(str(error).replace("generation.", "sampling_params.")) from error
