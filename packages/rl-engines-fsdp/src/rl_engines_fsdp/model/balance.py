"""Auxiliary loss that balances tokens over the experts of an MoE."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_contracts.errors import ModelError


class RouterBalance:
    """Load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6) per sequence.

    The loss of a sequence is E sum_e f_e P_e with E experts. f_e is the fraction of its routing choices, over all
    tokens and layers, that selected expert e. P_e is the mean router probability of e. transformers computes the
    same value for a batch of this one sequence.

    The loss of a batch is the mean over its tokens. Because it is computed per sequence, as in DeepSeek-V3
    (arXiv:2412.19437, equations 17 to 20), it does not depend on the split into micro-batches and ranks.

    Args:
        model: transformers model whose configuration enables the loss.

    Raises:
        ModelError: transformers cannot record router logits for this model class.
    """

    def __init__(self, model: Any) -> None:
        recordable = getattr(model.base_model, "_can_record_outputs", None) or {}
        experts_per_token = getattr(model, "num_experts_per_tok", None)  # a classifier has it only in its configuration
        experts_per_token = experts_per_token or getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        if "router_logits" not in recordable or experts_per_token is None:
            raise ModelError(
                f"{type(model).__name__}: config.json enables the router auxiliary loss (output_router_logits=true), "
                "but transformers does not record router logits for this architecture. Set output_router_logits to "
                "false in config.json."
            )
        self.coefficient = balance_coefficient(model)
        """Coefficient of the loss, from the configuration of the model."""
        self._experts_per_token = int(experts_per_token)

    def sum(self, router_logits: tuple[Tensor, ...], row_of_token: Tensor, lengths: Tensor, group: Any) -> Tensor:
        """Return the sum over sequences of length times loss, a float32 scalar with gradient.

        With context parallelism, this is the contribution of this rank's tokens.

        Args:
            router_logits: router logits [N, E] of each layer.
            row_of_token: sequence index of each token, int64 [N]; S and above mean padding.
            lengths: tokens of each sequence on all context ranks, int64 [S].
            group: process group of the context ranks; None with one rank.
        """
        num_sequences, experts = len(lengths), router_logits[0].shape[-1]
        probabilities = choices = torch.zeros(num_sequences + 1, experts, device=row_of_token.device)
        index = row_of_token.clamp(max=num_sequences)
        for logits in router_logits:
            layer_probabilities = logits.view(-1, experts).float().softmax(-1)
            selected = torch.zeros_like(layer_probabilities).scatter_(
                1, layer_probabilities.topk(self._experts_per_token).indices, 1.0
            )
            probabilities, choices = (
                probabilities.index_add(0, index, layer_probabilities),
                choices.index_add(0, index, selected),
            )
        choices = choices.detach()
        if group is not None:
            dist.all_reduce(choices, group=group)
        products = (probabilities * choices)[:num_sequences].sum(-1)
        return experts * (products / lengths).sum() / len(router_logits) ** 2


def balance_coefficient(model: Any) -> float:
    """Return the coefficient of the loss in the model's configuration; 0 if the loss is disabled."""
    config = model.config.get_text_config()
    is_enabled = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if is_enabled else 0.0
