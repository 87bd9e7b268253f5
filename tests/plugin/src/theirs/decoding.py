"""The server's model: one thread that writes a token of each running answer in turn, and swaps weights in between."""

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
class Answer:
    """One answer that is being written."""

    prompt: list[int]
    generation: GenerationConfig
    generator: torch.Generator | None
    """None: greedy."""
    wake: Callable[[], object]
    """Called once it has ended, from the decoding thread."""
    ends: frozenset[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: DynamicCache | None = None
    stop_reason: str = ""
    """`stop`, `length`, or empty while it goes on."""


class Decoder:
    """A causal language model and its thread.

    Args:
        path: Hugging Face model directory.
        context_length: tokens of prompt and answer at most.
        slots: answers that are written at the same time.
    """

    def __init__(self, path: str, context_length: int, slots: int, version: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.context_length, self.slots, self.version = context_length, slots, version
        end = self.model.config.eos_token_id
        self._ends = frozenset(end if isinstance(end, list) else [] if end is None else [end])
        self._spare = {name: torch.empty_like(p) for name, p in self.model.named_parameters()}
        self._receiver, self._staged = WeightReceiver(), -1
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._paused_at: float | None = None
        self._drains: list[Future[None]] = []
        self._generated, self._busy = 0, 0.0
        threading.Thread(target=self._main, name="decode", daemon=True).start()

    # ---- for the HTTP side

    def submit(
        self, prompt: list[int], generation: GenerationConfig, seed: int | None, wake: Callable[[], object]
    ) -> Answer:
        """Queue an answer.

        Raises:
            InferenceError: it cannot be written as it is asked for.
        """
        if not prompt or len(prompt) >= self.context_length:
            raise InferenceError(f"expected a prompt of 1 to {self.context_length - 1} tokens, found {len(prompt)}.")
        if generation.truncates or generation.penalizes or generation.stop:
            raise InferenceError("this server samples without top_p, top_k, min_p, penalties and stop strings.")
        generator = None
        if not generation.greedy:
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        ends = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else self._ends)
        answer = Answer(prompt, generation, generator, wake, ends)
        with self._changed:
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    def drop(self, answer: Answer) -> None:
        """Nobody waits for it any more."""

        def remove() -> None:
            for answers in (self._waiting, self._running):
                if answer in answers:
                    answers.remove(answer)

        self.call(remove)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the decoding thread do something between two tokens."""
        future: Future[Any] = Future()
        with self._changed:
            self._commands.append((function, future))
            self._changed.notify()
        return future

    def score(self, ids: list[int], temperature: float) -> list[float]:
        """See `InferenceEngine.score`; for `call`."""
        if not ids or len(ids) > self.context_length:
            raise InferenceError(f"expected 1 to {self.context_length} tokens, found {len(ids)}.")
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float() / (temperature or 1.0)
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])
        return [0.0, *chosen[:, 0].tolist()]

    def stage(self, meta: WeightUpdateMeta) -> dict[str, int]:
        """Read a version beside the served one, in the caller's thread; the checksums of what was read."""
        self._staged = -1
        sums = self._receiver.receive(meta, self._spare)
        self._staged = meta.version
        return sums

    def pause(self, drain: bool) -> Future[None]:
        """Write no more tokens; with `drain`, once the running answers have ended, and let no other begin."""
        paused: Future[None] = Future()

        def begin() -> None:
            self._drains.append(paused)
            if not drain:
                self._enter_pause()

        self.call(begin)
        return paused

    def commit(self, version: int, recompute: bool) -> None:
        """Serve what was staged; for `call`.

        Raises:
            WeightUpdateError: another version, or none, was staged.
        """
        if version != self._staged:
            raise WeightUpdateError(f"expected the staged version {self._staged}, found {version}.")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._spare[name])
        self.version, self._staged = version, -1
        if recompute:
            for answer in self._running:
                answer.cache = None

    def resume(self) -> float:
        """Go on; how long nothing was written. For `call`."""
        paused = time.monotonic() - self._paused_at if self._paused_at is not None else 0.0
        self._paused_at = None
        return paused

    def stats(self) -> dict[str, float]:
        """Counters."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "generated_tokens": self._generated,
            "busy_seconds": self._busy,
        }

    # ---- the thread

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._may_write())
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
            for function, future in commands:
                try:
                    future.set_result(function())
                except (InferenceError, WeightUpdateError) as error:
                    future.set_exception(error)
            if self._may_write():
                begin = time.monotonic()
                while self._waiting and len(self._running) < self.slots and not self._drains:
                    self._running.append(self._waiting.popleft())
                for answer in list(self._running):
                    self._write_token(answer)
                self._busy += time.monotonic() - begin
            if self._drains and not self._running:
                self._enter_pause()

    def _enter_pause(self) -> None:
        self._paused_at = self._paused_at or time.monotonic()
        for paused in self._drains:
            paused.set_result(None)
        self._drains.clear()

    def _may_write(self) -> bool:
        return self._paused_at is None and bool(self._running or (self._waiting and not self._drains))

    @torch.no_grad()
    def _write_token(self, answer: Answer) -> None:
        whole = answer.prompt + answer.output
        new = whole if answer.cache is None else whole[-1:]
        answer.cache = answer.cache or DynamicCache()
        out = self.model(torch.tensor([new]), past_key_values=answer.cache, use_cache=True)
        config = answer.generation
        logprobs = torch.log_softmax(out.logits[0, -1].float() / (config.temperature or 1.0), -1)
        allowed = logprobs.clone()
        if len(answer.output) < config.min_new_tokens and answer.ends:
            allowed[list(answer.ends)] = -torch.inf
        if answer.generator is None:
            token = int(allowed.argmax())
        else:
            token = int(torch.multinomial(allowed.exp(), 1, generator=answer.generator))
        answer.output.append(token)
        answer.logprobs.append(float(logprobs[token]))
        answer.versions.append(self.version)
        self._generated += 1
        full = len(answer.output) >= config.max_new_tokens or len(whole) + 1 >= self.context_length
        if token in answer.ends or full:
            answer.stop_reason = "stop" if token in answer.ends else "length"
            self._running.remove(answer)
            answer.wake()
