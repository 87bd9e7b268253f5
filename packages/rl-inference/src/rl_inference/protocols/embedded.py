"""The embedded server's own: SGLang's `/generate`, and staged weights."""

from __future__ import annotations

import hmac
from typing import Any, ClassVar

from rl_contracts.config import GenerationConfig
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.inference import Capabilities, ServedModel
from rl_inference.protocols.base import (
    Call,
    Exchange,
    GenerationChunk,
    Health,
    ServerProtocol,
    Stats,
    as_object,
    event,
    ignored,
)


def generation_key(key: str) -> str:
    """The key to hand to agents and others who may generate, score and look, but not control a server; it follows from
    the run key, and that not from it."""
    return hmac.new(key.encode(), b"generation", "sha256").hexdigest()


class EmbeddedProtocol(ServerProtocol):
    """The embedded server: everything that the contract asks for, but LoRA and sleep."""

    capabilities = Capabilities(scores_before=True)
    life_header: ClassVar[str] = "X-Server-Instance"

    def generate(
        self, rid: str, input_ids: list[int], generation: GenerationConfig, seed: int | None, resumed: int
    ) -> Call[GenerationChunk | None]:
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": vars(generation) | ({} if seed is None else {"sampling_seed": seed}),
            "return_logprob": True,
            "stream": True,
            "resumed_tokens": resumed,
        }
        return Call("/generate", _chunk, body)

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        body = {"input_ids": input_ids, "temperature": temperature, "before": before}
        return (yield Call("/score", _logprobs, body))

    def health(self) -> Exchange[Health]:
        return (yield Call("/health", _health))

    def stats(self) -> Exchange[Stats]:
        return (yield Call("/stats", _stats))

    def describe(self) -> Exchange[ServedModel | None]:
        return (yield Call("/model_info", _served_model))

    def pause(self, mode: str, lease: float) -> Exchange[float | None]:
        return (yield Call("/pause_generation", _tokens_until_paused, {"mode": mode, "lease": lease}))

    def resume(self) -> Exchange[float | None]:
        return (yield Call("/continue_generation", _paused_seconds, {}))

    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        return (yield Call("/stage_weights", _receipt, {"meta": meta.to_json(), "timeout": timeout}))

    def commit(self, version: int, mode: str) -> Exchange[None]:
        yield Call("/commit_weights", ignored, {"version": version, "mode": mode})

    def receipt(self) -> Exchange[WeightReceipt]:
        return (yield Call("/weight_receipt", _receipt))


def _health(body: bytes) -> Health:
    value = as_object(body)
    return Health(int(value["version"]), int(value["open"]))


def _served_model(body: bytes) -> ServedModel:
    value = as_object(body)  # `weights_dir` is in no other server's answer
    return ServedModel(str(value["model_path"]), int(value["weight_version"]), str(value["weights_dir"]))


def _stats(body: bytes) -> Stats:
    value = as_object(body)
    figures = ("running", "waiting", "generated_tokens", "busy_seconds")
    return Stats(int(value["version"]), bool(value["paused"]), *(float(value[name]) for name in figures))


def _tokens_until_paused(body: bytes) -> float | None:
    value = as_object(body)
    return None if value["paused"] else float(value["generated_tokens"])


def _paused_seconds(body: bytes) -> float:
    return float(as_object(body)["paused_seconds"])


def _logprobs(body: bytes) -> list[float]:
    return [float(p) for p in as_object(body)["logprobs"]]


def _receipt(body: bytes) -> WeightReceipt:
    value = as_object(body)
    checksums = {name: int(text) for name, text in value["checksums"].items()}
    return WeightReceipt(value["holder"], value["version"], checksums)


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
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs and {len(versions)} versions")
    return GenerationChunk(ids, logprobs, versions, None if reason is None else str(reason["type"]))
