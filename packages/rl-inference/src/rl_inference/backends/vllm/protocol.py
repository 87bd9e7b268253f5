"""vLLM's: tokens at `/inference/v1/generate`, and the routes of the extension that runs inside it for the rest.

`rl_inference/backends/plugins/vllm_extension.py` says what those do. Answers are recorded in `tests/recorded/vllm`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_contracts.config import GenerationConfig
from rl_contracts.data import NO_GPU_ROUTES, ROUTES
from rl_contracts.errors import InferenceError
from rl_contracts.inference import Capabilities, ServedModel
from rl_inference.backends.control_protocol import ControlProtocol, served_model
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, as_object, event, expand, ignored

_GENERATE = "/inference/v1/generate"
_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that is not finite, or that it does not have."""
_ENDS = ("stop", "length", "abort")


class VLLMProtocol(ControlProtocol):
    """vLLM with our extension.

    Args:
        version: of the weights with which the servers were started.
        sleeps: whether they were started so that they can sleep.
        gpu: whether they run on GPUs.
    """

    counts_tokens: ClassVar[bool] = True

    def __init__(self, version: int = 0, sleeps: bool = False, gpu: bool = False) -> None:
        self._version = version
        self.capabilities = Capabilities(
            routes=ROUTES if gpu else NO_GPU_ROUTES,
            live_checksums=False,
            version_stamps_at_end=True,
            any_score_temperature=False,
            truncated_logprobs=True,
            seeds_by_position=False,
            resumes_completions=False,
            keeps_cache=False,
            heartbeats=False,
            lora=True,
            sleeps=sleeps,
            schemas=True,
        )

    def generate(
        self,
        rid: str,
        input_ids: list[int],
        generation: GenerationConfig,
        seed: int | None,
        resumed: int,
        schema: dict[str, Any] | None = None,
    ) -> Call[GenerationChunk | None]:
        held = generation.min_new_tokens > 0 and not (generation.ignore_eos and not generation.stop_token_ids)
        if held and not generation.greedy:
            raise InferenceError(
                "generation.min_new_tokens: expected 0, or ignore_eos=true without stop_token_ids, because vLLM gives "
                "the log-probs of what is left without the tokens that may not end an answer yet; found "
                f"{generation.min_new_tokens}. Leave it away, or use servers that can (allocation=embedded:...)."
            )
        sampling: dict[str, Any] = {
            "max_tokens": generation.max_new_tokens,
            "min_tokens": generation.min_new_tokens if held else 0,
            "temperature": generation.temperature,
            # said although they are off, because a server may have defaults of the model's
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "min_p": generation.min_p,
            "ignore_eos": generation.ignore_eos,
            "stop_token_ids": generation.stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
        }
        if seed is not None:
            sampling["seed"] = seed % 2**63
        if schema is not None:
            sampling["structured_outputs"] = {"json": schema}
        body = {"request_id": rid, "token_ids": input_ids, "sampling_params": sampling, "stream": True}
        return Call(_GENERATE, _Stream(self._version).line, body)

    def abort(self, rid: str) -> Exchange[None]:
        # the name that vLLM gives it, not the one that it was asked by
        yield Call("/inference/v1/abort_requests", ignored, {"request_ids": [f"generate-tokens-{rid}"]})

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        if temperature != 1.0 or before:
            raise InferenceError(
                f"vLLM scores at temperature 1 and with the weights that it serves; found temperature {temperature:g}, "
                f"before={before}."
            )
        # one token must be generated
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": input_ids, "sampling_params": sampling}
        return (yield Call(_GENERATE, _scores(input_ids), body))

    def describe(self) -> Exchange[ServedModel | None]:
        body = yield Call("/rl/info", bytes)
        mode = as_object(body).get("logprobs_mode", "")  # no other program has one
        if mode not in ("", "processed_logprobs"):
            raise InferenceError(
                f"expected log-probs after the temperature, found logprobs_mode={mode!r}: of another distribution than "
                "is sampled from; start it with --logprobs-mode processed_logprobs"
            )
        return served_model(body)

    def sleep(self) -> Exchange[float]:
        yield Call("/rl/sleep", ignored, {})
        return 0.0

    def wake(self) -> Exchange[None]:
        yield Call("/rl/wake", ignored, {})

    def error_message(self, body: bytes) -> str:
        """As vLLM has it; what it does not know is taken for a server without our extension."""
        try:
            if json.loads(body).get("detail") == "Not Found":
                return (
                    "expected vLLM with our extension, found a server without this route; start it as `rl` does "
                    "(--dry-run prints the command), or leave rollout.server.addresses empty"
                )
        except (ValueError, AttributeError):
            pass
        return super().error_message(body)


@dataclass
class _Stream:
    """Reads the lines of one answer. The versions come with the last one, for all of its tokens."""

    initial: int
    """What vLLM's first version is called otherwise."""
    tokens: int = 0
    """So far."""

    def line(self, line: bytes) -> GenerationChunk | None:
        """What one line adds."""
        value = event(line)
        if value is None or value.get("choices") == []:
            return None
        if "error" in value:
            return GenerationChunk(error=str(value["error"]["message"]))
        choice: dict[str, Any] = value["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in (choice["logprobs"] or {"content": []})["content"]]
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs")
        if logprobs and min(logprobs) <= _UNKNOWN_LOGPROB:
            return GenerationChunk(error="a token's log-prob is not finite: the weights compute nan or infinity")
        self.tokens += len(ids)
        finish = choice["finish_reason"]
        if finish is None:
            return GenerationChunk(ids, logprobs)
        if finish not in _ENDS:
            return GenerationChunk(error=f"the answer ended with {finish!r}")
        stamps = expand(choice["weight_versions"] or [], self.initial)
        if len(stamps) != self.tokens:
            raise ValueError(f"{self.tokens} tokens, {len(stamps)} versions")
        return GenerationChunk(ids, logprobs, finish=finish, stamps=stamps)


def _scores(input_ids: list[int]) -> Callable[[bytes], list[float]]:
    """Reads the log-probs of given tokens, of which the first has none."""

    def parse(body: bytes) -> list[float]:
        entries = as_object(body)["prompt_logprobs"]
        if len(entries) != len(input_ids):
            raise ValueError(f"{len(input_ids)} tokens, {len(entries)} log-probs")
        later = zip(input_ids[1:], entries[1:], strict=True)
        scores = [0.0, *(float(entry[str(token)]["logprob"]) for token, entry in later)]
        if any(score <= _UNKNOWN_LOGPROB for score in scores):
            raise ValueError("a log-prob is not finite")
        return scores

    return parse
