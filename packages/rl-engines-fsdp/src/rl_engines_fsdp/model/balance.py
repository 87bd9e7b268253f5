"""The auxiliary loss that spreads tokens over the experts of a mixture."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_contracts.errors import ModelError


class RouterBalance:
    """The load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), by row.

    With E experts, the fraction f_e of a row's choices, over all its tokens and layers, that fell on expert e, and the
    mean P_e of the router's probabilities, a row's loss is E sum_e f_e P_e: what transformers computes of that row
    alone. A batch's is the mean over its tokens. Taken by row, as DeepSeek-V3 takes its own (arXiv:2412.19437,
    equations 17 to 20), it is the same however rows are split into micro-batches and ranks.

    Args:
        model: of transformers, whose configuration asks for it.

    Raises:
        ModelError: its class does not tell what its routers say.
    """

    def __init__(self, model: Any) -> None:
        recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
        chosen = getattr(model, "num_experts_per_tok", None)  # of a classifier, its configuration says it
        chosen = chosen or getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        if "router_logits" not in recorded or chosen is None:
            raise ModelError(
                f"{type(model).__name__}: its config.json asks for the routers' auxiliary loss (output_router_logits), "
                "but transformers does not tell what the routers of this architecture say. Set output_router_logits to "
                "false there."
            )
        self.coefficient = balance_coefficient(model)
        """Its factor, by the model's configuration."""
        self._chosen = int(chosen)

    def sum(self, router_logits: tuple[Tensor, ...], row_of_token: Tensor, lengths: Tensor, group: Any) -> Tensor:
        """Sum over rows of length times loss, a float32 scalar with gradient; where rows lie over context ranks this
        rank's part of it.

        Args:
            router_logits: [N, E] of each layer.
            row_of_token: int64 [N]; S and more: padding.
            lengths: int64 [S] tokens of each row, also of those that lie on other ranks.
            group: the context ranks; None with one.
        """
        rows, experts = len(lengths), router_logits[0].shape[-1]
        chances = choices = torch.zeros(rows + 1, experts, device=row_of_token.device)
        place = row_of_token.clamp(max=rows)
        for logits in router_logits:
            layer = logits.view(-1, experts).float().softmax(-1)
            picked = torch.zeros_like(layer).scatter_(1, layer.topk(self._chosen).indices, 1.0)
            chances, choices = chances.index_add(0, place, layer), choices.index_add(0, place, picked)
        choices = choices.detach()
        if group is not None:
            dist.all_reduce(choices, group=group)
        products = (chances * choices)[:rows].sum(-1)
        return experts * (products / lengths).sum() / len(router_logits) ** 2


def balance_coefficient(model: Any) -> float:
    """The factor with which a model's configuration asks for the loss; 0: it does not."""
    config = model.config.get_text_config()
    asked = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if asked else 0.0
