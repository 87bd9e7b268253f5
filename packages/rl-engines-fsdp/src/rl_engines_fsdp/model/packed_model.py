"""What the packed models have in common: a transformers model whose decoder runs over packed rows.

The wrapper is the FSDP root: its forward runs the decoder and the head, so the root's own parameters (embeddings, last
norm, head, tied or not) are gathered exactly while they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_engines_fsdp.model import lora
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.ranks.token_split import TokenSplit

PREFIX = "model."
"""What the wrapper puts before the Hugging Face names of its parameters."""


class PackedModel(nn.Module):
    """A decoder with a head, over packed rows.

    Subclasses' forward takes `input_ids` int64 [N], `position_ids` int64 [N] (restarting with each sequence),
    `temperature` float32 [N] of each token's row and the `Segments`, and returns the fields of `TokenOutputs` in order,
    each float32 [N].

    Args:
        model: as transformers makes it, with the attention of `rl_engines_fsdp.model.attention`.
    """

    split: TokenSplit
    """How the tokens of a row lie over ranks; one rank has them all until this is set."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.split = TokenSplit()

    def hidden(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        """The decoder's last hidden states of a packed row, [N, H], in the type in which the model computes.

        Where the row lies over several ranks, those of this rank's tokens.
        """
        ids, positions, packed = self.split.inputs(input_ids, position_ids, segments)
        states: Tensor = self.model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, packed=packed
        )[0][0]
        return states

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters, tied ones once, in a fixed order; named as Hugging Face does where there are no adapters."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]

    def hugging_face_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by their Hugging Face names, tied ones once, in a fixed order; adapters are left out."""
        return [(lora.base_name(name), p) for name, p in self.own_parameters() if not lora.is_adapter(name)]

    def adapters(self) -> dict[str, lora.Pair]:
        """Adapters by the Hugging Face names of the weights that they adapt."""
        return lora.pairs(self, PREFIX)


def shifted(values: Tensor, position_ids: Tensor) -> Tensor:
    """[N - 1] of what each token says of the next, to [N]: 0 where a token has no predecessor in its sequence."""
    follows = position_ids[1:] != 0
    return torch.cat([values.new_zeros(1), values.where(follows, 0.0)])
