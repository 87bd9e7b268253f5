"""A model of transformers, run over slots.

transformers lets a registered function replace a model's attention. That is all that continuous batching needs: a pass
lays the tokens of many sequences end to end, and the function below, told by a `TokenPass` which token is whose, sees
to it that each looks at its own sequence.

Where the pass is compiled, the compiler sees one opaque operator here, and so no cache and no lengths that change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import layer_window
from rl_contracts.models.token_logprobs import LOGITS_AT_ONCE, chosen_logprobs, float32_logits
from rl_inference.embedded_server.model.attention import Scoring, Segment, TokenPass, causal
from rl_inference.embedded_server.model.cache import SlotCache, SlotLayer, TorchLayer

IMPLEMENTATION = "rl_slots"
"""Name under which the attention is registered."""
_SCORED_AT_ONCE = 1024
"""Positions whose logits are held in float32 at once when a sequence is scored."""


class _Running(threading.local):
    now: tuple[SlotCache, TokenPass] | None = None


_running = _Running()
"""What the forward pass in this thread is about: all that attention and head are told beside their inputs."""


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in the pass that runs in this thread.

    Args:
        query: [1, query heads, tokens, head dim].
        key, value: [1, key heads, tokens, head dim], of the same tokens.

    Returns:
        [1, tokens, query heads, head dim], and no weights.

    Raises:
        ModelError: the layer asks for what is not done here.
    """
    if attention_mask is not None or more.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} brings a mask or a bias of its own to attention, so the embedded server cannot "
            "serve it. Use another engine for this model."
        )
    layer: Any = module.layer_idx
    attend = torch.ops.rl_inference.attend if torch.compiler.is_compiling() else _attend
    scale = scaling or query.shape[-1] ** -0.5
    window = layer_window(module, sliding_window) or 0
    return attend(query, key, value, layer, scale, window, softcap, s_aux), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[1, tokens, query heads, head dim]."""
    assert _running.now is not None
    cache, span = _running.now
    scoring = Scoring(scale, window, softcap, sinks)
    if not span.cached:
        return causal(query, key, value, scoring).transpose(1, 2).contiguous()
    return cache.layers[layer].attend(query, key, value, span, scoring)


def _attend_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_operators = torch.library.Library("rl_inference", "DEF")
_operators.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int window, float? softcap, Tensor? sinks)"
    " -> Tensor"
)
_operators.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("rl_inference::attend", _attend_shape, lib=_operators)
AttentionInterface.register(IMPLEMENTATION, slot_attention)


def _pick_wanted(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    wanted = None if _running.now is None else _running.now[1].wanted
    return None if wanted is None else (inputs[0][:, wanted], *inputs[1:])


def _head_in_float32(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """What a 16-bit head computes, not rounded to its type: [..., H] to float32 [..., V]."""
    logits = float32_logits(hidden.flatten(0, -2), head.weight, head.bias)
    return logits.unflatten(0, hidden.shape[:-1])


def uncompiled() -> AbstractContextManager[Any]:
    """Within it nothing is compiled, and nothing compiled is used."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call, no-any-return]


class SlotModel:
    """A causal language model of transformers and the cache that it generates into."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        slots: int,
        context_length: int,
        end_ids: frozenset[int] = frozenset(),
        layer: type[SlotLayer] = TorchLayer,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = model.device
        text_config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.block = max(LOGITS_AT_ONCE // self.vocab_size, 1)
        """Positions of a sequence whose logits are made at once, at most, when it is scored."""
        self.context_length = context_length
        self.cache = SlotCache(text_config.num_hidden_layers, slots, context_length, layer, self.device)
        self.end_ids = end_ids
        # The head runs on the wanted tokens alone: [tokens, vocab] logits of a prefill would dwarf everything else.
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(_pick_wanted)
        if type(head) is torch.nn.Linear and model.dtype != torch.float32:
            head.forward = partial(_head_in_float32, head)  # type: ignore[method-assign]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one token in slot 0, which is free, so that nothing is compiled or imported under the first request."""
        self.cache.grow(0, 1)
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.run(nothing, TokenPass(nothing, nothing, longest=1, singles=1))
        self.cache.pages.assign(0, [])

    def run(self, tokens: torch.Tensor, span: TokenPass) -> torch.Tensor:
        """One forward pass over tokens of many sequences.

        Args:
            tokens: int64 [tokens].

        Returns:
            logits of the wanted tokens, [wanted, vocab].
        """
        _running.now = (self.cache, span)
        try:
            # a single token as it is, since the compiler would make another graph for it
            with uncompiled() if len(tokens) == 1 else nullcontext():
                output = self.model(input_ids=tokens[None], position_ids=span.positions[None], use_cache=False)
        finally:
            _running.now = None
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def score(self, input_ids: list[int], temperature: float) -> list[float]:
        """Log-probs of given tokens at the current weights; entry 0 is 0.

        The decoder runs once, the head on a `block` of the positions that predict a token at a time, and the rest
        is the trainers' own expression: a trainer that runs this sequence alone, with the same kernels, gets the
        same bits.
        """
        length, found = len(input_ids), [0.0]
        places = torch.arange(length, device=self.device)
        parts = places[:-1].split(self.block) if length > 1 else ()
        with self._decoded_once() if len(parts) > 1 else nullcontext():
            for part in parts:
                span = TokenPass(torch.zeros_like(places), places, length, singles=0, cached=False, wanted=part)
                chosen = input_ids[len(found) : len(found) + len(part)]
                found += self._chosen(input_ids, span, chosen, temperature)
        return found

    @contextmanager
    def _decoded_once(self) -> Iterator[None]:
        """Within it, the decoder computes in the first pass, and what it found there is what the others have."""
        decoder, held = self.model.base_model, list[Any]()
        forward = decoder.forward

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if not held:
                held.append(forward(*args, **kwargs))
            return held[0]

        if decoder is not self.model:  # else each pass computes anew
            decoder.forward = remembered
        try:
            yield
        finally:
            decoder.forward = forward

    @torch.inference_mode()
    def score_part(self, input_ids: list[int], start: int, count: int, temperature: float) -> list[float]:
        """Log-probs of `count` tokens of a long sequence, those after position `start`.

        Earlier parts lie in the slot of scores, which has room for this one.
        """
        slot = self.cache.slots
        places = torch.arange(start, start + count, device=self.device)
        segments = (Segment(slot, start, 0, count),)
        span = TokenPass(torch.full_like(places, slot), places, start + count, singles=0, segments=segments)
        part = slice(start + 1, start + count + 1)
        return self._chosen(input_ids[start : start + count], span, input_ids[part], temperature)

    def _chosen(self, fed: list[int], span: TokenPass, chosen: list[int], temperature: float) -> list[float]:
        """Log-probs of the tokens that were chosen after a pass's wanted ones."""
        logits = self.run(torch.tensor(fed, device=self.device), span)
        targets = torch.tensor(chosen, device=self.device)
        sharpness = torch.full((len(chosen),), temperature or 1.0, device=self.device).reciprocal()
        parts = [slice(start, start + _SCORED_AT_ONCE) for start in range(0, len(chosen), _SCORED_AT_ONCE)]
        found = [chosen_logprobs(logits[part].float(), targets[part], sharpness[part]) for part in parts]
        values: list[float] = torch.cat(found).tolist()
        return values
