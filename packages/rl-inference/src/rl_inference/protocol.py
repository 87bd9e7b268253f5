"""What is said to a server: URLs and JSON. Another server is another object like this one; routing, retries
and the two-phase update above it stay the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rl_contracts.config import GenerationConfig
from rl_contracts.data import WeightReceipt, WeightUpdateMeta


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


@dataclass(frozen=True)
class Call:
    """A request without its server."""

    path: str
    body: dict[str, Any] | None = None
    """JSON; None for GET."""


class EmbeddedProtocol:
    """The embedded server's own: SGLang's `/generate`, and staged weights."""

    name = "embedded"
    instance_header = "X-Server-Instance"
    """Header with which every answer says which life of the server's process gave it."""

    def generate(
        self, rid: str, input_ids: list[int], generation: GenerationConfig, seed: int | None, resumed: int
    ) -> Call:
        """Continue `input_ids`, the last `resumed` of which are an interrupted answer's; a stream of events
        comes back."""
        params: dict[str, Any] = {
            "max_new_tokens": generation.max_new_tokens,
            "min_new_tokens": generation.min_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "min_p": generation.min_p,
            "presence_penalty": generation.presence_penalty,
            "frequency_penalty": generation.frequency_penalty,
            "repetition_penalty": generation.repetition_penalty,
            "stop": generation.stop,
            "stop_token_ids": generation.stop_token_ids,
            "ignore_eos": generation.ignore_eos,
        }
        if seed is not None:
            params["sampling_seed"] = seed
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "resumed_tokens": resumed,
        }
        return Call("/generate", body)

    def parse_chunk(self, line: bytes) -> GenerationChunk | None:
        """One line of a stream; None if it says nothing (blank lines, the end mark).

        Raises:
            ValueError, KeyError, TypeError: not a message of this protocol.
        """
        if not line.startswith(b"data:"):
            return None
        text = line[5:].strip()
        if text == b"[DONE]":
            return None
        value = json.loads(text)
        if "error" in value:
            return GenerationChunk(error=str(value["error"]["message"]))
        meta = value["meta_info"]
        reason = meta["finish_reason"]
        versions: list[int] = []
        for span in meta["weight_versions"]:
            versions.extend([span["version"]] * (span["end"] - span["start"]))
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        ids = value["output_ids"]
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs and {len(versions)} versions")
        return GenerationChunk(ids, logprobs, versions, None if reason is None else str(reason["type"]))

    def error_message(self, body: bytes) -> str:
        """The sentence in a refusal."""
        try:
            return str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return body.decode(errors="replace")[:500].strip() or "no reason given"

    def abort(self, rid: str) -> Call:
        """End one request."""
        return Call("/abort_request", {"rid": rid})

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Call:
        """Log-probs of given tokens; `before`: at the weights served before the last commit."""
        return Call("/score", {"input_ids": input_ids, "temperature": temperature, "before": before})

    def parse_score(self, value: dict[str, Any]) -> list[float]:
        """The answer to `score`."""
        return [float(p) for p in value["logprobs"]]

    def stage(self, meta: WeightUpdateMeta) -> Call:
        """Load a version beside the served one."""
        return Call("/stage_weights", {"meta": meta.to_json()})

    def parse_receipt(self, value: dict[str, Any]) -> WeightReceipt:
        """The answer to `stage` and `receipt`."""
        checksums = {name: int(text) for name, text in value["checksums"].items()}
        return WeightReceipt(value["holder"], value["version"], checksums)

    def receipt(self) -> Call:
        """Checksums of the served weights."""
        return Call("/weight_receipt")

    def pause(self, mode: str) -> Call:
        """Stop generating (`wait`: after the running answers)."""
        return Call("/pause_generation", {"mode": mode})

    def commit(self, version: int, mode: str) -> Call:
        """Serve the staged version."""
        return Call("/commit_weights", {"version": version, "mode": mode})

    def resume(self) -> Call:
        """Generate again."""
        return Call("/continue_generation", {})

    def health(self) -> Call:
        """Whether it can serve, and which version."""
        return Call("/health")

    def stats(self) -> Call:
        """Counters."""
        return Call("/stats")
