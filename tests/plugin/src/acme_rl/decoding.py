"""The model of the server: one thread that decodes a token per running completion and swaps weights in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rl_contracts.config import GenerationConfig
from rl_contracts.data import WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.weights import WeightReceiver


@dataclass(eq=False)
class Completion:
    """A request and its tokens so far."""

    prompt: list[int]
    generation: GenerationConfig
    generator: torch.Generator | None
    """Source of random numbers, or None for greedy decoding."""
    on_finish: Callable[[], object]
    """Called from the decoding thread after the last token."""
    end_ids: frozenset[int]
    """Token ids that end the completion."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: DynamicCache | None = None
    stop_reason: str = ""
    """`stop`, `length`, or empty before the last token."""


class Decoder:
    """A causal language model and its decoding thread.

    Args:
        path: Hugging Face model directory.
        context_length: maximum number of tokens in prompt and completion together.
        slots: number of completions decoded at the same time.
        version: version of the weights in `path`.
    """

    def __init__(self, path: str, context_length: int, slots: int, version: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.context_length, self.slots, self.version = context_length, slots, version
        end = self.model.config.eos_token_id
        self._end_ids = frozenset(end if isinstance(end, list) else [] if end is None else [end])
        self._spare = {name: torch.empty_like(p) for name, p in self.model.named_parameters()}
        self._receiver, self._staged = WeightReceiver(), -1
        self._waiting: deque[Completion] = deque()
        self._running: list[Completion] = []
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._paused_at: float | None = None
        self._drains: list[Future[None]] = []
        self._generated, self._busy = 0, 0.0
        threading.Thread(target=self._main, name="decode", daemon=True).start()

    # ---- called by the HTTP server

    def submit(
        self, prompt: list[int], generation: GenerationConfig, seed: int | None, on_finish: Callable[[], object]
    ) -> Completion:
        """Queue a request.

        Raises:
            InferenceError: the prompt is empty or too long, or a sampling setting is not supported.
        """
        if not prompt or len(prompt) >= self.context_length:
            raise InferenceError(f"expected a prompt of 1 to {self.context_length - 1} tokens, found {len(prompt)}.")
        if generation.truncates or generation.penalizes or generation.stop:
            raise InferenceError(
                "this server does not support top_p, top_k, min_p, penalties or stop strings; remove them."
            )
        generator = None
        if not generation.greedy:
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        end_ids = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else self._end_ids)
        completion = Completion(prompt, generation, generator, on_finish, end_ids)
        with self._changed:
            self._waiting.append(completion)
            self._changed.notify()
        return completion

    def cancel(self, completion: Completion) -> None:
        """Remove a request whose client has disconnected."""

        def remove() -> None:
            for completions in (self._waiting, self._running):
                if completion in completions:
                    completions.remove(completion)

        self.call(remove)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the decoding thread, between two tokens."""
        future: Future[Any] = Future()
        with self._changed:
            self._commands.append((function, future))
            self._changed.notify()
        return future

    def score(self, ids: list[int], temperature: float) -> list[float]:
        """Return the log-probs as `InferenceEngine.score` does; run through `call`."""
        if not ids or len(ids) > self.context_length:
            raise InferenceError(f"expected 1 to {self.context_length} tokens, found {len(ids)}.")
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float() / (temperature or 1.0)
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])
        return [0.0, *chosen[:, 0].tolist()]

    def stage(self, meta: WeightUpdateMeta) -> dict[str, int]:
        """Read a version next to the served one, in the caller's thread, and return its checksums."""
        self._staged = -1
        checksums = self._receiver.receive(meta, self._spare)
        self._staged = meta.version
        return checksums

    def pause(self, drain: bool) -> Future[None]:
        """Stop decoding: immediately, or with `drain` after the running completions, without starting others."""
        paused: Future[None] = Future()

        def begin() -> None:
            self._drains.append(paused)
            if not drain:
                self._enter_pause()

        self.call(begin)
        return paused

    def commit(self, version: int, recompute: bool) -> None:
        """Serve the staged version; run through `call`.

        Raises:
            WeightUpdateError: the staged version is another one, or there is none.
        """
        if version != self._staged:
            raise WeightUpdateError(f"expected the staged version {self._staged}, found {version}.")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._spare[name])
        self.version, self._staged = version, -1
        if recompute:
            for completion in self._running:
                completion.cache = None

    def resume(self) -> float:
        """Resume decoding and return the length of the pause in seconds; run through `call`."""
        paused = time.monotonic() - self._paused_at if self._paused_at is not None else 0.0
        self._paused_at = None
        return paused

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "generated_tokens": self._generated,
            "busy_seconds": self._busy,
        }

    # ---- the decoding thread

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._may_decode())
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
            for function, future in commands:
                try:
                    future.set_result(function())
                except (InferenceError, WeightUpdateError) as error:
                    future.set_exception(error)
            if self._may_decode():
                begin = time.monotonic()
                while self._waiting and len(self._running) < self.slots and not self._drains:
                    self._running.append(self._waiting.popleft())
                for completion in list(self._running):
                    self._decode_token(completion)
                self._busy += time.monotonic() - begin
            if self._drains and not self._running:
                self._enter_pause()

    def _enter_pause(self) -> None:
        self._paused_at = self._paused_at or time.monotonic()
        for paused in self._drains:
            paused.set_result(None)
        self._drains.clear()

    def _may_decode(self) -> bool:
        return self._paused_at is None and bool(self._running or (self._waiting and not self._drains))

    @torch.no_grad()
    def _decode_token(self, completion: Completion) -> None:
        whole = completion.prompt + completion.output
        new = whole if completion.cache is None else whole[-1:]
        completion.cache = completion.cache or DynamicCache()
        out = self.model(torch.tensor([new]), past_key_values=completion.cache, use_cache=True)
        config = completion.generation
        logprobs = torch.log_softmax(out.logits[0, -1].float() / (config.temperature or 1.0), -1)
        allowed = logprobs.clone()
        if len(completion.output) < config.min_new_tokens and completion.end_ids:
            allowed[list(completion.end_ids)] = -torch.inf
        if completion.generator is None:
            token = int(allowed.argmax())
        else:
            token = int(torch.multinomial(allowed.exp(), 1, generator=completion.generator))
        completion.output.append(token)
        completion.logprobs.append(float(logprobs[token]))
        completion.versions.append(self.version)
        self._generated += 1
        full = len(completion.output) >= config.max_new_tokens or len(whole) + 1 >= self.context_length
        if token in completion.end_ids or full:
            completion.stop_reason = "stop" if token in completion.end_ids else "length"
            self._running.remove(completion)
            completion.on_finish()
