"""An answer as its client gathers it, over several servers if need be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError
from rl_inference.protocol import Call, EmbeddedProtocol, GenerationChunk


@dataclass
class PartialAnswer:
    """What there is of an answer. Whichever server goes on gets prompt plus tokens so far; since the
    randomness of a sampled token depends on the seed and on its position alone, it draws what the first one
    would have drawn."""

    request: ModelRequest
    rid: str
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempts: int = 0
    finish: str | None = None
    """How the last attempt ended; None while one runs or after a loss."""

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.finish is not None and self.finish != "abort"

    def next_call(self, protocol: EmbeddedProtocol) -> Call:
        """The request for what is missing."""
        have = len(self.output_ids)
        asked = self.request.generation
        left = replace(
            asked,
            max_new_tokens=asked.max_new_tokens - have,
            min_new_tokens=max(asked.min_new_tokens - have, 0),
        )
        rid = f"{self.rid}-{self.attempts}" if self.attempts else self.rid
        self.attempts += 1
        self.finish = None
        return protocol.generate(rid, self.request.input_ids + self.output_ids, left, self.request.seed, have)

    def add(self, chunk: GenerationChunk) -> None:
        """Append what a server sent.

        Raises:
            InferenceError: more tokens than were asked for.
        """
        self.output_ids.extend(chunk.output_ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend(chunk.versions)
        self.finish = chunk.finish
        if len(self.output_ids) > self.request.generation.max_new_tokens:
            raise InferenceError(
                f"request {self.rid}: asked for {self.request.generation.max_new_tokens} tokens, "
                f"got {len(self.output_ids)}."
            )
