"""Settings of the FSDP engine, and what of them, of the layout and of the run goes together. Does not import torch."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts import registry
from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import OptimizerConfig, Settings, bounded, choice
from rl_contracts.data import DTYPES, FinetuneSpec
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.errors import ConfigError
from rl_contracts.models.sizes import ModelSizes
from rl_contracts.runtime.logging import get_logger
from rl_engines_fsdp.memory import (
    DTYPE_BYTES,
    GIB,
    LOGITS_ON_GPU,
    OPTIMIZER_BYTES,
    SAVE_MEMORY,
    activation_bytes,
    adapter_parameters,
    own_parameters,
)

logger = get_logger("engine.fsdp")


@dataclass
class LoRAConfig(Settings):
    """Low-rank adapters instead of all weights."""

    setting: ClassVar[str] = "lora"
    rank: int = bounded(16, "at least 1", lambda rank: rank >= 1)
    """Rank of an adapter."""
    alpha: float = bounded(32.0, "more than 0", lambda alpha: alpha > 0)
    """An adapter's product is multiplied by alpha / rank."""
    target_modules: list[str] = field(default_factory=list)
    """Layers that are adapted, by the ends of their names (`q_proj`); empty: all linear layers of the decoder."""


@dataclass
class FSDPEngineConfig(TrainEngineConfig):
    """A model in training on PyTorch FSDP2."""

    lora: LoRAConfig | None = None
    """Train adapters of low rank instead of all weights; they want a higher learning rate, and embeddings and head stay
    as they are. Needs the extra `rl-engines-fsdp[lora]`. None: all weights."""
    serve_dtype: str = choice("", ("", *DTYPES))
    """Type in which weights are published and saved: `float32`, `bfloat16`; empty: the one in which the model
    computes."""
    max_logits: int = bounded(0, "0 (what suits the device) or more entries", lambda entries: entries >= 0)
    """Entries of a [tokens, vocabulary] float32 block that exist at once; what is over is done in blocks of tokens (and
    of vocabulary, where it is large) and computed again in backward. 0: what suits the device: 2^19 (2 MiB, which a
    core's cache holds) on a CPU, 2^26 on a GPU."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in backward."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward and gather them again in backward."""
    compile: bool = False
    """Compile the decoder's layers with `torch.compile`: the first steps take minutes, later ones less memory traffic.
    Not in a deterministic run."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and gather a layer's parameters on the GPU when it
    is computed; the optimizer step runs on the CPU. Needs CUDA."""
    max_shard_gb: float = bounded(5.0, "more than 0", lambda size: size > 0)
    """Largest file of a saved Hugging Face directory, in 10^9 bytes."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of after the last: less memory, more traffic."""
    verify_model: bool = True
    """Before sharding, compare the packed forward with the plain one of transformers on a few tokens, so that a model
    whose layers mix packed sequences, or whose logits are made in an unknown way, is refused."""
    timeout_seconds: float = bounded(600.0, "more than 0", lambda seconds: seconds > 0)
    """Deadline of every collective."""

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Refuse what this engine does not do; see `TrainEngineConfig.check`.

        Raises:
            ConfigError: a dimension other than data, context or tensor (`d`, `c`, `t`) is larger than 1, the settings
                do not go with the layout, with the run or with each other, or the attention heads of the model, where
                its directory is there, do not divide.
        """
        if strategy.pipeline != 1 or strategy.expert != 1 or strategy.expert_tensor not in (None, 1):
            raise ConfigError(
                f"allocation fsdp:{strategy}: the FSDP engine splits a model over data, context and tensor ranks "
                "(d, c, t) only; pipeline and expert dimensions must be 1. Use for example "
                f"fsdp:d{strategy.world_size}."
            )
        for name in ("lora", "compile"):
            if strategy.tensor > 1 and getattr(self, name):
                raise ConfigError(
                    f"{name} and allocation fsdp:{strategy}: {name} does not work with tensor parallelism. Unset "
                    f"{name}, or use data and context parallelism (d and c) without t."
                )
        for name, other, reason in (
            ("compile", spec.deterministic, "deterministic=true (compiled code sums in an order of its own)"),
            ("max_logits", spec.deterministic, "deterministic=true (whose blocks are those of the servers)"),
            ("offload", spec.device == "cpu", "device=cpu (there everything lies in host memory)"),
        ):
            if other and getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)} does not go with {reason}. Unset one of the two.")
        if spec.optimizer is not None:
            self._check_optimizer(spec.optimizer, spec)
        check_heads(_read_json(spec.model_path), strategy)

    def memory(
        self, strategy: ParallelStrategy, spec: FinetuneSpec, sizes: ModelSizes, micro_batches: int
    ) -> dict[str, float]:
        """See `TrainEngineConfig.memory`. Parameters, gradients and optimizer are exact, of the rank that has most;
        gathered parameters, activations and logits are estimates."""
        sharded = strategy.world_size > 1 or spec.dtype != "float32" or self.offload
        compute, own = DTYPE_BYTES[spec.dtype], own_parameters(strategy, sizes)
        lora, trained = self.lora, own
        if lora is not None:
            trained = adapter_parameters(lora.rank, lora.target_modules, strategy, sizes)
        optimizer = 0.0 if spec.optimizer is None else OPTIMIZER_BYTES.get(spec.optimizer.name, 8.0) * trained
        states = {"parameters": 4.0 * own, "gradients": 4.0 * trained, "optimizer": optimizer}
        parts = dict.fromkeys(states, 0.0) if self.offload else states
        if sharded:
            layers = 2 if self.reshard_after_forward else sizes.layers
            parts["gathered parameters"] = compute * (sizes.outside + layers * sizes.largest_layer / strategy.tensor)
        if sharded and micro_batches > 1 and not self.sync_every_micro_batch:
            parts["gradients before their reduction"] = 4.0 * trained / own * sizes.parameters / strategy.tensor
        tokens = spec.micro_batch.max_tokens / strategy.context
        activations = tokens * activation_bytes(sizes, compute, self.gradient_checkpointing)
        parts["activations"] = activations / strategy.tensor
        entries = min(self.max_logits or LOGITS_ON_GPU, tokens * sizes.vocabulary)
        parts["logits"] = 3 * 4.0 * entries  # themselves, their softmax, and its gradient
        return parts

    def check_memory(
        self, strategy: ParallelStrategy, spec: FinetuneSpec, sizes: ModelSizes, micro_batches: int, available: float
    ) -> None:
        """Reject a step whose parameters, gradients and optimizer states are more than a device has, and warn of one
        that is too large with the estimates of activations and logits.

        Args:
            strategy, spec, sizes, micro_batches: see `memory`.
            available: bytes of the device.

        Raises:
            ConfigError: with both numbers, and the setting to change.
        """

        guesses = {"activations", "logits", "gathered parameters"}
        if spec.optimizer is not None and spec.optimizer.name not in OPTIMIZER_BYTES:
            guesses.add("optimizer")

        def needed(**changes: Any) -> tuple[float, float]:
            parts = replace(self, **changes).memory(strategy, spec, sizes, micro_batches)
            # a group's own gradients are made as those before their reduction are given up
            parts["gradients"] = max(parts["gradients"] - parts.get("gradients before their reduction", 0.0), 0.0)
            total = sum(parts.values())
            return total - sum(parts.get(name, 0.0) for name in guesses), total

        certain, total = needed()
        if total <= available:
            return
        fitting = [name for name in SAVE_MEMORY if needed(**{name: True})[1] <= available]
        remedy = f"set {fitting[0]}=true" if fitting else "lower micro_batch.max_tokens, or use more ranks"
        sentence = (
            f"a step of {micro_batches} times {spec.micro_batch.max_tokens} tokens needs about {total / GIB:.1f} GiB, "
            f"but the GPU has {available / GIB:.1f} GiB; {remedy}."
        )
        if certain > available:
            raise ConfigError(sentence)
        logger.warning("%s", sentence)

    def _check_optimizer(self, optimizer: OptimizerConfig, spec: FinetuneSpec) -> None:
        """See that an optimizer is there, and goes with the other settings."""
        name = optimizer.name
        if ":" not in name and name not in registry.available(optimizer.group):
            raise ConfigError(registry.unknown_name_error(name, optimizer.group))
        for other, with_setting, reason in (
            ("muon", self.offload, "offload=true (its matrices are made whole on the GPU)"),
            ("adamw8bit", self.offload, "offload=true (its kernels run on the GPU)"),
            ("adamw8bit", spec.deterministic, "deterministic=true (compiled code sums in an order of its own)"),
        ):
            if name == other and with_setting:
                raise ConfigError(f"optimizer.name={name} does not go with {reason}. Unset one of the two.")
        if name == "adamw8bit" and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                "optimizer.name=adamw8bit: expected torchao to be installed, found none. Install "
                "rl-engines-fsdp[adamw8bit], or use adamw."
            )


def check_heads(sizes: dict[str, object], strategy: ParallelStrategy) -> None:
    """See that the attention heads of a model divide over tensor and context ranks.

    Args:
        sizes: of the model by the names of its `config.json`; what is not there is not checked.

    Raises:
        ConfigError: they do not.
    """
    heads = sizes.get("num_attention_heads")
    key_heads = sizes.get("num_key_value_heads") or heads
    ranks = strategy.tensor * strategy.context
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(
            f"allocation fsdp:{strategy}: expected attention heads that divide by tensor * context = {ranks}, found "
            f"{heads}. Choose t and c so that they do."
        )
    if isinstance(key_heads, int) and key_heads % strategy.tensor:
        raise ConfigError(
            f"allocation fsdp:{strategy}: expected key/value heads that divide by the tensor size {strategy.tensor}, "
            f"found {key_heads}. Use a smaller t; context parallelism (c) has no such limit."
        )


def _read_json(model_path: str) -> dict[str, object]:
    """The part of a model directory's `config.json` that describes its language model; empty where there is none."""
    try:
        found = json.loads((Path(model_path) / "config.json").read_text())
        return dict(found.get("text_config") or found)
    except (OSError, ValueError):  # not made or fetched yet, or broken: the engine says so when it loads it
        return {}
