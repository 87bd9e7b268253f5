"""MoE layers made of megatron-core's modules, and statistics of their routers.

The auxiliary loss of the routers is the same as in the FSDP engine, computed for each sequence separately. With E
experts and L MoE layers it is E sum_e f_e P_e. f_e is the fraction of the sequence's choices, over all its tokens and
layers, that selected expert e. P_e is the mean router probability of expert e. (arXiv:2101.03961, equations 4 to 6; by
sequence as in arXiv:2412.19437, equations 17 to 20.)

So, unlike megatron-core's own loss, it does not depend on how sequences are split into micro-batches and ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rl_contracts.models.step_sums import AUXILIARY, StepSums
from rl_engines_megatron.model.moe import MoESpec
from rl_engines_megatron.model.packed_sequences import PackedSequences


def expert_spec(experts: Any) -> Any:
    """Return the constructor of an MoE layer with router, given the constructor of its experts."""
    return partial(MoELayer, submodules=MoESubmodules(experts=experts, router=RecordingRouter))


class RecordingRouter(TopKRouter):
    """megatron-core's router, which also reports its choices to a `Routing`."""

    watch: Routing

    def gating(self, input: Tensor) -> Tensor:
        """Return the router logits [n, 1, E] of hidden states [n, 1, H].

        torch computes them. megatron-core would use TransformerEngine if it is installed, which multiplies float32 as
        TF32.
        """
        return F.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and choices of the experts, both [n, E], from logits [n, 1, E]."""
        weights, chosen = super().routing(logits, padding_mask)
        if self.training:
            weights = self.watch.see(self.layer_number - 1, logits.flatten(0, 1), weights, chosen)
        return weights, chosen


class Routing:
    """Choices of the routers of one model chunk, over a step and in the current micro-batch.

    Args:
        part: model chunk whose routers report their choices.
        moe: experts of the model.
        layers: number of layers of the whole model.
    """

    def __init__(self, part: nn.Module, moe: MoESpec, layers: int) -> None:
        self.moe, self.layers = moe, layers
        for module in part.modules():
            if isinstance(module, RecordingRouter):
                module.watch = self
        for name, parameter in part.named_parameters():
            if ".mlp.experts." in name:
                # allreduce=False: sum the gradient over the ranks that hold this expert, and use a separate optimizer.
                # megatron-core sets it only with e above 1; this engine sets it in all layouts.
                parameter.allreduce = False  # type: ignore[attr-defined]
        self.ranks = parallel_state.get_tensor_and_context_parallel_group()
        self.begin_step(1, torch.device("cpu"))

    def begin_step(self, tokens: int, device: torch.device) -> None:
        """Reset the choices for a new step.

        Args:
            tokens: tokens of the step over all ranks.
            device: device of the counters.
        """
        moe = self.moe
        self.load = torch.zeros(self.layers, moe.experts, dtype=torch.float64, device=device)
        """Number of times that tokens of this rank chose each expert, by layer."""
        self.factor = moe.balance * moe.experts / (tokens * len(moe.layers) ** 2)
        self._auxiliary = torch.zeros((), device=device)
        self._rows: PackedSequences | None = None

    def begin(self, rows: PackedSequences) -> None:
        """Begin the next micro-batch."""
        self._end()
        self._rows, self._seen = rows, set[int]()
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        self._owner = rows.owner.chunk(tensor)[parallel_state.get_tensor_model_parallel_rank()]
        self._choices = torch.zeros(len(rows.sizes) + 1, self.moe.experts, device=rows.ids.device)
        self._probabilities = torch.zeros_like(self._choices)

    def see(self, layer: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Count the choices of a layer once, even if its activations are recomputed.

        Args:
            layer: number of the layer in the model.
            logits: router logits, [n, E].
            weights: weights of the experts, [n, E].
            chosen: choices, [n, E].

        Returns:
            The weights. With an auxiliary loss, their backward also adds the gradient of this loss to the router
            probabilities.
        """
        probabilities = logits.float().softmax(-1) if self.moe.balance else None
        if layer not in self._seen:
            self._seen.add(layer)
            counts = torch.zeros_like(self._choices).index_add(0, self._owner, chosen.to(self._choices.dtype))
            self.load[layer] += counts[:-1].sum(0)
            if probabilities is not None:
                if self.ranks.size() > 1:
                    dist.all_reduce(counts, group=self.ranks)
                self._choices += counts
                self._probabilities.index_add_(0, self._owner, probabilities.detach())
        if probabilities is None or not torch.is_grad_enabled():
            return weights
        return _AddAuxiliaryGradient.apply(weights, probabilities, self._auxiliary_gradient)  # type: ignore[no-any-return]

    def _auxiliary_gradient(self) -> Tensor:
        """Return the gradient of the auxiliary loss with respect to the probabilities of a layer, [n, E].

        The result is correct only after all layers have routed the micro-batch.
        """
        assert self._rows is not None
        fractions = self._choices[:-1] / self._rows.sizes[:, None]
        return self.factor * torch.cat([fractions, torch.zeros_like(self._choices[-1:])])[self._owner]

    def _end(self) -> None:
        if self._rows is not None and self.moe.balance:
            products = (self._choices * self._probabilities)[:-1].sum(-1)
            self._auxiliary += (products / self._rows.sizes).sum()
            self._rows = None

    @property
    def auxiliary(self) -> Tensor:
        """Contribution of this rank to the auxiliary loss, without its coefficient.

        The contribution is the sum over sequences of length times loss; `engine.py` divides it by the number of tokens.
        """
        self._end()
        return self._auxiliary * (self.moe.experts / len(self.moe.layers) ** 2)


class _AddAuxiliaryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, probabilities: Tensor, auxiliary_gradient: Any) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.auxiliary_gradient = auxiliary_gradient
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        return grad, ctx.auxiliary_gradient(), None


class ExpertLoad:
    """Distribution of tokens over experts, on all ranks, since the last `read`.

    Args:
        routings: one `Routing` per model chunk of this rank; empty for a dense model.
    """

    def __init__(self, routings: list[Routing]) -> None:
        self.routings = routings
        self._load, self._expected = torch.zeros(()), 0

    def begin(self, tokens: int, device: torch.device) -> None:
        """Begin a step of `tokens` tokens over all ranks."""
        for routing in self.routings:
            routing.begin_step(tokens, device)

    def end(self, tokens: int, sums: StepSums) -> None:
        """End the step (collective over all ranks).

        Args:
            tokens: tokens of the step over all ranks.
            sums: receives the auxiliary loss, if there is one.
        """
        if not self.routings:
            return
        moe, load = self.routings[0].moe, torch.stack([routing.load for routing in self.routings]).sum(0)
        if moe.balance:
            sums.put(AUXILIARY, torch.stack([routing.auxiliary for routing in self.routings]).sum())
        dist.all_reduce(load)
        self._load = self._load + load.cpu()[sorted(moe.layers)]
        self._expected += tokens * moe.chosen * len(moe.layers)

    def read(self) -> dict[str, float]:
        """Return the expert metrics since the last call, or an empty dict without steps.

        - `experts/share/max`, `experts/share/min`: largest and smallest fraction of a layer's choices for one expert.
        - `experts/entropy`: mean over layers of the entropy of these fractions, relative to a uniform distribution.
        - `experts/dropped`: fraction of the choices that were not sent to an expert.
        """
        if not self._expected:
            return {}
        dropped, shares = 1.0 - float(self._load.sum()) / self._expected, self._load / self._load.sum(-1, keepdim=True)
        entropy = torch.special.entr(shares).sum(-1).mean() / math.log(shares.shape[-1])
        self._load, self._expected = torch.zeros(()), 0
        return {
            "experts/share/max": float(shares.max()),
            "experts/share/min": float(shares.min()),
            "experts/entropy": float(entropy),
            "experts/dropped": dropped,
        }
