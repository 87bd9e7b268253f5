"""From a model directory to the model that this rank trains: read once, checked, wrapped, split and filled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError
from rl_contracts.models.cpu_matmul import use_faster_matmul
from rl_contracts.models.token_logprobs import LOGITS_AT_ONCE
from rl_engines_fsdp.config import FSDPEngineConfig
from rl_engines_fsdp.model import loading, lora
from rl_engines_fsdp.model.checks import verify, verify_split
from rl_engines_fsdp.model.packed import PackedCausalLM, PackedModel, PackedScalarModel
from rl_engines_fsdp.ranks import sharding
from rl_engines_fsdp.ranks.layout import make_meshes
from rl_engines_fsdp.ranks.tensor_parallel import TensorGradients, split_matrices


class ModelMaker:
    """Makes the models of one rank; every method is collective.

    Args:
        sharded: whether the model is put under `fully_shard`.
    """

    tensor_gradients: TensorGradients | None = None
    """Sums gradients of the model that `make` made over tensor ranks; None where it is whole."""

    def __init__(
        self,
        config: FSDPEngineConfig,
        spec: FinetuneSpec,
        layout: ParallelStrategy,
        device: torch.device,
        parallel: ParallelContext,
        sharded: bool,
    ) -> None:
        self.config, self.spec, self.layout = config, spec, layout
        self.device, self.parallel, self.sharded = device, parallel, sharded

    def make(self, hf_config: Any) -> PackedModel:
        """The model that the spec names, ready to train.

        Args:
            hf_config: transformers' configuration of it.

        Raises:
            ModelError: it cannot be read, or not be trained here.
        """
        source = self.read(self.spec.model_path)
        model = self._split(source, hf_config) if self.sharded else self._whole(source)
        inner: Any = model.model
        if source is not None:  # what the directory says, for those who save it again, and how it names its tensors
            inner.generation_config = getattr(source.model, "generation_config", None)
            inner._weight_conversions = getattr(source.model, "_weight_conversions", None)
        return model

    def read(self, path: str, like: PackedModel | None = None) -> PackedModel | None:
        """The whole model on rank 0, checked, and of the same parameters as `like`; None elsewhere.

        Raises:
            ModelError: on every rank, what is wrong with it.
        """
        source: PackedModel | None = None
        with self.parallel.agree_on_errors(f"loading {path}"):
            if self.parallel.is_main:
                source = self._wrap(loading.read_model(path, self.spec.head, new_head=like is None))
                if like is not None:
                    loading.check_same_weights(path, source.kept_tensors(), like.kept_tensors())
                elif self.config.verify_model:
                    verify(source)
        return source

    def _wrap(self, model: torch.nn.Module) -> PackedModel:
        config, spec = self.config, self.spec
        model.eval()  # for good: dropout, jitter or sampled experts make another policy learn than answered
        if config.lora is not None:
            lora.adapt(model, config.lora, spec.head)
        if not spec.deterministic:  # a server that makes the same bits multiplies with torch's choice
            use_faster_matmul(model)
        if spec.head != "lm":
            return PackedScalarModel(model, spec.head)
        suits = 1 << 19 if self.device.type == "cpu" else 1 << 26
        max_logits = LOGITS_AT_ONCE if spec.deterministic else config.max_logits or suits
        return PackedCausalLM(model, max_logits, spec.entropy_grad)

    def _whole(self, source: PackedModel | None) -> PackedModel:
        assert source is not None
        self._prepare_layers(source)
        return source.to(self.device)

    def _split(self, source: PackedModel | None, hf_config: Any) -> PackedModel:
        config = self.config
        meshes = make_meshes(self.device.type, self.layout)
        model = self._wrap(loading.empty_model(copy.deepcopy(hf_config), self.spec.head))
        partial = [] if meshes.tensor is None else split_matrices(model.model, meshes.tensor)
        model.split = meshes.split
        self._prepare_layers(model)
        sharding.shard(model, meshes, self.spec.dtype, config.reshard_after_forward, config.offload)
        with self.parallel.agree_on_errors("matching the model with its weights"):
            if source is not None:
                found, expected = (sharding.parameters_and_buffers(each) for each in (source, model))
                loading.check_same_weights(self.spec.model_path, found, expected)
        sharding.fill(model, source, self.device, self.parallel, config.offload)
        if self.layout.model_size > 1 and config.verify_model:
            verify_split(model, source, self.device, self.spec.dtype, self.parallel)
        if meshes.tensor is not None:
            self.tensor_gradients = TensorGradients(model, meshes.tensor, meshes.layers, partial)
        return model

    def _prepare_layers(self, model: PackedModel) -> None:
        """Compile each layer's forward, and keep no more than its inputs for backward, where that is asked for: in
        place, before the model is sharded.

        Compiled layers of one kind share their code. Attention stays as it is (`packed_attention` is left out of
        graphs): it loops over sequences whose lengths differ in every micro-batch. Sharding's hooks run outside.
        """
        if self.config.compile and model.balance is not None:
            raise ConfigError(
                "compile=true: what routers say cannot be read inside compiled layers, and config.json asks for their "
                "auxiliary loss (output_router_logits). Set one of the two to false."
            )
        for layer in sharding.decoder_layers(model):
            if self.config.compile:
                layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]
            if self.config.gradient_checkpointing:
                layer.forward = functools.partial(_computed_again, layer.forward)  # type: ignore[method-assign]


def _computed_again(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """A layer's forward whose inner results are made anew in backward; transformers' own way needs training mode."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **keywords)
