"""What is said to a server: URLs and JSON, and what its answers say. Another server is another object like
`EmbeddedProtocol`; routing, retries and the two-phase update above it stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError


@dataclass(frozen=True)
class Call[T]:
    """A request without its server."""

    path: str
    parse: Callable[[bytes], T]
    """What the answer says, or of a stream each line. Raises ValueError, KeyError or TypeError for what is no answer of
    this protocol."""
    body: dict[str, Any] | None = None
    """JSON; None for GET."""


@dataclass
class GenerationChunk:
    """What one message of a stream adds to an answer."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Per token, as the server stamped them."""
    finish: str | None = None
    """`stop`, `length` or `abort`; None while it goes on."""
    error: str | None = None
    """The server failed while it generated."""


class EmbeddedProtocol:
    """The embedded server's own: SGLang's `/generate`, and staged weights."""

    instance_header = "X-Server-Instance"
    """Header with which every answer says which life of the server's process gave it."""

    def generate(
        self, rid: str, input_ids: list[int], generation: GenerationConfig, seed: int | None, resumed: int
    ) -> Call[GenerationChunk | None]:
        """Continue `input_ids`, the last `resumed` of which are an interrupted answer's; a stream of events
        comes back, of which blank lines and the end mark say nothing."""
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": vars(generation) | ({} if seed is None else {"sampling_seed": seed}),
            "return_logprob": True,
            "stream": True,
            "resumed_tokens": resumed,
        }
        return Call("/generate", _chunk, body)

    def error_message(self, body: bytes) -> str:
        """The sentence in a refusal."""
        try:
            return str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return body.decode(errors="replace")[:500].strip() or "no reason given"

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Call[list[float]]:
        """Log-probs of given tokens; `before`: at the weights served before the last commit."""
        return Call("/score", _logprobs, {"input_ids": input_ids, "temperature": temperature, "before": before})

    def stage(self, meta: WeightUpdateMeta) -> Call[WeightReceipt]:
        """Load a version beside the served one."""
        return Call("/stage_weights", _receipt, {"meta": meta.to_json()})

    def receipt(self) -> Call[WeightReceipt]:
        """Checksums of the served weights."""
        return Call("/weight_receipt", _receipt)

    def pause(self, mode: str) -> Call[float | None]:
        """Stop generating (`wait`: after the running answers); says None once it stands still, and until then how many
        tokens it has generated."""
        return Call("/pause_generation", _tokens_until_paused, {"mode": mode})

    def commit(self, version: int, mode: str) -> Call[dict[str, Any]]:
        """Serve the staged version."""
        return Call("/commit_weights", _object, {"version": version, "mode": mode})

    def resume(self) -> Call[float]:
        """Generate again; says how many seconds it stood still."""
        return Call("/continue_generation", _paused_seconds, {})

    def health(self) -> Call[tuple[int, int]]:
        """Whether it can serve, and which version; and how many requests it works on, whoever sent them."""
        return Call("/health", _version_and_open)

    def stats(self) -> Call[dict[str, Any]]:
        """Counters."""
        return Call("/stats", _object)


def _object(body: bytes) -> dict[str, Any]:
    value = json.loads(body)
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _version_and_open(body: bytes) -> tuple[int, int]:
    value = _object(body)
    return int(value["version"]), int(value.get("open", 0))


def _tokens_until_paused(body: bytes) -> float | None:
    value = _object(body)
    return None if value["paused"] else float(value["generated_tokens"])


def _paused_seconds(body: bytes) -> float:
    return float(_object(body)["paused_seconds"])


def _logprobs(body: bytes) -> list[float]:
    return [float(p) for p in _object(body)["logprobs"]]


def _receipt(body: bytes) -> WeightReceipt:
    value = _object(body)
    checksums = {name: int(text) for name, text in value["checksums"].items()}
    return WeightReceipt(value["holder"], value["version"], checksums)


def _chunk(line: bytes) -> GenerationChunk | None:
    text = line[5:].strip() if line.startswith(b"data:") else b""
    if text in (b"", b"[DONE]"):
        return None
    value = json.loads(text)
    if "error" in value:
        return GenerationChunk(error=str(value["error"]["message"]))
    meta = value["meta_info"]
    reason = meta["finish_reason"]
    versions = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    ids = value["output_ids"]
    if not len(ids) == len(logprobs) == len(versions):
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs and {len(versions)} versions")
    return GenerationChunk(ids, logprobs, versions, None if reason is None else str(reason["type"]))


@dataclass
class PartialAnswer:
    """An answer as its client gathers it, over several servers if need be. Whichever server goes on gets prompt plus
    tokens so far; since the randomness of a sampled token depends on the seed and on its position alone, it draws what
    the first one would have drawn."""

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

    def next_call(self, protocol: EmbeddedProtocol) -> Call[GenerationChunk | None]:
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
