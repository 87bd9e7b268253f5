"""Create the model of a rank from a directory: read once, check, wrap, split, and distribute the weights."""

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
from rl_contracts.images.features import ImageProcessor, has_vision
from rl_contracts.models.cpu_matmul import use_faster_matmul
from rl_contracts.models.token_logprobs import LOGITS_AT_ONCE
from rl_engines_fsdp.config import FSDPEngineConfig
from rl_engines_fsdp.model import loading, lora
from rl_engines_fsdp.model.checks import verify, verify_images, verify_split
from rl_engines_fsdp.model.packed import PackedCausalLM, PackedModel, PackedScalarModel
from rl_engines_fsdp.model.vision import VisionInputs, freeze
from rl_engines_fsdp.ranks import sharding
from rl_engines_fsdp.ranks.layout import make_meshes
from rl_engines_fsdp.ranks.tensor_parallel import TensorGradients, split_matrices


class ModelMaker:
    """Create the models of one rank; every method is collective.

    Args:
        config: settings of the engine.
        spec: settings of the run.
        layout: parallel layout.
        device: device of this rank.
        parallel: ranks and process groups.
        sharded: whether to apply `fully_shard` to the model.
    """

    tensor_gradients: TensorGradients | None = None
    """Object that sums gradients of the created model over tensor ranks, or None without tensor parallelism."""

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
        """Create the model that the spec names, ready for training.

        Args:
            hf_config: transformers configuration of the model.

        Raises:
            ModelError: the model cannot be read, or this engine cannot train it.
        """
        source = self.read(self.spec.model_path)
        bidirectional = self.parallel.broadcast_json(
            source is not None and source.vision is not None and source.vision.bidirectional
        )
        model = self._split(source, hf_config) if self.sharded else self._whole(source)
        inner: Any = model.model
        if model.vision is not None:
            model.vision.bidirectional = bidirectional
        if source is not None:  # generation settings and tensor names of the directory, to save the model again
            inner.generation_config = getattr(source.model, "generation_config", None)
            inner._weight_conversions = getattr(source.model, "_weight_conversions", None)
        return model

    def read(self, path: str, like: PackedModel | None = None) -> PackedModel | None:
        """Read and check the whole model on rank 0; return None on the other ranks.

        Args:
            path: model directory.
            like: model whose parameter names and shapes must match, if any.

        Raises:
            ModelError: the model cannot be read or fails a check; raised on every rank.
        """
        source: PackedModel | None = None
        with self.parallel.agree_on_errors(f"loading {path}"):
            if self.parallel.is_main:
                source = self._wrap(loading.read_model(path, self.spec.head, new_head=like is None))
                if like is not None:
                    loading.check_same_weights(path, source.kept_tensors(), like.kept_tensors())
                elif self.config.verify_model:
                    verify(source)
                    if source.vision is not None:
                        verify_images(source, source.vision)
        return source

    def _wrap(self, model: torch.nn.Module) -> PackedModel:
        config, spec = self.config, self.spec
        # permanent: with dropout, jitter or sampled experts, the trained policy would differ from the sampled one
        model.eval()
        if config.lora is not None:
            lora.adapt(model, config.lora, spec.head)
        if (
            not spec.deterministic
        ):  # deterministic runs use torch's default kernels, as the server does, for bitwise equality
            use_faster_matmul(model)
        if spec.head != "lm":
            return PackedScalarModel(model, spec.head)
        default = 1 << 19 if self.device.type == "cpu" else 1 << 26
        max_logits = LOGITS_AT_ONCE if spec.deterministic else config.max_logits or default
        wrapped = PackedCausalLM(model, max_logits, spec.entropy_grad)
        if has_vision(model.config):
            if wrapped.balance is not None:
                raise ConfigError(
                    "output_router_logits=true in config.json: the router auxiliary loss is not supported for a "
                    "vision-language model; set it to false."
                )
            wrapped.vision = VisionInputs(model, ImageProcessor(spec.model_path))
            freeze(model, spec.freeze)
        return wrapped

    def _whole(self, source: PackedModel | None) -> PackedModel:
        assert source is not None
        self._prepare_layers(source)
        return source.to(self.device)

    def _split(self, source: PackedModel | None, hf_config: Any) -> PackedModel:
        config = self.config
        meshes = make_meshes(self.device.type, self.layout)
        model = self._wrap(loading.empty_model(copy.deepcopy(hf_config), self.spec.head))
        partial_names = [] if meshes.tensor is None else split_matrices(model.model, meshes.tensor)
        model.split = meshes.split
        self._prepare_layers(model)
        sharding.shard(model, meshes, self.spec.dtype, config.reshard_after_forward, config.offload)
        with self.parallel.agree_on_errors("comparing the model with its weights"):
            if source is not None:
                loaded, expected = (sharding.parameters_and_buffers(module) for module in (source, model))
                loading.check_same_weights(self.spec.model_path, loaded, expected)
        sharding.fill(model, source, self.device, self.parallel, config.offload)
        if self.layout.model_size > 1 and config.verify_model:
            verify_split(model, source, self.device, self.spec.dtype, self.parallel)
        if meshes.tensor is not None:
            self.tensor_gradients = TensorGradients(model, meshes.tensor, meshes.layers, partial_names)
        return model

    def _prepare_layers(self, model: PackedModel) -> None:
        """Compile each layer and enable gradient checkpointing, if configured, in place and before sharding.

        Compiled layers of one class share their code. `packed_attention` is excluded from graphs, because it loops over
        sequences whose lengths differ in every micro-batch. The hooks of `fully_shard` run outside of compiled code.
        """
        if self.config.compile and model.balance is not None:
            raise ConfigError(
                "compile=true does not work with output_router_logits=true in config.json: the router auxiliary loss "
                "requires router logits, which compiled layers do not expose. Set one of the two to false."
            )
        for layer in sharding.decoder_layers(model):
            if self.config.compile:
                layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]
            if self.config.gradient_checkpointing:
                layer.forward = functools.partial(_checkpointed_forward, layer.forward)  # type: ignore[method-assign]


def _checkpointed_forward(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Run the forward of a layer with gradient checkpointing, also in eval mode, unlike transformers' version."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **keywords)
