"""Log-probs and entropies over tiles of tokens and vocabulary, for vocabularies of which only a few tokens' logits fit.

Cut along tokens alone, each cut would read the whole projection for a handful of tokens. A tile of both is wide enough
that products are bound by arithmetic, and small enough that a core's cache holds it while the softmax passes over it.
Normalisers of tiles are combined as in a softmax over blocks (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rl_contracts.linear import linear, prefers_onednn

if TYPE_CHECKING:
    from rl_engines_fsdp.model.token_logprobs import HeadOptions

TOKENS = 512
"""Tokens of a tile, where there are as many."""
FEWEST = 128
"""Tokens of which the whole vocabulary's logits must fit, or it is cut too."""


class Tile(NamedTuple):
    """Size of a block of logits."""

    tokens: int
    """Rows."""
    vocabulary: int
    """Columns."""


class Head(NamedTuple):
    """The vocabulary projection and what is asked of it."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None
    """[V] or None."""
    options: HeadOptions
    """How it is run."""


def tile_of(tokens: int, vocabulary: int, max_logits: int) -> Tile:
    """Blocks of at most `max_logits` entries (one at least), of the whole vocabulary where that is not wasteful."""
    fit = max_logits // vocabulary
    if fit >= min(tokens, FEWEST):
        return Tile(max(fit, 1), vocabulary)
    rows = max(1, min(tokens, TOKENS, max_logits))
    return Tile(rows, max(1, max_logits // rows))


def spans(total: int, size: int) -> list[slice]:
    """0..total in pieces of `size`, the last one shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def forward(
    hidden: Tensor, head: Head, targets: Tensor, sharpness: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and logsumexps of the tokens, float32 [M] each; arguments as `token_logprobs` has them."""
    tokens, vocabulary = hidden.shape[0], head.weight.shape[0]
    logprobs, entropy, norm = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(3))
    columns = spans(vocabulary, tile.vocabulary)
    for part in spans(tokens, tile.tokens):
        norms = logprobs.new_empty(len(columns), len(hidden[part]))
        means = torch.empty_like(norms)
        chosen = torch.zeros_like(logprobs[part])
        for index, column in enumerate(columns):
            scaled = _logits(hidden[part], head, column).mul_(sharpness[part, None])
            place, inside = _places(targets[part], column)
            chosen = torch.where(inside, scaled.gather(1, place)[:, 0], chosen)
            top = scaled.amax(-1)
            weights = (scaled - top[:, None]).exp_()
            total = weights.sum(-1)
            means[index] = weights.mul_(scaled).sum(-1) / total
            norms[index] = total.log_().add_(top)
        norm[part] = norms.logsumexp(0)
        logprobs[part] = chosen - norm[part]
        entropy[part] = norm[part] - (norms - norm[part]).exp_().mul_(means).sum(0)
    return logprobs, entropy, norm


def backward(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    sharpness: Tensor,
    results: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    tile: Tile,
    trained: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias, in float32.

    Args:
        trained: whether weight and bias want theirs.
        results: logsumexps and entropies, as `forward` gave them.
        grads: gradients of log-probs and entropies.
    """
    (norm, entropy), (grad_logprobs, grad_entropy) = results, grads
    weight, options = head.weight, head.options
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    grad_weight, grad_bias = zeros_for(head, trained)
    for column in spans(weight.shape[0], tile.vocabulary):
        for part in spans(hidden.shape[0], tile.tokens):
            logits = _logits(hidden[part], head, column)
            scaled = logits * sharpness[part, None]
            probs = (scaled - norm[part, None]).exp_()
            grad = probs * -grad_logprobs[part, None]
            place, inside = _places(targets[part], column)
            grad.scatter_add_(1, place, grad_logprobs[part].where(inside, 0.0)[:, None])
            if options.entropy_grad:
                # dH/dz_j = -p_j (z_j - logsumexp(z) + H)
                grad -= probs.mul_(scaled - (norm - entropy)[part, None]).mul_(grad_entropy[part, None])
            grad = options.transform.backward(grad.mul_(sharpness[part, None]), logits).to(hidden.dtype)
            add_product(grad_hidden[part], grad, weight[column].T)
            if grad_weight is not None:
                add_product(grad_weight[column], grad.T, hidden[part].T)
            if grad_bias is not None:
                grad_bias[column] += grad.sum(0)
    return grad_hidden, grad_weight, grad_bias


def zeros_for(head: Head, trained: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Where the gradients of weight and bias are summed, float32; None for those that are not wanted."""
    weight, bias = (
        torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and wanted else None
        for tensor, wanted in zip((head.weight, head.bias), trained, strict=True)
    )
    return weight, bias


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add `x @ weight.T` to a float32 tensor in place, where that is possible without another of its size."""
    if x.dtype == torch.float32 and not (x.device.type == "cpu" and prefers_onednn()):
        total.addmm_(x, weight.T)
    else:
        total += linear(x, weight)


def _logits(hidden: Tensor, head: Head, column: slice) -> Tensor:
    """Transformed logits of a tile, float32; a new tensor."""
    bias = None if head.bias is None else head.bias[column]
    return head.options.transform.apply(linear(hidden, head.weight[column], bias).float())


def _places(targets: Tensor, column: slice) -> tuple[Tensor, Tensor]:
    """Where each target lies within a tile, [n, 1] (some place, where it does not), and whether it does, [n]."""
    place = targets - column.start
    inside = (place >= 0) & (targets < column.stop)
    return place.clamp_(0, column.stop - column.start - 1)[:, None], inside
