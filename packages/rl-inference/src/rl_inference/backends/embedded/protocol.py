"""Protocol of the embedded server: the `/generate` route of SGLang, and staged weights."""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, ClassVar

from rl_contracts.config import GenerationConfig
from rl_contracts.images import Image
from rl_contracts.inference import Capabilities
from rl_inference.backends.control_protocol import ControlPaths, ControlProtocol
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, as_object, event, ignored


def generation_key(key: str) -> str:
    """Return the key for agents and other callers that may generate, score and read statistics.

    It does not permit control of a server. It is derived from the run key and does not reveal it.
    """
    return hmac.new(key.encode(), b"generation", "sha256").hexdigest()


class EmbeddedProtocol(ControlProtocol):
    """Protocol of the embedded server, which supports every method of the contract."""

    capabilities = Capabilities(scores_previous_weights=True, lora=True, sleeps=True, images=True)
    paths: ClassVar[ControlPaths] = ControlPaths(
        health="/health",
        stats="/stats",
        model="/model_info",
        pause="/pause_generation",
        resume="/continue_generation",
        stage="/stage_weights",
        commit="/commit_weights",
        receipt="/weight_receipt",
    )

    def generate(
        self,
        rid: str,
        input_ids: list[int],
        generation: GenerationConfig,
        seed: int | None,
        resumed: int,
        schema: dict[str, Any] | None = None,
        images: Sequence[Image] = (),
    ) -> Call[GenerationChunk | None]:
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": vars(generation) | ({} if seed is None else {"sampling_seed": seed}),
            "return_logprob": True,
            "stream": True,
            "resumed_tokens": resumed,
        }
        if images:
            body["images"] = [b64encode(image.data).decode() for image in images]
        return Call("/generate", _chunk, body)

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        body = {"input_ids": input_ids, "temperature": temperature, "before": before}
        return (yield Call("/score", _logprobs, body))

    def sleep(self) -> Exchange[float]:
        return (yield Call("/sleep", _freed_bytes, {}))

    def wake(self) -> Exchange[None]:
        yield Call("/wake", ignored, {})


def _freed_bytes(body: bytes) -> float:
    return float(as_object(body)["freed_bytes"])


def _logprobs(body: bytes) -> list[float]:
    return [float(p) for p in as_object(body)["logprobs"]]


def _chunk(line: bytes) -> GenerationChunk | None:
    value = event(line)
    if value is None:
        return None
    if "error" in value:
        return GenerationChunk(error=str(value["error"]["message"]))
    meta: dict[str, Any] = value["meta_info"]
    reason = meta["finish_reason"]
    versions = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    ids = value["output_ids"]
    if not len(ids) == len(logprobs) == len(versions):
        raise ValueError(
            f"expected as many log-probs and versions as tokens, found {len(ids)} tokens, {len(logprobs)} log-probs "
            f"and {len(versions)} versions"
        )
    return GenerationChunk(ids, logprobs, versions, None if reason is None else str(reason["type"]))
