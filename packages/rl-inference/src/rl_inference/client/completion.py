"""State of a completion in the client while one or more servers generate it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from math import inf

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError
from rl_contracts.inference import Capabilities
from rl_inference.client.protocol import Call, GenerationChunk, ServerProtocol
from rl_inference.client.stop_strings import StopStrings


@dataclass
class PartialCompletion:
    """Unfinished completion of a request.

    After an interruption, the next attempt continues from the prompt and the tokens received so far. The interruption
    does not change the tokens if sampling depends only on seed and position (`capabilities.seeds_by_position`). A
    completion with a JSON schema starts again instead, because the server loses its position in the schema.
    """

    request: ModelRequest
    """Request of the caller."""
    rid: str
    """Id of the request."""
    stops: StopStrings | None = None
    """Detector of stop strings, or None if the client need not detect any."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens received so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token."""
    versions: list[int] = field(default_factory=list)
    """Version of each token."""
    attempts: int = 0
    """Number of attempts so far, including the current one."""
    begin: int = 0
    """Number of tokens before the current attempt."""
    lines: int = 0
    """Number of stream lines received so far, including those without tokens."""
    last_probe: float = -inf
    """Clock time of the last successful probe of a silent server."""
    ended: list[tuple[str, str]] = field(default_factory=list)
    """Servers that ended or failed during this request: id of the process, and the error."""
    finish: str | None = None
    """Reason for the end of the last attempt; None while an attempt runs or after its server was lost."""

    @property
    def done(self) -> bool:
        """True if the completion is finished."""
        return self.finish is not None and self.finish != "abort"

    @property
    def attempt_id(self) -> str:
        """Id of the current attempt on its server."""
        # ends with a slash, because SGLang aborts all requests whose ids start with the given one
        return f"{self.rid}-{self.attempts - 1}/" if self.attempts > 1 else f"{self.rid}/"

    def next_call(self, protocol: ServerProtocol) -> Call[GenerationChunk | None]:
        """Start a new attempt and return its request for the missing tokens.

        Raises:
            InferenceError: the servers do not support the request as specified.
        """
        settings, schema, capabilities = self.request.generation, self.request.schema, protocol.capabilities
        reject_unsupported(settings, capabilities)
        if self.request.images:
            reject_images(capabilities)
        if schema is not None:  # the position in the schema is lost with the server, so start again
            reject_schema(capabilities)
            self.begin = 0
            self.drop_attempt()
        count = self.begin = len(self.output_ids)
        remaining = replace(
            settings,
            max_new_tokens=settings.max_new_tokens - count,
            min_new_tokens=max(settings.min_new_tokens - count, 0),
            stop=settings.stop if capabilities.resumes_completions else [],
        )
        seed = self.request.seed
        if seed is not None and count and not capabilities.seeds_by_position:
            seed = attempt_seed(seed, count)
        self.attempts += 1
        self.finish = None
        return protocol.generate(
            self.attempt_id,
            self.request.input_ids + self.output_ids,
            remaining,
            seed,
            count,
            schema,
            self.request.images,
        )

    def add(self, chunk: GenerationChunk, version: int = 0) -> None:
        """Append the tokens of a chunk.

        Args:
            chunk: tokens to append.
            version: version that the server had committed when the attempt started. Tokens without a reported version
                get it, because none of them is older.

        Raises:
            InferenceError: the server sent more tokens than requested.
        """
        self.output_ids.extend(chunk.output_ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend(chunk.versions or [version] * len(chunk.output_ids))
        if chunk.stamps is not None:
            self.versions[self.begin :] = chunk.stamps
        self.finish = chunk.finish
        if len(self.output_ids) > self.request.generation.max_new_tokens:
            raise InferenceError(
                f"request {self.rid}: requested {self.request.generation.max_new_tokens} tokens, "
                f"received {len(self.output_ids)}."
            )

    def drop_attempt(self) -> None:
        """Remove the tokens of the current attempt."""
        for values in (self.output_ids, self.logprobs, self.versions):
            del values[self.begin :]
        if self.stops is not None:
            self.stops.forget(self.begin)

    def stopped(self) -> bool:
        """Return whether the completion contains a stop string, if the client has to detect them."""
        return self.stops is not None and self.stops.update(self.output_ids)

    def truncate_at_stop(self) -> None:
        """Truncate the completion after its stop string, if the client detected one."""
        if self.stops is not None and self.stops.end is not None:
            for values in (self.output_ids, self.logprobs, self.versions):
                del values[self.stops.end :]
            self.finish = "stop"


def reject_unsupported(generation: GenerationConfig, capabilities: Capabilities) -> None:
    """Reject settings that the servers would silently apply differently.

    Args:
        generation: settings of the request.
        capabilities: optional features of the servers.

    Raises:
        InferenceError: the servers do not support some settings; the message names them and a remedy.
    """
    if capabilities.truncated_logprobs and (generation.truncates or generation.penalizes):
        raise InferenceError(
            "generation: expected top_p=1, top_k=0, min_p=0 and no penalties, because other values change the "
            f"log-probs of these servers; found {_changed_settings(generation)}. Remove these settings, or use servers "
            "that support them (allocation=embedded:...)."
        )
    if generation.penalizes and not capabilities.resumes_completions:
        raise InferenceError(
            "generation: expected no penalties, because these servers lose the penalty state at an interruption; found "
            f"{_changed_settings(generation)}. Remove these settings, or use servers that support them "
            "(allocation=embedded:...)."
        )


def reject_schema(able: Capabilities) -> None:
    """Reject a request with a JSON schema if the servers do not support schemas.

    Raises:
        InferenceError: the servers do not support schemas; the message names servers that do.
    """
    if not able.schemas:
        raise InferenceError(
            "these servers do not support a JSON schema. Remove it, or use servers that support schemas "
            "(allocation=vllm:... or sglang:...)."
        )


def reject_images(able: Capabilities) -> None:
    """Reject a request with images if the servers do not support images.

    Raises:
        InferenceError: the servers do not support images; the message names servers that do.
    """
    if not able.images:
        raise InferenceError(
            "these servers do not support images. Remove them, or use servers that support images "
            "(allocation=embedded:... or vllm:...)."
        )


def _changed_settings(generation: GenerationConfig) -> str:
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    default = GenerationConfig()
    values = [(name, getattr(generation, name)) for name in names]
    return ", ".join(f"{name}={value}" for name, value in values if value != getattr(default, name))


def attempt_seed(seed: int, have: int) -> int:
    """Return a seed between 0 and 2**63 - 1 for an attempt that starts after `have` tokens.

    Servers restart their random numbers with each request, so a constant seed would draw the same numbers twice. The
    seed depends on the number of tokens: attempts without new tokens do not change it.
    """
    digest = hashlib.blake2b(b"%d/%d" % (seed, have), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
