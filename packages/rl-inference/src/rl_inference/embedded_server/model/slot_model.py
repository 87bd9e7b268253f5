"""Model of transformers, run over decode slots.

transformers lets a registered function replace a model's attention. Continuous batching needs nothing else. A pass
concatenates the tokens of many sequences, and the function below computes attention within each sequence. A
`TokenPass` says to which sequence each token belongs.

If the pass is compiled, the compiler sees attention as one opaque operator. It therefore sees no cache and no
changing lengths.
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
from rl_inference.embedded_server.model.vision import ImagePass, VisionModel

IMPLEMENTATION = "rl_slots"
"""Name under which the attention function is registered."""
_SCORED_AT_ONCE = 1024
"""Number of positions whose logits are held in float32 at once during scoring."""


class _PassContext(threading.local):
    current: tuple[SlotCache, TokenPass] | None = None


_pass_context = _PassContext()
"""Cache and tokens of this thread's current forward pass.

Attention and `lm_head` read them here, because transformers does not pass them as arguments.
"""


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer in the current pass of this thread.

    Args:
        query: [1, query heads, tokens, head dim].
        key, value: [1, key heads, tokens, head dim], of the same tokens.

    Returns:
        [1, tokens, query heads, head dim], and None for the attention weights.

    Raises:
        ModelError: the layer needs a mask or a bias, which is unsupported.
    """
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} passes its own mask or bias to attention, so the embedded server cannot "
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
    """Compute attention, [1, tokens, query heads, head dim]."""
    assert _pass_context.current is not None
    cache, span = _pass_context.current
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


def _select_hidden_states(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    indices = None if _pass_context.current is None else _pass_context.current[1].logit_indices
    return None if indices is None else (inputs[0][:, indices], *inputs[1:])


def _lm_head_in_float32(lm_head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the logits of a 16-bit `lm_head` without rounding to 16 bits: [..., H] to float32 [..., V]."""
    logits = float32_logits(hidden.flatten(0, -2), lm_head.weight, lm_head.bias)
    return logits.unflatten(0, hidden.shape[:-1])


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled and no compiled code runs."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call, no-any-return]


class SlotModel:
    """Causal language model of transformers with the KV cache that it generates into."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        slots: int,
        context_length: int,
        end_ids: frozenset[int] = frozenset(),
        layer: type[SlotLayer] = TorchLayer,
        vision: VisionModel | None = None,
    ) -> None:
        self.model, self.vision = model, vision
        self.tokenizer = tokenizer
        self.device = model.device
        text_config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.block = max(LOGITS_AT_ONCE // self.vocab_size, 1)
        """Maximum number of positions whose logits are computed at once during scoring."""
        self.context_length = context_length
        self.cache = SlotCache(text_config.num_hidden_layers, slots, context_length, layer, self.device)
        self.end_ids = end_ids
        # `lm_head` runs only on the wanted tokens: [tokens, vocab] logits of a prefill would need too much memory.
        lm_head = model.get_output_embeddings()
        lm_head.register_forward_pre_hook(_select_hidden_states)
        if type(lm_head) is torch.nn.Linear and model.dtype != torch.float32:
            lm_head.forward = partial(_lm_head_in_float32, lm_head)  # type: ignore[method-assign]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one token in the free slot 0, so that no compilation or import delays the first request."""
        self.cache.grow(0, 1)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.run(zero, TokenPass(zero, zero, longest=1, singles=1))
        self.cache.pages.assign(0, [])

    def run(self, tokens: torch.Tensor, span: TokenPass) -> torch.Tensor:
        """Run one forward pass over tokens of many sequences.

        Args:
            tokens: int64 [tokens].

        Returns:
            Logits of the wanted tokens, [wanted, vocab].
        """
        _pass_context.current = (self.cache, span)
        try:
            # run a single token uncompiled, since the compiler would build another graph for it
            with uncompiled() if len(tokens) == 1 else nullcontext():
                if self.vision is not None:
                    images = span.images or ImagePass(span.positions.expand(self.vision.axes, -1), tokens[:0])
                    return self.vision.run(tokens, images)
                output = self.model(input_ids=tokens[None], position_ids=span.positions[None], use_cache=False)
        finally:
            _pass_context.current = None
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def score(self, input_ids: list[int], temperature: float) -> list[float]:
        """Return log-probs of given tokens with the current weights; entry 0 is 0.

        The decoder runs once, and `lm_head` on up to `block` positions at a time. The remaining computation is the
        trainer's code. A trainer that runs this sequence alone, with the same kernels, gets the same bits.
        """
        length, logprobs = len(input_ids), [0.0]
        positions = torch.arange(length, device=self.device)
        chunks = positions[:-1].split(self.block) if length > 1 else ()
        with self._cached_decoder() if len(chunks) > 1 else nullcontext():
            for chunk in chunks:
                span = TokenPass(
                    torch.zeros_like(positions), positions, length, singles=0, cached=False, logit_indices=chunk
                )
                targets = input_ids[len(logprobs) : len(logprobs) + len(chunk)]
                logprobs += self._target_logprobs(input_ids, span, targets, temperature)
        return logprobs

    @contextmanager
    def _cached_decoder(self) -> Iterator[None]:
        """Run the decoder only in the first pass of a `with` block, and reuse its output in later passes."""
        decoder = self.model.base_model if self.vision is None else self.vision.decoder
        forward, outputs = decoder.forward, list[Any]()

        def cached_forward(*args: Any, **kwargs: Any) -> Any:
            if not outputs:
                outputs.append(forward(*args, **kwargs))
            return outputs[0]

        if decoder is not self.model:  # otherwise each pass runs the whole model
            decoder.forward = cached_forward
        try:
            yield
        finally:
            decoder.forward = forward

    @torch.inference_mode()
    def score_part(self, input_ids: list[int], start: int, count: int, temperature: float) -> list[float]:
        """Return log-probs of the `count` tokens after position `start` of a long sequence.

        Keys and values of earlier tokens are in the slot of scores, which has room for this chunk.
        """
        slot = self.cache.slots
        positions = torch.arange(start, start + count, device=self.device)
        segments = (Segment(slot, start, 0, count),)
        span = TokenPass(torch.full_like(positions, slot), positions, start + count, singles=0, segments=segments)
        targets = slice(start + 1, start + count + 1)
        return self._target_logprobs(input_ids[start : start + count], span, input_ids[targets], temperature)

    def _target_logprobs(
        self, input_ids: list[int], span: TokenPass, target_ids: list[int], temperature: float
    ) -> list[float]:
        """Return the log-probs of the target tokens after the wanted tokens of a pass."""
        logits = self.run(torch.tensor(input_ids, device=self.device), span)
        targets = torch.tensor(target_ids, device=self.device)
        sharpness = torch.full((len(target_ids),), temperature or 1.0, device=self.device).reciprocal()
        chunks = [slice(start, start + _SCORED_AT_ONCE) for start in range(0, len(target_ids), _SCORED_AT_ONCE)]
        logprobs = [chosen_logprobs(logits[chunk].float(), targets[chunk], sharpness[chunk]) for chunk in chunks]
        values: list[float] = torch.cat(logprobs).tolist()
        return values
