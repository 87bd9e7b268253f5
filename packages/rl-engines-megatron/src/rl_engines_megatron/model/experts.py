"""Layers of experts, of megatron-core's own modules, and what is told of their routers.

The auxiliary loss of the routers is that of the FSDP engine, of each row alone: with E experts and L layers that have
any, E sum_e f_e P_e, f_e the fraction of the row's choices, over all its tokens and layers, that fell on expert e, and
P_e the mean of the routers' probabilities (arXiv:2101.03961, equations 4 to 6, by row as in arXiv:2412.19437, equations
17 to 20). So it is the same however rows are split into micro-batches and ranks, which megatron-core's own is not.
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
from rl_engines_megatron.model.mixture import Mixture
from rl_engines_megatron.model.packed_sequences import PackedSequences


def expert_spec(experts: Any) -> Any:
    """What makes a layer's router and experts, of what makes the experts."""
    return partial(MoELayer, submodules=MoESubmodules(experts=experts, router=RecordingRouter))


class RecordingRouter(TopKRouter):
    """megatron-core's, which shows what it chose."""

    watch: Routing

    def gating(self, input: Tensor) -> Tensor:
        """Of states [n, 1, H], logits [n, 1, E]. By torch: megatron-core has TransformerEngine compute them where it is
        installed, which multiplies float32 as TF32."""
        return F.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of logits [n, 1, E], the experts' weights and which were chosen, both [n, E]."""
        weights, chosen = super().routing(logits, padding_mask)
        if self.training:
            weights = self.watch.see(self.layer_number - 1, logits.flatten(0, 1), weights, chosen)
        return weights, chosen


class Routing:
    """What the routers of one part of a model choose: over a step, and in the micro-batch at hand.

    Args:
        part: whose routers show it.
        mixture: of its experts.
        layers: of the whole model.
    """

    def __init__(self, part: nn.Module, mixture: Mixture, layers: int) -> None:
        self.mixture, self.layers = mixture, layers
        for module in part.modules():
            if isinstance(module, RecordingRouter):
                module.watch = self
        for name, parameter in part.named_parameters():
            if ".mlp.experts." in name:
                # its gradient is summed over the ranks that hold it, which are others than those of attention, and an
                # optimizer of its own has it, in every layout: megatron-core sees to that with e above 1 only
                parameter.allreduce = False  # type: ignore[attr-defined]
        self.ranks = parallel_state.get_tensor_and_context_parallel_group()
        self.begin_step(1, torch.device("cpu"))

    def begin_step(self, tokens: int, device: torch.device) -> None:
        """Forget what was chosen.

        Args:
            tokens: of the step, over all ranks.
        """
        mixture = self.mixture
        self.load = torch.zeros(self.layers, mixture.experts, dtype=torch.float64, device=device)
        """Choices of each expert of each layer by this rank's tokens."""
        self.factor = mixture.balance * mixture.experts / (tokens * len(mixture.layers) ** 2)
        self._auxiliary = torch.zeros((), device=device)
        self._rows: PackedSequences | None = None

    def begin(self, rows: PackedSequences) -> None:
        """Take up the next micro-batch."""
        self._end()
        self._rows, self._seen = rows, set[int]()
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        self._owner = rows.owner.chunk(tensor)[parallel_state.get_tensor_model_parallel_rank()]
        self._choices = torch.zeros(len(rows.sizes) + 1, self.mixture.experts, device=rows.ids.device)
        self._chances = torch.zeros_like(self._choices)

    def see(self, layer: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Count a layer's choices, once where its activations are computed again.

        Returns:
            the weights; in backward they pull the routers' probabilities apart where an auxiliary loss is wanted.
        """
        chances = logits.float().softmax(-1) if self.mixture.balance else None
        if layer not in self._seen:
            self._seen.add(layer)
            picked = torch.zeros_like(self._choices).index_add(0, self._owner, chosen.to(self._choices.dtype))
            self.load[layer] += picked[:-1].sum(0)
            if chances is not None:
                if self.ranks.size() > 1:
                    dist.all_reduce(picked, group=self.ranks)
                self._choices += picked
                self._chances.index_add_(0, self._owner, chances.detach())
        if chances is None or not torch.is_grad_enabled():
            return weights
        return _Balanced.apply(weights, chances, self._pull)  # type: ignore[no-any-return]

    def _pull(self) -> Tensor:
        """The gradient of the auxiliary loss by the probabilities of a layer, [n, E], once all layers have chosen."""
        assert self._rows is not None
        by_row = self._choices[:-1] / self._rows.sizes[:, None]
        return self.factor * torch.cat([by_row, torch.zeros_like(self._choices[-1:])])[self._owner]

    def _end(self) -> None:
        if self._rows is not None and self.mixture.balance:
            products = (self._choices * self._chances)[:-1].sum(-1)
            self._auxiliary += (products / self._rows.sizes).sum()
            self._rows = None

    @property
    def auxiliary(self) -> Tensor:
        """This rank's part of the sum over rows of length times auxiliary loss, without its factor."""
        self._end()
        return self._auxiliary * (self.mixture.experts / len(self.mixture.layers) ** 2)


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, chances: Tensor, pull: Any) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.pull = pull
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        return grad, ctx.pull(), None


class ExpertLoad:
    """How the tokens of steps spread over experts, on all ranks, since it was last read.

    Args:
        routings: of this rank's parts of a model; none of a dense one.
    """

    def __init__(self, routings: list[Routing]) -> None:
        self.routings = routings
        self._load, self._wanted = torch.zeros(()), 0

    def begin(self, tokens: int, device: torch.device) -> None:
        """Begin a step of so many tokens, over all ranks."""
        for routing in self.routings:
            routing.begin_step(tokens, device)

    def end(self, tokens: int, sums: StepSums) -> None:
        """End it (collective over all ranks).

        Args:
            sums: is given the auxiliary loss, where there is one.
        """
        if not self.routings:
            return
        mixture, load = self.routings[0].mixture, torch.stack([routing.load for routing in self.routings]).sum(0)
        if mixture.balance:
            sums.put(AUXILIARY, torch.stack([routing.auxiliary for routing in self.routings]).sum())
        dist.all_reduce(load)
        self._load = self._load + load.cpu()[sorted(mixture.layers)]
        self._wanted += tokens * mixture.chosen * len(mixture.layers)

    def read(self) -> dict[str, float]:
        """`experts/share/max` and `experts/share/min`, the largest and smallest share of a layer's choices that fell on
        one expert; `experts/entropy`, the mean over layers of the shares' entropy as a fraction of that of even ones;
        `experts/dropped`, the fraction of choices that went to no expert. Nothing without steps."""
        if not self._wanted:
            return {}
        dropped, shares = 1.0 - float(self._load.sum()) / self._wanted, self._load / self._load.sum(-1, keepdim=True)
        entropy = torch.special.entr(shares).sum(-1).mean() / math.log(shares.shape[-1])
        self._load, self._wanted = torch.zeros(()), 0
        return {
            "experts/share/max": float(shares.max()),
            "experts/share/min": float(shares.min()),
            "experts/entropy": float(entropy),
            "experts/dropped": dropped,
        }
