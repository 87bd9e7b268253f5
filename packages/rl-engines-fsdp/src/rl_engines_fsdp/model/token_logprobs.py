"""Log-probs and entropies of given tokens straight from hidden states, without a full [tokens, vocabulary] tensor.

The vocabulary projection runs in chunks of tokens, and again in backward. Where all probabilities together are small,
as with the vocabularies of toy models, they are kept and it runs once. Where a chunk would be a handful of tokens, the
vocabulary is cut too (`tiled_logprobs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_contracts.linear import linear
from rl_contracts.token_logprobs import chosen_logprobs
from rl_engines_fsdp.model import tiled_logprobs as tiled

KEEP_AT_MOST = 1 << 22
"""Probabilities that are kept for backward instead of being computed again, at most (16 MiB)."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to its raw logits: `cap * tanh(scale * raw / cap)`."""

    scale: float = 1.0
    """Constant factor."""
    cap: float | None = None
    """Soft cap; None: none."""

    def apply(self, raw: Tensor) -> Tensor:
        """Logits from raw ones; changes `raw` in place."""
        if self.scale != 1.0:
            raw *= self.scale
        return raw if self.cap is None else raw.div_(self.cap).tanh_().mul_(self.cap)

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the raw logits; changes `grad` in place."""
        if self.cap is not None:
            grad *= 1 - (logits / self.cap) ** 2
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How the vocabulary projection is run."""

    transform: LogitTransform
    """What the model does to its logits."""
    max_logits: int
    """Entries of a [tokens, vocabulary] block that exist at once."""
    entropy_grad: bool
    """Whether the entropy carries gradient."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(logits / temperature), and that distribution's entropy in nats.

    Args:
        hidden: [M, H].
        weight: [V, H] of the vocabulary projection, in the type of `hidden`.
        bias: [V] or None.
        targets: int64 [M].
        temperature: float32 [M].

    Returns:
        two float32 [M]. Gradients reach `hidden`, `weight` and `bias`.
    """
    outputs: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature.reciprocal(), options
    )
    return outputs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sharpness: Tensor,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        tile = tiled.tile_of(tokens, weight.shape[0], options.max_logits)
        ctx.options, ctx.tile = options, tile
        if tile.vocabulary < weight.shape[0]:
            head = tiled.Head(weight, bias, options)
            logprobs, entropy, norm = tiled.forward(hidden, head, targets, sharpness, tile)
            return _saved(ctx, logprobs, entropy, (hidden, weight, bias, targets, sharpness, norm, entropy, None))
        logprobs = hidden.new_empty(tokens, dtype=torch.float32)
        entropy, norm = torch.empty_like(logprobs), torch.empty_like(logprobs)
        simple = options.transform.cap is None and not options.entropy_grad
        keep = simple and tokens * weight.shape[0] <= KEEP_AT_MOST
        kept = logprobs.new_empty(tokens, weight.shape[0]) if keep else None
        for part in tiled.spans(tokens, tile.tokens):
            logits = _logits(hidden[part], weight, bias, options.transform)
            logprobs[part], norm[part] = chosen_logprobs(logits, targets[part], sharpness[part])
            shifted = torch.sub(logits, norm[part, None], out=None if kept is None else kept[part])
            probs = shifted.exp_()
            entropy[part] = norm[part] - logits.mul_(probs).sum(-1)
        return _saved(ctx, logprobs, entropy, (hidden, weight, bias, targets, sharpness, norm, entropy, kept))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sharpness, norm, entropy, kept = ctx.saved_tensors
        options: HeadOptions = ctx.options
        trained = ctx.needs_input_grad[1:3]
        head = tiled.Head(weight, bias, options)
        if ctx.tile.vocabulary < weight.shape[0]:
            results, grads = (norm, entropy), (grad_logprobs, grad_entropy)
            found = tiled.backward(hidden, head, targets, sharpness, results, grads, ctx.tile, trained)
            return *(None if g is None else g.to(hidden.dtype) for g in found), None, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weight, grad_bias = tiled.zeros_for(head, trained)
        for part in tiled.spans(hidden.shape[0], ctx.tile.tokens):
            if kept is not None:
                # z = sharpness * scale * raw: a plain factor, so the logits themselves are not needed
                grad = kept[part] * -grad_logprobs[part, None]
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
                grad *= (sharpness[part] * options.transform.scale)[:, None]
            else:
                logits = _logits(hidden[part], weight, bias, options.transform)
                scaled = logits * sharpness[part, None]
                probs = (scaled - norm[part, None]).exp_()
                grad = probs * -grad_logprobs[part, None]
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
                if options.entropy_grad:
                    # dH/dz_j = -p_j (z_j - logsumexp(z) + H)
                    grad -= probs.mul_(scaled - (norm - entropy)[part, None]).mul_(grad_entropy[part, None])
                grad = options.transform.backward(grad.mul_(sharpness[part, None]), logits)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = linear(grad, weight.T)
            if grad_weight is not None:
                tiled.add_product(grad_weight, grad.T, hidden[part].T)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        summed = (grad_hidden, grad_weight, grad_bias)
        return *(None if g is None else g.to(hidden.dtype) for g in summed), None, None, None


def _saved(ctx: Any, logprobs: Tensor, entropy: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    ctx.save_for_backward(*tensors)
    if not ctx.options.entropy_grad:
        ctx.mark_non_differentiable(entropy)
    return logprobs, entropy


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """Transformed logits of a chunk, float32 [tokens, V]; a new tensor."""
    return transform.apply(linear(hidden, weight, bias).float())
