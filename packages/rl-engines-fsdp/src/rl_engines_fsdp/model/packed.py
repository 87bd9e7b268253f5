"""A transformers model over packed rows: its decoder, and a head that says something of each token.

The wrapper is the FSDP root: its forward runs the decoder and the head, so the root's own parameters (embeddings, last
norm, head, tied or not) are gathered exactly while they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_contracts.models.fused_logprobs import HeadOptions, LogitTransform, token_logprobs
from rl_engines_fsdp.model import lora
from rl_engines_fsdp.model.attention import Segments, packed_rows
from rl_engines_fsdp.model.balance import RouterBalance, balance_coefficient
from rl_engines_fsdp.model.rope import RowFrequencies
from rl_engines_fsdp.ranks.layout import TokenSplit

PREFIX = "model."
"""What the wrapper puts before the Hugging Face names of its parameters."""


class PackedModel(nn.Module):
    """A decoder with a head, over packed rows.

    Subclasses' forward takes `input_ids` int64 [N], `position_ids` int64 [N] (restarting with each sequence),
    `temperature` float32 [N] of each token's row and the `Segments`, and returns the fields of `TokenOutputs` in order,
    each float32 [N]. Where gradients are computed and the configuration asks for it, the sum of the routers' auxiliary
    loss comes behind them.

    Args:
        model: as transformers makes it, with the attention of `rl_engines_fsdp.model.attention`.
        head: what it says of each token, one of `rl_contracts.data.HEADS`.
    """

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.split = TokenSplit()
        """How the tokens of a row lie over ranks; one rank has them all until this is set."""
        self.frequencies = RowFrequencies(model)
        """Of its rotary embeddings, where rows choose theirs by their lengths."""
        self.balance = RouterBalance(model) if balance_coefficient(model) else None
        """The auxiliary loss of its routers, where its configuration asks for one."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        """The decoder's last hidden states of a packed row, [N, H], in the type in which the model computes.

        Where the row lies over several ranks, those of this rank's tokens.
        """
        return self.hidden_and_auxiliary(input_ids, position_ids, segments)[0]

    def hidden_and_auxiliary(
        self, input_ids: Tensor, position_ids: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor | None]:
        """The same, and the sum of the routers' auxiliary loss (`RouterBalance.sum`) where it is wanted."""
        ids, positions, packed = self.split.inputs(input_ids, position_ids, segments)
        asked = self.balance is not None and torch.is_grad_enabled()
        places = self.split.part(packed.row_of_token()) if asked or self.frequencies else None
        if self.frequencies:
            self.frequencies.rows(packed.lengths, places)
        outputs = self.model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            packed=packed_rows(packed),
            **({"output_router_logits": asked} if self.balance is not None else {}),
        )
        auxiliary = None
        if self.balance is not None and places is not None and asked:
            sizes = segments.cu_seqlens.diff()
            auxiliary = self.balance.sum(outputs.router_logits, places, sizes, self.split.context)
        return outputs[0][0], auxiliary

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters, tied ones once, in a fixed order; named as Hugging Face does where there are no adapters."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]

    def hugging_face_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by their Hugging Face names, tied ones once, in a fixed order; adapters are left out."""
        return [(lora.base_name(name), p) for name, p in self.own_parameters() if not lora.is_adapter(name)]

    def kept_buffers(self) -> list[tuple[str, Tensor]]:
        """What the model's directory holds beside parameters, by the Hugging Face names: routing biases, scalars of
        layers. No step changes them."""
        return [
            (lora.base_name(f"{path}.{name}"), buffer)
            for path, module in self.model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    def kept_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters by their own names, and `kept_buffers`: all that the model's directory holds."""
        return [*self.named_parameters(), *self.kept_buffers()]

    def adapters(self) -> dict[str, lora.Pair]:
        """Adapters by the Hugging Face names of the weights that they adapt."""
        return lora.pairs(self, PREFIX)


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
        super().__init__(model, "lm")
        head, decoder = model.get_output_embeddings(), model.base_model
        if not isinstance(head, nn.Linear) or decoder is model:
            raise ModelError(
                f"{type(model).__name__}: expected a decoder and a linear vocabulary projection, found "
                f"{type(decoder).__name__} and {type(head).__name__}; this architecture is not supported."
            )
        self.options = HeadOptions(logit_transform(model.config), max_logits, entropy_grad)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, temperature: Tensor, segments: Segments
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies of the tokens of a packed row; arguments as `PackedModel` has them.

        Returns:
            two float32 [N]; entry t comes from the hidden state at t-1, and is 0 at the first token of a sequence.
        """
        hidden, auxiliary = self.hidden_and_auxiliary(input_ids, position_ids, segments)
        head = self.model.get_output_embeddings()
        targets, temperatures = self.split.next_of(input_ids), self.split.next_of(temperature, 1.0)
        outputs = token_logprobs(
            self.split.before_next(hidden), head.weight, head.bias, targets, temperatures, self.options
        )
        after = len(input_ids) - 1
        logprobs, entropy = (shifted(self.split.whole(values, after), position_ids) for values in outputs)
        return _with(auxiliary, logprobs, entropy)


class PackedScalarModel(PackedModel):
    """A sequence classifier of transformers with one label, read at every token of packed rows.

    The head is linear without a bias, as transformers has it. One that is made anew is zero: a critic that knows
    nothing predicts 0, so the first advantages are the rewards; and nothing is drawn at random. The first step reaches
    the head alone, later ones the decoder too.

    Args:
        model: as `AutoModelForSequenceClassification` makes it with `num_labels=1`.
        head: `value` (critics: entry t comes from the hidden state at t-1, and is what is expected before token t is
            known) or `score` (reward models, whose loss reads a row's last token: entry t comes from the state at t).

    Raises:
        ModelError: the model has no such head.
    """

    def __init__(self, model: Any, head: str) -> None:
        super().__init__(model, head)
        layer = getattr(model, "score", None)
        if not isinstance(layer, nn.Linear) or layer.out_features != 1 or layer.bias is not None:
            raise ModelError(
                f"{type(model).__name__}: expected a linear head `score` of one label without a bias, found {layer}; "
                "this architecture is not supported with head=value or head=score."
            )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, temperature: Tensor, segments: Segments
    ) -> tuple[Tensor, ...]:
        """Zeros for log-probs and entropy, and the values of the tokens of a packed row; see `PackedModel`.

        The head computes in float32 whatever the decoder computes in. `temperature` is not used.
        """
        hidden, auxiliary = self.hidden_and_auxiliary(input_ids, position_ids, segments)
        of_previous = self.head == "value"
        # the last state of a critic's row speaks of a token that does not exist
        states = self.split.before_next(hidden) if of_previous else self.split.each(hidden)
        values = states.float() @ self.model.score.weight.float()[0]
        values = self.split.whole(values, len(input_ids) - of_previous)
        if of_previous:
            values = shifted(values, position_ids)
        nothing = values.new_zeros(values.shape)
        return _with(auxiliary, nothing, nothing, values)


def _with(auxiliary: Tensor | None, *outputs: Tensor) -> tuple[Tensor, ...]:
    return outputs if auxiliary is None else (*outputs, auxiliary)


def shifted(values: Tensor, position_ids: Tensor) -> Tensor:
    """[N - 1] of what each token says of the next, to [N]: 0 where a token has no predecessor in its sequence."""
    follows = position_ids[1:] != 0
    return torch.cat([values.new_zeros(1), values.where(follows, 0.0)])


def logit_transform(config: Any) -> LogitTransform:
    """What a model of this configuration does to its logits, by the names under which the families say it."""
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(float(scale) / float(divisor), None if cap is None else float(cap))
