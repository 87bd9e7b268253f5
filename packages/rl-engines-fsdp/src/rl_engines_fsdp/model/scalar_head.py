"""A decoder with one number per token instead of a vocabulary: critics and reward models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.packed_model import PackedModel, shifted

NAME = "score.weight"
"""What transformers calls the head of its sequence classifiers."""


class PackedScalarModel(PackedModel):
    """A sequence classifier of transformers with one label, read at every token of packed rows.

    The head is linear without a bias, as transformers has it. One that is made anew is zero: a critic that knows
    nothing predicts 0, so the first advantages are the rewards; and nothing is drawn at random. The first step reaches
    the head alone, later ones the decoder too.

    Args:
        model: as `AutoModelForSequenceClassification` makes it with `num_labels=1`.
        of_previous: entry t comes from the hidden state at t-1 (critics: what is expected before token t is known)
            instead of from the one at t (reward models, whose loss reads a row's last token).

    Raises:
        ModelError: the model has no such head.
    """

    of_previous: bool
    """Which hidden state an entry comes from."""

    def __init__(self, model: Any, of_previous: bool) -> None:
        super().__init__(model)
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
            raise ModelError(
                f"{type(model).__name__}: expected a linear head `score` of one label without a bias, found {head}; "
                "this architecture is not supported with head=value or head=score."
            )
        self.of_previous = of_previous

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, temperature: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros for log-probs and entropy, and the values of the tokens of a packed row; see `PackedModel`.

        The head computes in float32 whatever the decoder computes in. `temperature` is not used.
        """
        hidden = self.hidden(input_ids, position_ids, segments)
        # the last state of a critic's row speaks of a token that does not exist
        states = self.split.before_next(hidden) if self.of_previous else self.split.each(hidden)
        values = states.float() @ self.model.score.weight.float()[0]
        values = self.split.whole(values, len(input_ids) - self.of_previous)
        if self.of_previous:
            values = shifted(values, position_ids)
        nothing = values.new_zeros(values.shape)
        return nothing, nothing, values


def make_new_head(model: Any) -> None:
    """Set the head of a sequence classifier to zero, in place."""
    nn.init.zeros_(model.score.weight)


def pad_token_id(config: Any, generation: Any, tokenizer_path: str | None) -> int | None:
    """The id with which rows will be padded, which transformers' classifiers take to find a row's last token.

    The tokenizer that is saved with the model decides; without one the model's own settings do.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    if tokenizer_path is not None:
        from transformers import AutoTokenizer

        try:
            found: int | None = AutoTokenizer.from_pretrained(tokenizer_path).pad_token_id
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"tokenizer {tokenizer_path}: expected one with a pad token: {error}") from error
        if found is not None:
            return found
    settings = (config.get_text_config(), generation)
    return next((i for i in (getattr(s, "pad_token_id", None) for s in settings) if i is not None), None)
