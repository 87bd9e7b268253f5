"""Log-probs and entropies of given tokens directly from hidden states, without a full [tokens, vocabulary] tensor.

The vocabulary projection runs in tiles of tokens and vocabulary, and again in backward. A tile spans the whole
vocabulary if enough tokens fit into such a tile. Otherwise the vocabulary is also split, because reading a large weight
again for every few tokens would be slow. Normalizers of tiles are combined as in a softmax over blocks (Milakov and
Gimelshein 2018, arXiv:1805.02867). If the tensor of all probabilities is small, as in toy models, it is stored, and
backward does not repeat the projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_contracts.models.cpu_matmul import linear, prefers_onednn
from rl_contracts.models.token_logprobs import float32_logits, log_normalizer

TOKENS = 512
"""Maximum number of tokens in a tile that is narrower than the vocabulary."""
FEWEST = 128
"""Number of tokens whose full-vocabulary logits must fit into a tile; otherwise the vocabulary is cut too."""
KEEP_AT_MOST = 1 << 22
"""Maximum number of probabilities to store for backward instead of recomputing them (16 MiB)."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transform that a model applies to its raw logits: `cap * tanh(scale * raw / cap)`."""

    scale: float = 1.0
    """Constant factor."""
    cap: float | None = None
    """Soft cap, or None for no cap."""

    def apply(self, raw: Tensor) -> Tensor:
        """Return the logits for raw logits; changes `raw` in place."""
        if self.scale != 1.0:
            raw *= self.scale
        return raw if self.cap is None else raw.div_(self.cap).tanh_().mul_(self.cap)

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap as a new tensor, or None without a cap."""
        return None if self.cap is None else (logits / self.cap).square_().neg_().add_(1)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Consecutive rows of the vocabulary projection, on one rank of the ranks that share the projection.

    All ranks get the same hidden states. Each rank returns its contribution to the gradient of the hidden states, and
    the caller sums the contributions.
    """

    first: int
    """Vocabulary index of the rank's first row."""
    group: dist.ProcessGroup
    """Process group of the ranks that hold the projection together."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options for computing the vocabulary projection."""

    transform: LogitTransform
    """Transform of the model's raw logits."""
    max_logits: int
    """Maximum number of entries in a [tokens, vocabulary] block."""
    entropy_grad: bool
    """True if the entropy carries a gradient."""
    part: VocabularyShard | None = None
    """Shard on this rank, or None if this rank holds the whole vocabulary."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob under softmax(logits / temperature), and that distribution's entropy in nats.

    Args:
        hidden: [M, H].
        weight: [V, H] of the vocabulary projection, in the dtype of `hidden`; with `options.part` this rank's rows.
        bias: [V] or None.
        targets: int64 [M].
        temperature: float32 [M].

    Returns:
        two float32 [M]. Gradients reach `hidden`, `weight` and `bias`.
    """
    sharpness = temperature.reciprocal()
    return _TokenLogprobs.apply(hidden, weight, bias, targets, sharpness, options)


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
        tokens, vocabulary, part = len(hidden), len(weight), options.part
        rows, columns = tiles(tokens, vocabulary, options.max_logits)
        results = hidden.new_empty(3, tokens, dtype=torch.float32)
        simple = options.transform.cap is None and not options.entropy_grad and len(columns) == 1 and part is None
        if part is not None:
            targets = targets - part.first
        stored = results.new_empty(tokens, vocabulary) if simple and tokens * vocabulary <= KEEP_AT_MOST else None
        for row in rows:
            parts = []
            for column in columns:
                scaled = _logits(hidden[row], weight, bias, column, options).mul_(sharpness[row, None])
                target_column, in_tile = _target_columns(targets[row], column, None if part else vocabulary)
                chosen = scaled.gather(1, target_column)[:, 0]
                log_total, total, weights = log_normalizer(scaled)
                if stored is not None:
                    torch.div(weights, total, out=stored[row])
                mean = weights.mul_(scaled).sum(-1).div_(total[:, 0])
                parts.append((chosen if in_tile is None else chosen.where(in_tile, 0.0), log_total, mean))
            results[:, row] = _merge_parts(parts)
        if part is not None:
            gathered = [torch.empty_like(results) for _ in range(dist.get_world_size(part.group))]
            dist.all_gather(gathered, results, group=part.group)
            results = _merge_parts([tuple(each) for each in gathered])
        chosen, norm, mean = results
        logprobs, entropy = chosen - norm, norm - mean
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets, sharpness, norm, entropy, stored)
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sharpness, norm, entropy, stored = ctx.saved_tensors
        options: HeadOptions = ctx.options
        grad_hidden = torch.zeros_like(hidden)
        grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=torch.float32) if needed else None
            for tensor, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        vocabulary = len(weight)
        rows, columns = tiles(len(hidden), vocabulary, options.max_logits)
        # z = sharpness * logits, and logits = scale * raw or its soft cap: the factors per token are applied first
        factor = sharpness * options.transform.scale
        logprob_factor, entropy_factor, mean = grad_logprobs * factor, grad_entropy * factor, norm - entropy
        for row in rows:
            row_grad = grad_hidden[row].float()  # the same tensor if it is float32
            for column in columns:
                target_column, in_tile = _target_columns(targets[row], column, None if options.part else vocabulary)
                if stored is not None:
                    grad, slope = stored[row] * -logprob_factor[row, None], None
                else:
                    logits = _logits(hidden[row], weight, bias, column, options)
                    slope = options.transform.cap_slope(logits)
                    scaled = logits.mul_(sharpness[row, None])
                    if options.entropy_grad:
                        # dH/dz_j = -p_j (z_j - logsumexp(z) + H)
                        weighted = (
                            (scaled - mean[row, None]).mul_(entropy_factor[row, None]).add_(logprob_factor[row, None])
                        )
                        grad = scaled.sub_(norm[row, None]).exp_().mul_(weighted).neg_()
                    else:
                        grad = scaled.sub_(norm[row, None]).exp_().mul_(-logprob_factor[row, None])
                at_target = logprob_factor[row] if in_tile is None else logprob_factor[row].where(in_tile, 0.0)
                grad.scatter_add_(1, target_column, at_target[:, None])
                if slope is not None:
                    grad *= slope
                grad = grad.to(hidden.dtype)
                _add_product(row_grad, grad, weight[column].T)
                if grad_weight is not None:
                    _add_product(grad_weight[column], grad.T, hidden[row].T)
                if grad_bias is not None:
                    grad_bias[column] += grad.sum(0)
            grad_hidden[row] = row_grad
        gradients = (grad_hidden, grad_weight, grad_bias)
        return *(None if g is None else g.to(hidden.dtype) for g in gradients), None, None, None


def tiles(tokens: int, vocabulary: int, max_logits: int) -> tuple[list[slice], list[slice]]:
    """Split tokens and vocabulary into spans. Each pair of spans is a tile of at most `max_logits` logits (minimum 1).

    Tiles cover the whole vocabulary if at least `min(tokens, FEWEST)` tokens fit into such a tile.
    """
    fit = max_logits // vocabulary
    if fit >= min(tokens, FEWEST):
        return _spans(tokens, max(fit, 1)), [slice(0, vocabulary)]
    height = max(1, min(tokens, TOKENS, max_logits))
    return _spans(tokens, height), _spans(vocabulary, max(1, max_logits // height))


def _spans(total: int, size: int) -> list[slice]:
    """Split the range 0..total into slices of `size`; the last one may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, column: slice, options: HeadOptions) -> Tensor:
    """Return the transformed logits of a tile as a new float32 tensor."""
    return options.transform.apply(float32_logits(hidden, weight[column], None if bias is None else bias[column]))


def _target_columns(targets: Tensor, column: slice, vocabulary: int | None) -> tuple[Tensor, Tensor | None]:
    """Return each target's column within a tile, [n, 1], and whether the target lies in the tile, [n].

    The column of a target outside the tile is clamped into it. If the tile is as wide as the vocabulary, all targets
    lie in it, and the second result is None.
    """
    if column.stop - column.start == vocabulary:
        return targets[:, None], None
    target_column = targets - column.start
    in_tile = (target_column >= 0) & (targets < column.stop)
    return target_column.clamp_(0, column.stop - column.start - 1)[:, None], in_tile


def _merge_parts(parts: list[Any]) -> Tensor:
    """Merge the results for n tokens from each part of the vocabulary into one tensor, [3, n].

    The results are the target's logit (0 where another part holds it), the logsumexp, and the mean logit under the
    softmax.
    """
    if len(parts) == 1:
        return torch.stack(parts[0])
    chosen, norms, means = (torch.stack(values) for values in zip(*parts, strict=True))
    norm = norms.logsumexp(0)
    return torch.stack([chosen.sum(0), norm, (norms - norm).exp_().mul_(means).sum(0)])


def _add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add `x @ weight.T` to a float32 tensor in place, if possible without a temporary tensor of its size."""
    if x.dtype == torch.float32 and not (x.device.type == "cpu" and prefers_onednn()):
        total.addmm_(x, weight.T)
    else:
        total += linear(x, weight)
