"""Protocol of SGLang servers: `/generate` for tokens, and the control routes of the plugin.

`rl_inference/backends/plugins/sglang_server.py` implements the control routes. `tests/recorded/sglang` contains
recorded responses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from rl_contracts.config import GenerationConfig
from rl_contracts.data import NO_GPU_ROUTES, ROUTES, ServeSpec
from rl_contracts.errors import InferenceError
from rl_contracts.images import Image
from rl_contracts.inference import Capabilities
from rl_contracts.models.directory import image_token, vocabulary_size
from rl_inference.backends.control_protocol import ControlProtocol
from rl_inference.backends.external_program import on_cpu
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, as_object, event, expand, ignored
from rl_inference.client.transport import ServerBusyError


class SGLangProtocol(ControlProtocol):
    """Protocol of SGLang with the control routes.

    Args:
        spec: the model, whose `config.json` has the vocabulary size, and the version that servers start with.
        context: maximum number of tokens of prompt and completion together; None to leave the check to the servers.
    """

    counts_tokens: ClassVar[bool] = True

    def __init__(self, spec: ServeSpec, context: int | None = None) -> None:
        self._spec, self._context = spec, context
        self.capabilities = Capabilities(
            routes=NO_GPU_ROUTES if on_cpu(spec) else ROUTES,
            live_checksums=False,
            version_stamps_at_end=True,
            any_score_temperature=False,
            seeds=False,
            seeds_by_position=False,
            resumes_completions=False,
            keeps_cache=False,
            heartbeats=False,
            lora=True,
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
        self._check_ids(input_ids, "input_ids")
        self._check_ids(generation.stop_token_ids, "generation.stop_token_ids")
        generation = self._within_context(input_ids, generation)
        sampling = sampling_params(generation) | ({} if schema is None else {"json_schema": json.dumps(schema)})
        stop_tokens = frozenset(sampling.get("stop_token_ids", ())) if generation.ignore_eos else frozenset()
        prompt = len(input_ids) if images else None
        stream = Stream(self._spec.version, generation.max_new_tokens, stop_tokens or None, prompt)
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "stream": True}
        if images:
            body["input_ids"] = with_one_placeholder_each(input_ids, self._placeholder)
            body["image_data"] = [image.data_url for image in images]
        return Call("/generate", stream.read, body)

    def _check_ids(self, ids: list[int], name: str) -> None:
        """Reject token ids outside of the vocabulary, which would kill an SGLang server."""
        if ids and (min(ids) < 0 or max(ids) >= self._vocabulary):
            raise InferenceError(
                f"{name}: expected token ids from 0 to {self._vocabulary - 1} (vocab_size of "
                f"{self._spec.model_path}/config.json), found {min(ids)} to {max(ids)}. Use the tokenizer of this "
                "model."
            )

    def _within_context(self, input_ids: list[int], generation: GenerationConfig) -> GenerationConfig:
        """Limit the completion to the context, because SGLang rejects requests that could exceed it."""
        limit = generation.max_new_tokens if self._context is None else self._context - len(input_ids)
        if limit < 1:
            raise InferenceError(
                f"input_ids: expected at most {len(input_ids) + limit - 1} tokens (a context of {self._context} minus "
                f"one generated token), found {len(input_ids)}."
            )
        min_tokens = min(generation.min_new_tokens, limit)
        return replace(generation, max_new_tokens=min(generation.max_new_tokens, limit), min_new_tokens=min_tokens)

    @cached_property
    def _vocabulary(self) -> int:
        size = vocabulary_size(self._spec.model_path) if self._spec.model_path else None
        if size is None:
            raise InferenceError(
                f"{self._spec.model_path or 'model_path'}: expected a model directory whose config.json has "
                "vocab_size, found none. The client needs it to reject token ids outside of the vocabulary, which "
                "would kill an SGLang server."
            )
        return size

    @cached_property
    def _placeholder(self) -> int:
        token = image_token(self._spec.model_path) if self._spec.model_path else None
        if token is None:
            raise InferenceError(
                f"{self._spec.model_path or 'model_path'}: expected a model directory whose config.json has "
                "image_token_id, found none. Use a vision-language model, or prompts without images."
            )
        return token

    def abort(self, rid: str) -> Exchange[None]:
        yield Call("/abort_request", ignored, {"rid": rid})

    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        self._check_ids(input_ids, "input_ids")
        body = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scores: list[float] = yield Call("/generate", _scores, body)
        if len(scores) != len(input_ids):
            raise ValueError(f"expected log-probs of {len(input_ids)} tokens, found {len(scores)}")
        return scores

    def error_message(self, body: bytes) -> str:
        """Return the message of an error response.

        `/generate`, SGLang's control routes, FastAPI and the plugin use different forms. An unknown route means that
        the server runs without the plugin.
        """
        try:
            value = as_object(body)
        except (ValueError, TypeError):
            return super().error_message(body)
        if value.get("detail") == "Not Found":
            return (
                "expected SGLang with the control routes of rl, found a server without this route; start it with the "
                "command that --dry-run prints, or leave rollout.server.addresses empty"
            )
        error = value.get("error", value.get("message"))
        return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error or value)


def sampling_params(generation: GenerationConfig) -> dict[str, Any]:
    """Return `sampling_params` of a request.

    With `ignore_eos`, SGLang also ignores stop tokens. A request that has both is sent without `ignore_eos`, and
    `Stream` makes the client continue after an end token. A minimum length removes end tokens from the distribution
    whose log-probs SGLang returns. A minimum length is therefore omitted if no end token can end the completion, and
    rejected otherwise.

    Raises:
        InferenceError: an end token could end the completion before the minimum length.
    """
    params: dict[str, Any] = {"max_new_tokens": generation.max_new_tokens, "temperature": generation.temperature}
    params |= {"top_p": generation.top_p} if generation.top_p < 1 else {}
    params |= {"top_k": generation.top_k} if generation.top_k else {}
    params |= {"min_p": generation.min_p} if generation.min_p else {}
    fixed_length, stop_ids = generation.min_new_tokens == generation.max_new_tokens, generation.stop_token_ids
    if fixed_length or (generation.ignore_eos and not stop_ids):
        return params | {"ignore_eos": True}
    if generation.min_new_tokens:
        raise InferenceError(
            "generation.min_new_tokens: expected 0 or max_new_tokens, because SGLang's log-probs of the first tokens "
            f"exclude end tokens; found {generation.min_new_tokens}. Remove the setting, or use embedded servers "
            "(allocation=embedded:...)."
        )
    return params | ({"stop_token_ids": stop_ids} if stop_ids else {})


def with_one_placeholder_each(input_ids: list[int], placeholder: int) -> list[int]:
    """Return a prompt with one placeholder for each run of them, because SGLang expands each placeholder again."""
    before = [None, *input_ids]
    return [token for token, last in zip(input_ids, before, strict=False) if token != placeholder or token != last]


@dataclass
class Stream:
    """Parser of the messages of one completion.

    Each message has all tokens so far or, with `--incremental-streaming-output`, the new ones. The last message has
    the spans of versions.
    """

    initial_version: int
    """Version of the weights that the server was started with."""
    max_tokens: int
    """Number of requested tokens."""
    stop_tokens: frozenset[int] | None = None
    """Stop tokens of a completion that continues after any other end token. None: the server ends the completion."""
    prompt_tokens: int | None = None
    """Number of tokens of a prompt with images, after their placeholders were expanded. None: not checked."""
    received: int = 0
    """Number of tokens returned so far."""

    def read(self, line: bytes) -> GenerationChunk | None:
        """Parse one line of the stream, or return None for an empty event.

        Raises:
            InferenceError: the server rejected the request, or used a prompt of another length.
            ServerBusyError: the server cannot accept the request now.
            ValueError, KeyError, TypeError: the line is not a message of a completion.
        """
        value = event(line)
        if value is None:
            return None
        if "error" in value:
            error = value["error"]
            return _failed(int(error["code"]), str(error["message"]))
        meta = value["meta_info"]
        total, reason = int(meta["completion_tokens"]), meta["finish_reason"]
        if reason is not None and reason.get("status_code"):
            return _failed(int(reason["status_code"]), str(reason["message"]))
        if self.prompt_tokens is not None and meta["prompt_tokens"] != self.prompt_tokens:
            raise InferenceError(
                f"images: expected SGLang to use the {self.prompt_tokens} tokens of the prompt, found "
                f"{meta['prompt_tokens']}; its processor expands the placeholders differently. Use another server for "
                "this model (allocation=vllm:... or embedded:...)."
            )
        chunk = GenerationChunk(*self._new(value["output_ids"], meta.get("output_token_logprobs") or [], total))
        if reason is not None:
            chunk.finish = self._finish(reason)
            chunk.stamps = expand(meta.get("weight_versions") or [], self.initial_version)
            if len(chunk.stamps) != total:
                raise ValueError(f"expected versions of {total} tokens, found {len(chunk.stamps)}")
        return chunk

    def _new(self, ids: list[int], logprobs: list[Any], total: int) -> tuple[list[int], list[float]]:
        """Return the tokens and log-probs that were not returned before."""
        new, self.received = total - self.received, total
        if not new:  # an aborted request may repeat its last token
            return [], []
        if new < 0 or len(ids) not in (new, total) or len(logprobs) not in (new, total):
            raise ValueError(
                f"expected {new} new tokens of {total}, found {len(ids)} tokens and {len(logprobs)} log-probs"
            )
        tokens, entries = ids[-new:], logprobs[-new:]
        if [entry[1] for entry in entries] != tokens:
            raise ValueError("the log-probs belong to other tokens than the generated ones")
        return tokens, [float(entry[0]) for entry in entries]

    def _finish(self, reason: dict[str, Any]) -> str:
        """Return `stop`, `length` or `abort`; also `abort` if the client must continue after an end token."""
        kind = str(reason["type"])
        if kind not in ("stop", "length", "abort"):
            raise ValueError(f"expected the finish reason stop, length or abort, found {kind!r}")
        if kind == "stop" and self.stop_tokens is not None and reason.get("matched") not in self.stop_tokens:
            return "abort" if self.received < self.max_tokens else "length"
        return kind


def _failed(status: int, message: str) -> GenerationChunk:
    """Handle a failed request, given the status that a response without a stream would have had."""
    if status in (429, 503):
        raise ServerBusyError(message)
    if status < 500:
        raise InferenceError(message)
    return GenerationChunk(error=message)


def _scores(body: bytes) -> list[float]:
    """Return the log-probs of the prompt's tokens; 0 for the first one, which has none."""
    entries = as_object(body)["meta_info"]["input_token_logprobs"]
    return [0.0 if index == 0 else float(entry[0]) for index, entry in enumerate(entries)]
