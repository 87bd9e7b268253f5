"""An answer as its client gathers it, over several servers if need be."""

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
    """Whichever server goes on gets prompt plus tokens so far. Where the randomness of a sampled token depends on the
    seed and on its position alone, it draws what the first one would have drawn."""

    request: ModelRequest
    rid: str
    stops: StopStrings | None = None
    """Finds stop strings, where the servers cannot over an interruption."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempts: int = 0
    begin: int = 0
    """Tokens before this attempt."""
    lines: int = 0
    """Lines of streams so far, those that say nothing too."""
    heard: float = -inf
    """Clock time at which a silent server was last seen to be at work."""
    ended: list[tuple[str, str]] = field(default_factory=list)
    """Lives of servers that ended or failed while they worked on it, and how."""
    finish: str | None = None
    """How the last attempt ended; None while one runs or after a loss."""

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.finish is not None and self.finish != "abort"

    @property
    def attempt_id(self) -> str:
        """What servers know the current attempt by."""
        # ends in a sign, because SGLang aborts all whose ids begin with what it is told
        return f"{self.rid}-{self.attempts - 1}/" if self.attempts > 1 else f"{self.rid}/"

    def next_call(self, protocol: ServerProtocol) -> Call[GenerationChunk | None]:
        """The request for what is missing.

        Raises:
            InferenceError: the servers would do something else than what is asked for.
        """
        asked, schema, able = self.request.generation, self.request.schema, protocol.capabilities
        refuse(asked, able)
        if schema is not None:  # where a server stands in it, no other one knows
            refuse_schema(able)
            self.begin = 0
            self.drop_attempt()
        have = self.begin = len(self.output_ids)
        left = replace(
            asked,
            max_new_tokens=asked.max_new_tokens - have,
            min_new_tokens=max(asked.min_new_tokens - have, 0),
            stop=asked.stop if able.resumes_completions else [],
        )
        seed = self.request.seed
        if seed is not None and have and not able.seeds_by_position:
            seed = attempt_seed(seed, have)
        self.attempts += 1
        self.finish = None
        return protocol.generate(self.attempt_id, self.request.input_ids + self.output_ids, left, seed, have, schema)

    def add(self, chunk: GenerationChunk, version: int = 0) -> None:
        """Append what a server sent.

        Args:
            version: what the server had committed when the attempt began: no token of it is older.

        Raises:
            InferenceError: more tokens than were asked for.
        """
        self.output_ids.extend(chunk.output_ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend(chunk.versions or [version] * len(chunk.output_ids))
        if chunk.stamps is not None:
            self.versions[self.begin :] = chunk.stamps
        self.finish = chunk.finish
        if len(self.output_ids) > self.request.generation.max_new_tokens:
            raise InferenceError(
                f"request {self.rid}: asked for {self.request.generation.max_new_tokens} tokens, "
                f"got {len(self.output_ids)}."
            )

    def drop_attempt(self) -> None:
        """Take back what this attempt brought."""
        for values in (self.output_ids, self.logprobs, self.versions):
            del values[self.begin :]
        if self.stops is not None:
            self.stops.forget(self.begin)

    def stopped(self) -> bool:
        """Whether a stop string is complete that the servers do not look for."""
        return self.stops is not None and self.stops.update(self.output_ids)

    def truncate_at_stop(self) -> None:
        """End it at the token that completed such a stop string, if one did."""
        if self.stops is not None and self.stops.end is not None:
            for values in (self.output_ids, self.logprobs, self.versions):
                del values[self.stops.end :]
            self.finish = "stop"


def refuse(asked: GenerationConfig, able: Capabilities) -> None:
    """Refuse what servers would do silently wrong.

    Raises:
        InferenceError: names the setting and the remedy.
    """
    if able.truncated_logprobs and (asked.truncates or asked.penalizes):
        raise InferenceError(
            "generation: expected top_p=1, top_k=0, min_p=0 and no penalties, because these servers give the log-probs "
            f"of what they leave, not of the model's distribution; found {_given(asked)}. Leave them away, or use "
            "servers that can (allocation=embedded:...)."
        )
    if asked.penalizes and not able.resumes_completions:
        raise InferenceError(
            "generation: expected no penalties, because these servers forget after an interruption which tokens an "
            f"answer already has; found {_given(asked)}. Leave them away, or use servers that can "
            "(allocation=embedded:...)."
        )


def refuse_schema(able: Capabilities) -> None:
    """Refuse an answer that is to be kept to a schema, where servers would make a free one.

    Raises:
        InferenceError: names what can.
    """
    if not able.schemas:
        raise InferenceError(
            "these servers keep no answer to a schema. Ask for free text, or use servers that can (allocation=vllm:... "
            "or sglang:...)."
        )


def _given(asked: GenerationConfig) -> str:
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    default = GenerationConfig()
    found = [(name, getattr(asked, name)) for name in names]
    return ", ".join(f"{name}={value}" for name, value in found if value != getattr(default, name))


def attempt_seed(seed: int, have: int) -> int:
    """A seed, 0 to 2**63 - 1, for an attempt after `have` tokens: where random numbers begin anew with each request,
    the same seed would draw the same ones twice. An attempt that brought no token changes nothing."""
    digest = hashlib.blake2b(b"%d/%d" % (seed, have), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
