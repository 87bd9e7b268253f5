"""A causal language model that answers packed rows with log-probs and entropies instead of logits.

The wrapper is the FSDP root: its forward runs the decoder and the vocabulary projection, so the root's own parameters
(embeddings, last norm, head, tied or not) are gathered exactly while they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_engines_fsdp.attention import Segments
from rl_engines_fsdp.token_logprobs import HeadOptions, LogitTransform, token_logprobs

PREFIX = "model."
"""What the wrapper puts before the Hugging Face names of its parameters."""


class PackedCausalLM(nn.Module):
    """A transformers causal language model over packed rows.

    Args:
        model: as `AutoModelForCausalLM` makes it, with the attention of `rl_engines_fsdp.attention`.
        max_logits: entries of a [tokens, vocabulary] block that exist at once.
        entropy_grad: whether the entropy carries gradient.

    Raises:
        ModelError: the model has no vocabulary projection, or no decoder apart from it.
    """

    def __init__(self, model: Any, max_logits: int, entropy_grad: bool) -> None:
        super().__init__()
        self.model = model
        head, decoder = model.get_output_embeddings(), model.base_model
        if not isinstance(head, nn.Linear) or decoder is model:
            raise ModelError(
                f"{type(model).__name__}: expected a decoder and a linear vocabulary projection, found "
                f"{type(decoder).__name__} and {type(head).__name__}; this architecture is not supported."
            )
        self.options = HeadOptions(logit_transform(model.config), max_logits, entropy_grad)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, temperature: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the tokens of a packed row.

        Args:
            input_ids: int64 [N].
            position_ids: int64 [N], restarting with each sequence.
            temperature: float32 [N] of each token's row.
            segments: where the sequences lie.

        Returns:
            two float32 [N]; entry t comes from the hidden state at t-1, and is 0 at the first token of a sequence.
        """
        hidden = self.model.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packed=segments
        )[0][0]
        head = self.model.get_output_embeddings()
        logprobs, entropy = token_logprobs(
            hidden[:-1], head.weight, head.bias, input_ids[1:], temperature[1:], self.options
        )
        follows = position_ids[1:] != 0
        return _shifted(logprobs, follows), _shifted(entropy, follows)

    def hugging_face_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by their Hugging Face names, tied ones once, in a fixed order."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]


def _shifted(values: Tensor, follows: Tensor) -> Tensor:
    """[N - 1] of what each token says of the next, to [N]: 0 where a token has no predecessor in its sequence."""
    return torch.cat([values.new_zeros(1), values.where(follows, 0.0)])


def logit_transform(config: Any) -> LogitTransform:
    """What a model of this configuration does to its logits, by the names under which the families say it."""
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(float(scale) / float(divisor), None if cap is None else float(cap))
