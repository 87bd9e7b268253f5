"""A causal language model that answers packed rows with log-probs and entropies instead of logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.packed_model import PackedModel, shifted
from rl_engines_fsdp.model.token_logprobs import HeadOptions, LogitTransform, token_logprobs


class PackedCausalLM(PackedModel):
    """A transformers causal language model over packed rows.

    Args:
        model: as `AutoModelForCausalLM` makes it, with the attention of `rl_engines_fsdp.model.attention`.
        max_logits: entries of a [tokens, vocabulary] block that exist at once.
        entropy_grad: whether the entropy carries gradient.

    Raises:
        ModelError: the model has no vocabulary projection, or no decoder apart from it.
    """

    def __init__(self, model: Any, max_logits: int, entropy_grad: bool) -> None:
        super().__init__(model)
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
        """Log-probs and entropies of the tokens of a packed row; arguments as `PackedModel` has them.

        Returns:
            two float32 [N]; entry t comes from the hidden state at t-1, and is 0 at the first token of a sequence.
        """
        hidden = self.hidden(input_ids, position_ids, segments)
        head = self.model.get_output_embeddings()
        targets, temperatures = self.split.next_of(input_ids), self.split.next_of(temperature, 1.0)
        outputs = token_logprobs(
            self.split.before_next(hidden), head.weight, head.bias, targets, temperatures, self.options
        )
        after = len(input_ids) - 1
        logprobs, entropy = (shifted(self.split.whole(values, after), position_ids) for values in outputs)
        return logprobs, entropy


def logit_transform(config: Any) -> LogitTransform:
    """What a model of this configuration does to its logits, by the names under which the families say it."""
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(float(scale) / float(divisor), None if cap is None else float(cap))
