"""Request schemas of the server: one per route with types and bounds, and checks that depend on the model.

All invalid requests are rejected here, before they reach the decode thread.
"""

from __future__ import annotations

import secrets
from base64 import b64decode
from dataclasses import MISSING, fields, replace
from reprlib import repr as shown
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from rl_contracts.config import GenerationConfig
from rl_contracts.data import AdapterSpec, ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import ConfigError, DataError, InferenceError
from rl_contracts.images import MAX_BYTES, Image, read_image
from rl_inference.embedded_server.job import GenerationJob

if TYPE_CHECKING:
    from rl_inference.embedded_server.model.slot_model import SlotModel
    from rl_inference.embedded_server.model.vision import PromptImages

MAX_IMAGES = 64
"""Maximum number of images of a prompt."""
IMAGE_BYTES = 2 * MAX_BYTES
"""Maximum size of all images of a request in base64: enough for the largest one."""
STAGE_SECONDS = 600.0
"""Default time limit in seconds for staging a version."""
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
"""Type of a request field for each type of a `GenerationConfig` field. `GenerationConfig` itself checks the values."""

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
"""Fields of `GenerationConfig`, a seed (None: random) and the number of completions.

Completion i of several uses seed + i.
"""


class Generate(Struct, forbid_unknown_fields=True):
    """Body of `/generate`."""

    input_ids: list[Size | list[Size]]
    """Token ids of one prompt or of several."""
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    """Sampling parameters for all prompts, or a list with one entry per prompt."""
    rid: Name | None = None
    return_logprob: bool = False
    stream: bool = False
    resumed_tokens: Size = 0
    """Number of tokens at the end of the prompt that belong to an interrupted completion."""
    images: Annotated[list[str], Meta(max_length=MAX_IMAGES)] = msgspec.field(default_factory=list)
    """Images of the only prompt, in order: PNG, JPEG or other files in base64."""


class Abort(Struct, forbid_unknown_fields=True):
    """Body of `/abort_request`."""

    rid: Name | None = None
    """Id of a request or of a batch."""
    abort_all: bool = False


class Score(Struct, forbid_unknown_fields=True):
    """Body of `/score`."""

    input_ids: list[Size]
    temperature: float = 1.0
    before: bool = False
    """Score with the weights served before the last commit."""


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
    """Body of `/stage_weights`."""

    meta: _Meta
    timeout: Seconds = STAGE_SECONDS
    """Seconds after which staging is abandoned."""

    def update(self) -> WeightUpdateMeta:
        """Return the weight update that the body describes."""
        parts = tuple(
            WeightPart(part.location, tuple(ParamSpec(p.name, tuple(p.shape), p.dtype) for p in part.params))
            for part in self.meta.parts
        )
        spec = self.meta.adapter
        adapter = None if spec is None else AdapterSpec(spec.scales, spec.base, spec.dtype)
        return WeightUpdateMeta(self.meta.route, self.meta.version, parts, adapter)


Mode = Literal["keep", "recompute", "wait"]


class Pause(Struct, forbid_unknown_fields=True):
    """Body of `/pause_generation`."""

    mode: Mode = "keep"
    lease: Seconds = 300.0
    """Seconds after which generation resumes automatically, unless the client repeats the pause."""


class Commit(Struct, forbid_unknown_fields=True):
    """Body of `/commit_weights`."""

    version: Size
    mode: Mode = "keep"


class Nothing(Struct, forbid_unknown_fields=True):
    """Empty body of routes without parameters."""


def expect(condition: bool, name: str, expected: str, value: object) -> None:
    """Reject a request unless `condition` holds.

    Raises:
        InferenceError: `condition` is false. The message names the field, the expected value and the value found.
    """
    if not condition:
        raise InferenceError(f"{name}: expected {expected}, found {shown(value)}.")


def read_images(request: Generate, model: SlotModel) -> PromptImages:
    """Decode the images of a valid request, and run the processor. Slow, so it must not run on the event loop.

    Raises:
        InferenceError: an image is invalid, or the images do not fit the prompt.
    """
    images = list[Image]()
    for index, text in enumerate(request.images):
        try:
            images.append(read_image(b64decode(text, validate=True)))
        except (DataError, ValueError) as error:
            raise InferenceError(f"images[{index}]: {error}") from error
    assert model.vision is not None
    try:
        return model.vision.prepare(check_ids(request.input_ids, model), tuple(images), request.resumed_tokens)
    except DataError as error:
        raise InferenceError(str(error)) from error


def to_jobs(request: Generate, model: SlotModel, most: int) -> list[GenerationJob]:
    """Return the jobs of a request: one per prompt and requested completion. `read_images` returns their images.

    Args:
        most: number of jobs that the server can hold.

    Raises:
        InferenceError: the request is invalid.
    """
    rid = request.rid or secrets.token_hex(8)
    prompts = request.input_ids if is_batch(request) else [request.input_ids]
    params = request.sampling_params or SamplingParams()
    params_per_prompt = params if isinstance(params, list) else [params] * len(prompts)
    expect(
        len(params_per_prompt) == len(prompts),
        "sampling_params",
        f"{len(prompts)} entries, one per prompt",
        len(params_per_prompt),
    )
    count = sum(each.n for each in params_per_prompt)
    expect(
        count <= most, "sampling_params.n", f"at most {most} completions in total, the capacity of the server", count
    )
    expect(count == 1 or not request.stream, "stream", "false for several completions; send one request each", True)
    expect(
        len(prompts) == 1 or not request.resumed_tokens,
        "resumed_tokens",
        "0 for several prompts",
        request.resumed_tokens,
    )
    jobs = [
        job
        for prompt, each in zip(prompts, params_per_prompt, strict=True)
        for job in _jobs_of(prompt, each, rid, request.resumed_tokens, model)
    ]
    _check_images(request, jobs, model)
    if len(jobs) > 1:
        for index, job in enumerate(jobs):
            job.rid = f"{rid}-{index}"
    return jobs


def _check_images(request: Generate, jobs: list[GenerationJob], model: SlotModel) -> None:
    """Reject images that the model or the request cannot have, and placeholders without images."""
    count, vision = len(request.images), model.vision
    if count:
        expect(vision is not None, "images", "none, because the served model reads only text", count)
        expect(not is_batch(request), "images", "one prompt per request with images", len(request.input_ids))
    elif vision is not None:
        for job in jobs:
            vision.check_placeholders(job.prompt[: len(job.prompt) - job.resumed])


def is_batch(request: Generate) -> bool:
    """Return whether the request has several prompts, or a list with one prompt."""
    return bool(request.input_ids) and isinstance(request.input_ids[0], list)


def check_ids(ids: Any, model: SlotModel) -> list[int]:
    """Return `ids` if the model can read them.

    Raises:
        InferenceError: the list is empty or too long, or an entry is not an integer or is outside the vocabulary.
    """
    are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
    expect(are_ids, "input_ids", "a list of token ids or a list of such lists", ids)
    expect(bool(ids), "input_ids", "a prompt of at least one token", ids)
    expect(
        max(ids) < model.vocab_size, "input_ids", f"token ids below the vocabulary size {model.vocab_size}", max(ids)
    )
    longest = model.context_length
    expect(len(ids) <= longest, "input_ids", f"at most {longest} tokens, the context length", len(ids))
    return ids  # type: ignore[no-any-return]


def check_temperature(value: float) -> float:
    """Return `value` if it is a valid temperature.

    Raises:
        InferenceError: `value` is not a valid temperature.
    """
    return _generation({"temperature": value}).temperature


def _jobs_of(ids: Any, params: Any, rid: str, resumed: int, model: SlotModel) -> list[GenerationJob]:
    prompt, generation = check_ids(ids, model), _generation(msgspec.structs.asdict(params))
    room = model.context_length - len(prompt)
    limit = f"fewer tokens than the context length {model.context_length}, to leave room for a completion"
    expect(room >= 1, "input_ids", limit, len(prompt))
    if generation.max_new_tokens > room:  # the context ends the completion, with the same reason as its own limit
        min_tokens = min(generation.min_new_tokens, room)
        generation = replace(generation, max_new_tokens=room, min_new_tokens=min_tokens)
    can_match_stop = not generation.stop or model.tokenizer is not None
    expect(
        can_match_stop,
        "sampling_params.stop",
        "no stop strings, because the model directory has no tokenizer",
        generation.stop,
    )
    is_valid = resumed < len(prompt)
    expect(is_valid, "resumed_tokens", f"0 to {len(prompt) - 1}, fewer than the tokens of the prompt", resumed)
    vocabulary = f"token ids below the vocabulary size {model.vocab_size}"
    for token in generation.stop_token_ids:
        expect(0 <= token < model.vocab_size, "sampling_params.stop_token_ids", vocabulary, token)
    end_ids = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else model.end_ids)
    blocked = end_ids if generation.min_new_tokens == 0 else end_ids | model.end_ids
    can_sample = len(blocked) < model.vocab_size
    expect(
        can_sample,
        "sampling_params.stop_token_ids",
        "fewer than all tokens, to leave some for a completion",
        len(blocked),
    )
    seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    return [
        GenerationJob(rid, prompt, generation, _wrap_int64(seed + index), end_ids, blocked, resumed, batch=rid)
        for index in range(params.n)
    ]


def _wrap_int64(seed: int) -> int:
    """Wrap a seed around to the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63


def _generation(values: dict[str, Any]) -> GenerationConfig:
    """Return the `GenerationConfig` of sampling parameters, without the fields that only the request has."""
    values = {name: value for name, value in values.items() if name in _hints}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        return GenerationConfig(**values)
    except ConfigError as error:
        raise InferenceError(str(error).replace("generation.", "sampling_params.")) from error
