"""Model chunks of a language model, critic or reward model, based on megatron-core's GPT model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rl_contracts.models.fused_logprobs import HeadOptions, LogitTransform, VocabularyShard, token_logprobs
from rl_engines_megatron.model.experts import Routing
from rl_engines_megatron.model.layers import block_spec
from rl_engines_megatron.model.megatron_config import rope_kwargs
from rl_engines_megatron.model.packed_sequences import PackedSequences
from rl_engines_megatron.model.partition import Partition


class PackedGPT(GPTModel):
    """Consecutive layers of a decoder over packed sequences; the last stage has a head.

    Args:
        config: config of megatron-core.
        partition: split of the model.
        stage: number of this stage.
        options: options of the vocabulary projection.
        kwargs: further arguments of `GPTModel`.
    """

    def __init__(
        self, config: TransformerConfig, partition: Partition, stage: int, options: HeadOptions, **kwargs: Any
    ) -> None:
        architecture = partition.architecture
        spec = block_spec(config, architecture, partition.stage_layers(stage))
        super().__init__(config, spec, **kwargs)
        self.partition, self.stage = partition, stage
        self.head, self.options, self.vocabulary = partition.head, options, architecture.vocab
        moe = architecture.moe
        self.routing = None if moe is None else Routing(self, moe, architecture.layers)
        if self.post_process and self.head != "lm":
            del self.output_layer
            self.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=torch.float32)
        if self.pre_process and architecture.family.scaled_embeddings:
            # rounded to the dtype of the embeddings
            scale = float(torch.tensor(config.hidden_size**0.5, dtype=config.params_dtype))
            self.embedding.register_forward_hook(lambda _, __, embeddings: embeddings * scale)
        if architecture.window_rope is not None:
            ropes = (architecture.rope, architecture.window_rope)
            self.rotary_pos_emb = RotaryEmbeddings(_rotary(config, rope_kwargs(rope)) for rope in ropes)

    def run(self, rows: PackedSequences, model: nn.Module) -> Any:
        """Return the outputs for a micro-batch: states for the next stage, or in the last stage the per-token outputs.

        Args:
            rows: the micro-batch.
            model: the wrapper of this model chunk, or the chunk itself if it has no wrapper; `run` calls it.
        """
        if self.routing is not None:
            self.routing.begin(rows)
        return model(
            input_ids=rows.ids[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=rows.segments,
            output_processor=partial(self._token_outputs, rows) if self.post_process else None,
        )

    def _postprocess(self, hidden_states: Tensor, output_processor: Any = None, **_: Any) -> Any:
        """Replace megatron-core's head, loss and logits."""
        return hidden_states if output_processor is None else output_processor(hidden_states[:, 0])

    def _token_outputs(self, rows: PackedSequences, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return per-token outputs [n] of this context rank: log-probs of the next tokens and entropies, or values."""
        parallel = self.config.sequence_parallel
        if self.head == "lm":
            if parallel:
                hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
            else:
                hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
            tied = self.share_embeddings_and_output_weights
            weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
            first = 0 if self.options.part is None else self.options.part.first
            weight = weight[: self.vocabulary - first]  # without padding rows
            return token_logprobs(hidden, weight, None, rows.targets, rows.temperature, self.options)
        if parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return (hidden.float() @ self.score.weight.float()[0],)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return megatron-core's sharded state dict.

        The method of `LanguageModule` requires an output layer, so it is skipped for a scalar head.
        """
        base: Any = super() if self.head == "lm" else super(LanguageModule, self)
        return base.sharded_state_dict(*args, **kwargs)


class RotaryEmbeddings(nn.ModuleList):
    """Several rotary embeddings, whose outputs are concatenated."""

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Return the number of positions that a micro-batch requires."""
        first_rope: Any = self[0]
        return int(first_rope.get_rotary_seq_len(*args))

    def forward(self, length: int, **kwargs: Any) -> Tensor:
        """Return the concatenated embeddings, [length, 1, 1, number of embeddings * D]."""
        return torch.cat([rope(length, **kwargs) for rope in self], -1)


def _rotary(config: TransformerConfig, rope: dict[str, Any]) -> RotaryEmbedding:
    return RotaryEmbedding(config.kv_channels, use_cpu_initialization=config.use_cpu_initialization, **rope)


def make_model(
    config: TransformerConfig, partition: Partition, interleaved: int, max_logits: int, entropy_grad: bool, gpt: Any
) -> list[PackedGPT]:
    """Create the `interleaved` model chunks of this rank, on megatron-core's device.

    Args:
        config: config of megatron-core.
        partition: split of the model.
        interleaved: model chunks on each pipeline rank.
        max_logits: maximum entries of a [tokens, vocabulary] block.
        entropy_grad: whether the entropy carries gradient.
        gpt: arguments of `GPTModel` that depend on the family.
    """
    ranks, rank = partition.tp_size, parallel_state.get_tensor_model_parallel_rank()
    part = None
    if ranks > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        part = VocabularyShard(rank * partition.padded_vocab // ranks, group)
    options = HeadOptions(LogitTransform(cap=partition.architecture.logit_cap), max_logits, entropy_grad, part)
    parts = []
    for index in range(interleaved):
        stage = index * parallel_state.get_pipeline_model_parallel_world_size()
        stage += parallel_state.get_pipeline_model_parallel_rank()
        parts.append(
            PackedGPT(
                config,
                partition,
                stage,
                options,
                pre_process=partition.is_first(stage),
                post_process=partition.is_last(stage),
                vp_stage=index if interleaved > 1 else None,
                **gpt,
            )
        )
    return parts
