"""SGLang's: tokens at `/generate`, and the routes of the program that runs it for the rest.

`rl_inference/backends/plugins/sglang_server.py` says what those do. Answers are recorded in `tests/recorded/sglang`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from rl_contracts.config import GenerationConfig
from rl_contracts.data import NO_GPU_ROUTES, ROUTES, ServeSpec
from rl_contracts.errors import InferenceError
from rl_contracts.inference import Capabilities
from rl_contracts.models.directory import vocabulary_size
from rl_inference.backends.control_protocol import ControlProtocol
from rl_inference.backends.external_program import on_cpu
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, as_object, event, expand, ignored
from rl_inference.client.transport import ServerBusyError


class SGLangProtocol(ControlProtocol):
    """SGLang with our routes.

    Args:
        spec: the model, whose `config.json` says which token ids there are, and the version that servers start with.
        context: tokens of prompt and answer together at most; None: the servers know.
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
        self._check_ids(input_ids, "input_ids")
        self._check_ids(generation.stop_token_ids, "generation.stop_token_ids")
        generation = self._within_context(input_ids, generation)
        sampling = sampling_params(generation) | ({} if schema is None else {"json_schema": json.dumps(schema)})
        stops = frozenset(sampling.get("stop_token_ids", ())) if generation.ignore_eos else frozenset()
        stream = Stream(self._spec.version, generation.max_new_tokens, stops or None)
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "stream": True}
        return Call("/generate", stream.read, body)

    def _check_ids(self, ids: list[int], name: str) -> None:
        """Refuse a token that the model does not have: SGLang would die of it."""
        if ids and (min(ids) < 0 or max(ids) >= self._vocabulary):
            raise InferenceError(
                f"{name}: expected token ids from 0 to {self._vocabulary - 1} (vocab_size of "
                f"{self._spec.model_path}/config.json), found {min(ids)} to {max(ids)}. Were they made with this "
                "model's tokenizer?"
            )

    def _within_context(self, input_ids: list[int], generation: GenerationConfig) -> GenerationConfig:
        """SGLang refuses an answer that could outgrow the context; ours ends there."""
        room = generation.max_new_tokens if self._context is None else self._context - len(input_ids)
        if room < 1:
            raise InferenceError(
                f"input_ids: expected at most {len(input_ids) + room - 1} tokens (a context of {self._context} with "
                f"one generated), found {len(input_ids)}."
            )
        least = min(generation.min_new_tokens, room)
        return replace(generation, max_new_tokens=min(generation.max_new_tokens, room), min_new_tokens=least)

    @cached_property
    def _vocabulary(self) -> int:
        found = vocabulary_size(self._spec.model_path) if self._spec.model_path else None
        if found is None:
            raise InferenceError(
                f"{self._spec.model_path or 'model_path'}: expected a model directory whose config.json has "
                "vocab_size, found none. A token id outside of the vocabulary ends an SGLang server, so that nothing "
                "is sent without it."
            )
        return found

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
            raise ValueError(f"{len(scores)} log-probs of {len(input_ids)} tokens")
        return scores

    def error_message(self, body: bytes) -> str:
        """The sentence in a refusal: `/generate`, what controls, FastAPI and ours each have a form. A server that does
        not know a route is taken for one without ours."""
        try:
            value = as_object(body)
        except (ValueError, TypeError):
            return super().error_message(body)
        if value.get("detail") == "Not Found":
            return (
                "expected SGLang with our routes, found a server without this one; start it as `rl` does (--dry-run "
                "prints the command), or leave rollout.server.addresses empty"
            )
        error = value.get("error", value.get("message"))
        return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error or value)


def sampling_params(generation: GenerationConfig) -> dict[str, Any]:
    """`sampling_params` of a request.

    SGLang ignores stop tokens with the end tokens (`ignore_eos`), so where there are some it is left to end at both,
    and `Stream` sees to it that it is asked again after an end token. A minimum length takes end tokens out of the
    distribution whose log-probs SGLang gives, so it is left away where no end token ends the answer anyway, and else
    refused.

    Raises:
        InferenceError: a minimum length that an end token could undercut.
    """
    params: dict[str, Any] = {"max_new_tokens": generation.max_new_tokens, "temperature": generation.temperature}
    params |= {"top_p": generation.top_p} if generation.top_p < 1 else {}
    params |= {"top_k": generation.top_k} if generation.top_k else {}
    params |= {"min_p": generation.min_p} if generation.min_p else {}
    whole, stops = generation.min_new_tokens == generation.max_new_tokens, generation.stop_token_ids
    if whole or (generation.ignore_eos and not stops):
        return params | {"ignore_eos": True}
    if generation.min_new_tokens:
        raise InferenceError(
            "generation.min_new_tokens: expected 0 or max_new_tokens, because until then SGLang gives the log-probs of "
            f"a distribution without end tokens; found {generation.min_new_tokens}. Leave it away, or use servers that "
            "can (allocation=embedded:...)."
        )
    return params | ({"stop_token_ids": stops} if stops else {})


@dataclass
class Stream:
    """Reads the messages of one answer, each of which holds all tokens so far (or, with
    `--incremental-streaming-output`, the new ones); the last one has the spans of versions."""

    initial: int
    """Version of the weights that the server was started with."""
    most: int
    """Tokens that were asked for."""
    stops: frozenset[int] | None = None
    """Stop tokens, where the answer goes on after any other end token; None: the server ends where it should."""
    seen: int = 0
    """Tokens handed on."""

    def read(self, line: bytes) -> GenerationChunk | None:
        """What a line adds.

        Raises:
            InferenceError: the request was refused; ServerBusyError: not taken for now.
            ValueError, KeyError, TypeError: it is no message of an answer.
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
        chunk = GenerationChunk(*self._new(value["output_ids"], meta.get("output_token_logprobs") or [], total))
        if reason is not None:
            chunk.finish = self._finish(reason)
            chunk.stamps = expand(meta.get("weight_versions") or [], self.initial)
            if len(chunk.stamps) != total:
                raise ValueError(f"versions of {len(chunk.stamps)} tokens of {total}")
        return chunk

    def _new(self, ids: list[int], logprobs: list[Any], total: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs that were not handed on yet."""
        new, self.seen = total - self.seen, total
        if not new:  # an aborted request may repeat its last token
            return [], []
        if new < 0 or len(ids) not in (new, total) or len(logprobs) not in (new, total):
            raise ValueError(f"{len(ids)} tokens and {len(logprobs)} log-probs where {new} of {total} are new")
        tokens, entries = ids[-new:], logprobs[-new:]
        if [entry[1] for entry in entries] != tokens:
            raise ValueError("log-probs of other tokens than were generated")
        return tokens, [float(entry[0]) for entry in entries]

    def _finish(self, reason: dict[str, Any]) -> str:
        """`stop`, `length` or `abort`; this too where the client is to ask for what comes after an end token."""
        found = str(reason["type"])
        if found not in ("stop", "length", "abort"):
            raise ValueError(f"unknown finish reason {found!r}")
        if found == "stop" and self.stops is not None and reason.get("matched") not in self.stops:
            return "abort" if self.seen < self.most else "length"
        return found


def _failed(status: int, message: str) -> GenerationChunk:
    """A request that was given up, with the status that an answer without a stream would have had."""
    if status in (429, 503):
        raise ServerBusyError(message)
    if status < 500:
        raise InferenceError(message)
    return GenerationChunk(error=message)


def _scores(body: bytes) -> list[float]:
    """Log-probs of the prompt's tokens; the first one has none."""
    entries = as_object(body)["meta_info"]["input_token_logprobs"]
    return [0.0 if index == 0 else float(entry[0]) for index, entry in enumerate(entries)]
