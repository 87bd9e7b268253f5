"""Protocol of vLLM servers: `/inference/v1/generate` for tokens, and the control routes of the extension.

`rl_inference/backends/plugins/vllm_extension.py` implements the control routes. `tests/recorded/vllm` contains
recorded responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_contracts.config import GenerationConfig
from rl_contracts.data import NO_GPU_ROUTES, ROUTES
from rl_contracts.errors import InferenceError
from rl_contracts.images import Image
from rl_contracts.inference import Capabilities, ServedModel
from rl_inference.backends.control_protocol import ControlProtocol, served_model
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, as_object, event, expand, ignored

_GENERATE = "/inference/v1/generate"
_UNKNOWN_LOGPROB = -9999.0
"""Value that vLLM writes for a log-prob that is not finite or is missing."""
_FINISH_REASONS = ("stop", "length", "abort")


class VLLMProtocol(ControlProtocol):
    """Protocol of vLLM with the extension.

    Args:
        version: version of the weights that the servers were started with.
        sleeps: whether the servers were started with sleep mode.
        gpu: whether the servers run on GPUs.
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
            max_temperature=2.0,
            seeds_by_position=False,
            resumes_completions=False,
            keeps_cache=False,
            heartbeats=False,
            lora=True,
            sleeps=sleeps,
            schemas=True,
            images=True,
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
        masks_ends = generation.min_new_tokens > 0 and not (generation.ignore_eos and not generation.stop_token_ids)
        if masks_ends and not generation.greedy:
            raise InferenceError(
                "generation.min_new_tokens: expected 0, or ignore_eos=true without stop_token_ids, because vLLM's "
                f"log-probs of the first tokens exclude end tokens; found {generation.min_new_tokens}. Remove the "
                "setting, or use embedded servers (allocation=embedded:...)."
            )
        sampling: dict[str, Any] = {
            "max_tokens": generation.max_new_tokens,
            "min_tokens": generation.min_new_tokens if masks_ends else 0,
            "temperature": generation.temperature,
            # sent even if off, because the server may have other defaults from the model
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
        if images:
            # the first message then has the prompt's tokens, among which vLLM may have inserted placeholders
            body["return_token_ids"] = True
            body["content_parts"] = [{"type": "image_url", "url": image.data_url} for image in images]
        return Call(_GENERATE, _Stream(self._version, input_ids if images else None).read, body)

    def abort(self, rid: str) -> Exchange[None]:
        # vLLM's internal id, not the `request_id` that the client sent
        yield Call("/inference/v1/abort_requests", ignored, {"request_ids": [f"generate-tokens-{rid}"]})

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        if temperature != 1.0 or before:
            raise InferenceError(
                f"vLLM scores only at temperature 1 and with the served weights; found temperature={temperature:g}, "
                f"before={before}."
            )
        # vLLM requires at least one generated token
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": input_ids, "sampling_params": sampling}
        return (yield Call(_GENERATE, _scores(input_ids), body))

    def describe(self) -> Exchange[ServedModel | None]:
        body = yield Call("/rl/info", bytes)
        mode = as_object(body).get("logprobs_mode", "")  # missing in other programs
        if mode not in ("", "processed_logprobs"):
            raise InferenceError(
                f"expected log-probs of the sampled distribution, found logprobs_mode={mode!r}; start the server "
                "with --logprobs-mode processed_logprobs"
            )
        return served_model(body)

    def sleep(self) -> Exchange[float]:
        yield Call("/rl/sleep", ignored, {})
        return 0.0

    def wake(self) -> Exchange[None]:
        yield Call("/rl/wake", ignored, {})

    def error_message(self, body: bytes) -> str:
        """Return vLLM's message; an unknown route means that the server runs without the extension."""
        try:
            if json.loads(body).get("detail") == "Not Found":
                return (
                    "expected vLLM with the extension of rl, found a server without this route; start it with the "
                    "command that --dry-run prints, or leave rollout.server.addresses empty"
                )
        except (ValueError, AttributeError):
            pass
        return super().error_message(body)


@dataclass
class _Stream:
    """Parser of the lines of one completion. The last line has the versions of all tokens."""

    initial_version: int
    """Version of the weights that the server was started with."""
    prompt: list[int] | None = None
    """Tokens of a prompt with images, until the server has confirmed them. None: nothing to confirm."""
    received: int = 0
    """Number of tokens received so far."""

    def read(self, line: bytes) -> GenerationChunk | None:
        """Parse one line of the stream, or return None for an empty event."""
        value = event(line)
        if value is None or value.get("choices") == []:
            return None
        if "error" in value:
            return GenerationChunk(error=str(value["error"]["message"]))
        if self.prompt is not None:
            _check_prompt(self.prompt, value["prompt_token_ids"])
            self.prompt = None
        choice: dict[str, Any] = value["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in (choice["logprobs"] or {"content": []})["content"]]
        if len(ids) != len(logprobs):
            raise ValueError(f"expected log-probs of {len(ids)} tokens, found {len(logprobs)}")
        if logprobs and min(logprobs) <= _UNKNOWN_LOGPROB:
            return GenerationChunk(error="the log-prob of a token is not finite; the weights produce nan or infinity")
        self.received += len(ids)
        finish = choice["finish_reason"]
        if finish is None:
            return GenerationChunk(ids, logprobs)
        if finish not in _FINISH_REASONS:
            return GenerationChunk(error=f"the completion ended with finish_reason {finish!r}")
        stamps = expand(choice["weight_versions"] or [], self.initial_version)
        if len(stamps) != self.received:
            raise ValueError(f"expected versions of {self.received} tokens, found {len(stamps)}")
        return GenerationChunk(ids, logprobs, finish=finish, stamps=stamps)


def _check_prompt(sent: list[int], used: list[int]) -> None:
    """Reject a completion if vLLM replaced placeholders of images in the prompt.

    Raises:
        InferenceError: the model would be trained on other tokens than it generated from.
    """
    if used != sent:
        raise InferenceError(
            f"images: expected vLLM to use the {len(sent)} tokens of the prompt, found {len(used)}; its processor "
            "inserts other placeholders. Serve the model with its own processor files, or use embedded servers "
            "(allocation=embedded:...)."
        )


def _scores(input_ids: list[int]) -> Callable[[bytes], list[float]]:
    """Return a parser of the log-probs of the given tokens; 0 for the first one, which has none."""

    def parse(body: bytes) -> list[float]:
        entries = as_object(body)["prompt_logprobs"]
        if len(entries) != len(input_ids):
            raise ValueError(f"expected log-probs of {len(input_ids)} tokens, found {len(entries)}")
        scored = zip(input_ids[1:], entries[1:], strict=True)
        scores = [0.0, *(float(entry[str(token)]["logprob"]) for token, entry in scored)]
        if any(score <= _UNKNOWN_LOGPROB for score in scores):
            raise ValueError("the log-prob of a token is not finite")
        return scores

    return parse
