"""Transformers model over packed sequences: the decoder, and a head with one output per token.

The wrapper is the FSDP root. Its forward runs decoder and head, so the parameters of the root (embeddings, final norm,
head, tied or not) are gathered exactly while they are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rl_contracts.errors import ModelError
from rl_contracts.images.features import TOKEN_TYPES
from rl_contracts.models.fused_logprobs import HeadOptions, LogitTransform, token_logprobs
from rl_engines_fsdp.model import lora
from rl_engines_fsdp.model.attention import Segments, packed_rows
from rl_engines_fsdp.model.balance import RouterBalance, balance_coefficient
from rl_engines_fsdp.model.rope import RowFrequencies
from rl_engines_fsdp.model.vision import VisionInputs
from rl_engines_fsdp.ranks.layout import TokenSplit

PREFIX = "model."
"""Prefix that the wrapper adds to the Hugging Face names of its parameters."""


class PackedModel(nn.Module):
    """Decoder with a head, over packed sequences.

    The forward of subclasses takes `input_ids` int64 [N], `position_ids` int64 [N] (starting at 0 in each sequence),
    `temperature` float32 [N], the `Segments`, and for a vision-language model the inputs of `VisionInputs`. It returns
    the fields of `TokenOutputs` in order, each float32 [N]. With gradients, and if the configuration enables it, the
    sum of the router auxiliary loss follows.

    Args:
        model: transformers model with the attention of `rl_engines_fsdp.model.attention`.
        head: kind of output per token, one of `rl_contracts.data.HEADS`.
    """

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.split = TokenSplit()
        """Split of the tokens over ranks; by default one rank has all tokens."""
        self.frequencies = RowFrequencies(model)
        """Frequencies of rotary embeddings that depend on the length of a sequence; false if the model has none."""
        self.balance = RouterBalance(model) if balance_coefficient(model) else None
        """Router auxiliary loss, or None if the configuration does not enable it."""
        self.vision: VisionInputs | None = None
        """Inputs for images, or None for a model of texts."""

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, segments: Segments, vision: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Return the last hidden states of the decoder, [N, H], in the compute dtype.

        With context parallelism, these are the states of this rank's tokens.
        """
        return self.hidden_and_auxiliary(input_ids, position_ids, segments, vision)[0]

    def hidden_and_auxiliary(
        self, input_ids: Tensor, position_ids: Tensor, segments: Segments, vision: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states, and the sum of the router auxiliary loss (`RouterBalance.sum`) if required."""
        if vision is not None:
            return self._hidden_with_images(input_ids, segments, vision), None
        ids, positions, packed = self.split.inputs(input_ids, position_ids, segments)
        needs_auxiliary = self.balance is not None and torch.is_grad_enabled()
        sequence_of_token = self.split.part(packed.row_of_token()) if needs_auxiliary or self.frequencies else None
        if self.frequencies:
            self.frequencies.rows(packed.lengths, sequence_of_token)
        outputs = self.model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            packed=packed_rows(packed),
            **({"output_router_logits": needs_auxiliary} if self.balance is not None else {}),
        )
        auxiliary = None
        if self.balance is not None and sequence_of_token is not None and needs_auxiliary:
            sizes = segments.cu_seqlens.diff()
            auxiliary = self.balance.sum(outputs.router_logits, sequence_of_token, sizes, self.split.context)
        return outputs[0][0], auxiliary

    def _hidden_with_images(self, input_ids: Tensor, segments: Segments, vision: dict[str, Tensor]) -> Tensor:
        """Return the hidden states of this rank's tokens. Every rank of a replica runs the vision encoder."""
        positions = vision["position_ids"]
        ids, positions, packed = self.split.padded(input_ids, positions, segments)
        missing = len(ids) - len(input_ids)
        types = {name: pad(vision[name], (0, missing)) for name in TOKEN_TYPES if name in vision}
        inputs = vision | types | {"input_ids": ids[None], "position_ids": positions}
        with self._own_tokens():
            outputs = self.model.base_model(**inputs, use_cache=False, packed=packed_rows(packed))
        return outputs[0][0]  # type: ignore[no-any-return]

    @contextmanager
    def _own_tokens(self) -> Iterator[None]:
        """Give the decoder only this rank's tokens, after the model replaced placeholders by image features."""
        if self.split.context is None:
            yield
            return

        def select(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            embeddings, positions = keywords["inputs_embeds"][0], keywords["position_ids"].movedim(-1, 0)
            own = {
                "inputs_embeds": self.split.part(embeddings)[None],
                "position_ids": self.split.part(positions).movedim(0, -1),
            }
            return inputs, keywords | own

        hook = self.model.get_decoder().register_forward_pre_hook(select, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters, tied ones once, in a fixed order. Without adapters they have Hugging Face names."""
        return [(name.removeprefix(PREFIX), parameter) for name, parameter in self.named_parameters()]

    def hugging_face_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return parameters by their Hugging Face names, tied ones once, in a fixed order, without adapters."""
        return [(lora.base_name(name), p) for name, p in self.own_parameters() if not lora.is_adapter(name)]

    def kept_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that the model directory stores, by Hugging Face name.

        Examples are routing biases and scalars of layers. No step changes them.
        """
        return [
            (lora.base_name(f"{path}.{name}"), buffer)
            for path, module in self.model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    def kept_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors of the model directory: parameters by their names in this module, and `kept_buffers`."""
        return [*self.named_parameters(), *self.kept_buffers()]

    def adapters(self) -> dict[str, lora.Pair]:
        """Return the adapters by the Hugging Face names of the weights that they adapt."""
        return lora.pairs(self, PREFIX)


class PackedCausalLM(PackedModel):
    """Causal language model of transformers over packed sequences.

    Args:
        model: model of `AutoModelForCausalLM`, with the attention of `rl_engines_fsdp.model.attention`.
        max_logits: maximum entries of a [tokens, vocabulary] block of logits.
        entropy_grad: whether the entropy has a gradient.

    Raises:
        ModelError: the model has no linear vocabulary projection, or no separate decoder.
    """

    def __init__(self, model: Any, max_logits: int, entropy_grad: bool) -> None:
        super().__init__(model, "lm")
        head, decoder = model.get_output_embeddings(), model.base_model
        if not isinstance(head, nn.Linear) or decoder is model:
            raise ModelError(
                f"{type(model).__name__}: expected a decoder and a linear vocabulary projection, found "
                f"{type(decoder).__name__} and {type(head).__name__}. This architecture is not supported."
            )
        self.options = HeadOptions(logit_transform(model.config), max_logits, entropy_grad)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        temperature: Tensor,
        segments: Segments,
        vision: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the tokens; see `PackedModel` for the arguments.

        Returns:
            two tensors float32 [N]. Entry t is computed from the hidden state at t-1, and is 0 for the first token of a
            sequence. The router auxiliary loss follows if required.
        """
        hidden, auxiliary = self.hidden_and_auxiliary(input_ids, position_ids, segments, vision)
        head = self.model.get_output_embeddings()
        targets, temperatures = self.split.next_of(input_ids), self.split.next_of(temperature, 1.0)
        outputs = token_logprobs(
            self.split.before_next(hidden), head.weight, head.bias, targets, temperatures, self.options
        )
        count = len(input_ids) - 1
        logprobs, entropy = (shifted(self.split.whole(values, count), position_ids) for values in outputs)
        return _append_auxiliary(auxiliary, logprobs, entropy)


class PackedScalarModel(PackedModel):
    """Sequence classifier of transformers with one label, evaluated at every token of packed sequences.

    The head is linear without a bias, as in transformers. A new head is zero instead of random: an untrained critic
    predicts 0, so the first advantages are the rewards. The first step changes only the head, because the decoder has a
    zero gradient.

    Args:
        model: model of `AutoModelForSequenceClassification` with `num_labels=1`.
        head: `value` for critics: entry t is the value before token t, from the hidden state at t-1. `score` for reward
            models: entry t is from the hidden state at t, and a loss reads it at the last token of a sequence.

    Raises:
        ModelError: the model has no such head.
    """

    def __init__(self, model: Any, head: str) -> None:
        super().__init__(model, head)
        layer = getattr(model, "score", None)
        if not isinstance(layer, nn.Linear) or layer.out_features != 1 or layer.bias is not None:
            raise ModelError(
                f"{type(model).__name__}: expected a linear head `score` with one label and no bias, found {layer}. "
                "This architecture is not supported with head=value or head=score."
            )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        temperature: Tensor,
        segments: Segments,
        vision: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return zeros for log-probs and entropy, and the value of each token; see `PackedModel`.

        The head always computes in float32. `temperature` and `vision` are not used.
        """
        hidden, auxiliary = self.hidden_and_auxiliary(input_ids, position_ids, segments)
        is_critic = self.head == "value"
        # the last state of a critic would predict a token that does not exist
        states = self.split.before_next(hidden) if is_critic else self.split.each(hidden)
        values = states.float() @ self.model.score.weight.float()[0]
        values = self.split.whole(values, len(input_ids) - is_critic)
        if is_critic:
            values = shifted(values, position_ids)
        zeros = values.new_zeros(values.shape)
        return _append_auxiliary(auxiliary, zeros, zeros, values)


def _append_auxiliary(auxiliary: Tensor | None, *outputs: Tensor) -> tuple[Tensor, ...]:
    return outputs if auxiliary is None else (*outputs, auxiliary)


def shifted(values: Tensor, position_ids: Tensor) -> Tensor:
    """Shift values [N - 1], computed at the previous token, to [N]; the first token of each sequence gets 0."""
    has_previous = position_ids[1:] != 0
    return torch.cat([values.new_zeros(1), values.where(has_previous, 0.0)])


def logit_transform(config: Any) -> LogitTransform:
    """Read the logit transform (scale, soft cap) from a configuration, whose setting names depend on the family."""
    config = config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(float(scale) / float(divisor), None if cap is None else float(cap))
