"""Settings of the FSDP engine, and checks that they fit the parallel layout and the run. Does not import torch."""

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
    """Settings of low-rank adapters."""

    setting: ClassVar[str] = "lora"
    rank: int = bounded(16, "at least 1", lambda rank: rank >= 1)
    """Rank of the adapters."""
    alpha: float = bounded(32.0, "more than 0", lambda alpha: alpha > 0)
    """Scale of the adapters: the product B A is multiplied by alpha / rank."""
    target_modules: list[str] = field(default_factory=list)
    """Name suffixes of the layers to adapt, for example `q_proj`. Empty: all linear layers of the decoder."""


@dataclass
class FSDPEngineConfig(TrainEngineConfig):
    """Settings of the FSDP engine."""

    lora: LoRAConfig | None = None
    """Low-rank adapters to train instead of all weights, or None to train all weights. Adapters need a higher learning
    rate; embeddings and `lm_head` stay frozen. Requires the extra `rl-engines-fsdp[lora]`."""
    serve_dtype: str = choice("", ("", *DTYPES))
    """Dtype of published and saved weights: `float32` or `bfloat16`. Empty: the dtype in which the model computes."""
    max_logits: int = bounded(0, "0 (device default) or more entries", lambda entries: entries >= 0)
    """Maximum entries of a [tokens, vocabulary] float32 block of logits. Larger logits are computed in blocks of tokens
    (and of the vocabulary, if it is large) and recomputed in backward. 0 selects 2^19 on a CPU (2 MiB, which fits in
    the cache of a core) and 2^26 on a GPU."""
    gradient_checkpointing: bool = False
    """Store only the input of each layer and recompute the rest in backward."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after its forward and gather them again in backward."""
    compile: bool = False
    """Compile the decoder layers with `torch.compile`. The first steps take minutes; later steps need less memory
    traffic. Not allowed with `deterministic=true`."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory. Parameters of a layer are gathered on the GPU when
    the layer runs, and the optimizer step runs on the CPU. Requires CUDA."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of after the last one: less memory, more communication."""
    verify_model: bool = True
    """Compare the packed forward with the plain forward of transformers on a few tokens, before sharding. This rejects
    models whose layers mix packed sequences or whose logits are computed in an unknown way."""
    timeout_seconds: float = bounded(600.0, "more than 0", lambda seconds: seconds > 0)
    """Timeout of each collective in seconds."""

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Reject settings that this engine does not support; see `TrainEngineConfig.check`.

        The model is checked only if its directory exists.

        Raises:
            ConfigError: a dimension other than data, context or tensor (`d`, `c`, `t`) is larger than 1; settings
                conflict with the layout, the run, the model or each other; or the attention heads are not divisible
                by t * c.
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
        for name, is_conflict, reason in (
            ("compile", spec.deterministic, "deterministic=true (compiled code sums in a different order)"),
            ("max_logits", spec.deterministic, "deterministic=true (which requires the servers' block size)"),
            ("offload", spec.device == "cpu", "device=cpu (all tensors are in host memory already)"),
        ):
            if is_conflict and getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)} does not work with {reason}. Unset one of the two.")
        if spec.optimizer is not None:
            self._check_optimizer(spec.optimizer, spec)
        model = _read_json(spec.model_path)
        if model:
            self._check_vision("vision_config" in model, spec)
        check_heads(model.get("text_config") or model, strategy)

    def memory(
        self, strategy: ParallelStrategy, spec: FinetuneSpec, sizes: ModelSizes, micro_batches: int
    ) -> dict[str, float]:
        """See `TrainEngineConfig.memory`.

        Parameters, gradients and optimizer state are exact, for the rank that stores most. Gathered parameters,
        activations and logits are estimates.
        """
        sharded = strategy.world_size > 1 or spec.dtype != "float32" or self.offload
        compute, own = DTYPE_BYTES[spec.dtype], own_parameters(strategy, sizes)
        lora, trained = self.lora, own_parameters(strategy, sizes, trained=True)
        if lora is not None:
            trained = adapter_parameters(lora.rank, lora.target_modules, strategy, sizes)
        optimizer = 0.0 if spec.optimizer is None else OPTIMIZER_BYTES.get(spec.optimizer.name, 8.0) * trained
        states = {"parameters": 4.0 * own, "gradients": 4.0 * trained, "optimizer": optimizer}
        bytes_by_use = dict.fromkeys(states, 0.0) if self.offload else states
        if sharded:
            layers = 2 if self.reshard_after_forward else sizes.layers
            bytes_by_use["gathered parameters"] = compute * (
                sizes.outside + layers * sizes.largest_layer / strategy.tensor
            )
        if sharded and micro_batches > 1 and not self.sync_every_micro_batch:
            bytes_by_use["gradients before their reduction"] = 4.0 * trained / own * sizes.parameters / strategy.tensor
        tokens = spec.micro_batch.max_tokens / strategy.context
        activations = tokens * activation_bytes(sizes, compute, self.gradient_checkpointing)
        bytes_by_use["activations"] = activations / strategy.tensor
        entries = min(self.max_logits or LOGITS_ON_GPU, tokens * sizes.vocabulary)
        bytes_by_use["logits"] = 3 * 4.0 * entries  # logits, their softmax, and its gradient
        return bytes_by_use

    def check_memory(
        self, strategy: ParallelStrategy, spec: FinetuneSpec, sizes: ModelSizes, micro_batches: int, available: float
    ) -> None:
        """Reject a step whose parameters, gradients and optimizer state exceed the device memory.

        If they fit, log a warning if their sum with the estimated uses exceeds the device memory. Activations, logits,
        gathered parameters and the state of an unknown optimizer are estimates.

        Args:
            strategy, spec, sizes, micro_batches: see `memory`.
            available: device memory in bytes.

        Raises:
            ConfigError: the step does not fit. The message states required and available memory, and the setting to
                change.
        """

        estimated = {"activations", "logits", "gathered parameters"}
        if spec.optimizer is not None and spec.optimizer.name not in OPTIMIZER_BYTES:
            estimated.add("optimizer")

        def required_bytes(**changes: Any) -> tuple[float, float]:
            bytes_by_use = replace(self, **changes).memory(strategy, spec, sizes, micro_batches)
            # each unreduced gradient is freed when the reduced one exists, so count only the larger of the two
            bytes_by_use["gradients"] = max(
                bytes_by_use["gradients"] - bytes_by_use.get("gradients before their reduction", 0.0), 0.0
            )
            total = sum(bytes_by_use.values())
            return total - sum(bytes_by_use.get(name, 0.0) for name in estimated), total

        certain, total = required_bytes()
        if total <= available:
            return
        sufficient = [name for name in SAVE_MEMORY if required_bytes(**{name: True})[1] <= available]
        remedy = f"set {sufficient[0]}=true" if sufficient else "lower micro_batch.max_tokens, or use more ranks"
        message = (
            f"training needs about {total / GIB:.1f} GiB of GPU memory for {micro_batches} micro-batches of at most "
            f"{spec.micro_batch.max_tokens} tokens, but the GPU has {available / GIB:.1f} GiB; {remedy}."
        )
        if certain > available:
            raise ConfigError(message)
        logger.warning("%s", message)

    def _check_vision(self, has_vision: bool, spec: FinetuneSpec) -> None:
        """Check that the settings fit a vision-language model, or a model of texts."""
        if spec.freeze and not has_vision:
            raise ConfigError(
                f"freeze={[*spec.freeze]}: expected a vision-language model, but {spec.model_path} reads only text; "
                "remove freeze."
            )
        unsupported = "lora" if self.lora is not None else f"head={spec.head}" if spec.head != "lm" else ""
        if unsupported and has_vision:
            raise ConfigError(
                f"{unsupported}: expected a model of texts, but {spec.model_path} is a vision-language model, of which "
                "only all weights with head=lm can be trained."
            )

    def _check_optimizer(self, optimizer: OptimizerConfig, spec: FinetuneSpec) -> None:
        """Check that the optimizer is installed and works with the other settings."""
        name = optimizer.name
        if ":" not in name and name not in registry.available(optimizer.group):
            raise ConfigError(registry.unknown_name_error(name, optimizer.group))
        for affected, is_conflict, reason in (
            ("muon", self.offload, "offload=true (muon gathers whole matrices on the GPU)"),
            ("adamw8bit", self.offload, "offload=true (adamw8bit kernels run on the GPU)"),
            ("adamw8bit", spec.deterministic, "deterministic=true (compiled code sums in a different order)"),
        ):
            if name == affected and is_conflict:
                raise ConfigError(f"optimizer.name={name} does not work with {reason}. Change one of the two.")
        if name == "adamw8bit" and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                "optimizer.name=adamw8bit requires torchao, which is not installed. Install "
                "rl-engines-fsdp[adamw8bit], or use adamw."
            )


def check_heads(sizes: dict[str, object], strategy: ParallelStrategy) -> None:
    """Check that the attention heads of a model are divisible by the tensor and context ranks.

    Args:
        sizes: model sizes by their names in `config.json`; missing sizes are not checked.

    Raises:
        ConfigError: the attention heads are not divisible by t * c, or the key/value heads not by t.
    """
    heads = sizes.get("num_attention_heads")
    key_heads = sizes.get("num_key_value_heads") or heads
    ranks = strategy.tensor * strategy.context
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(
            f"allocation fsdp:{strategy}: the {heads} attention heads of the model must be divisible by "
            f"t * c = {ranks}. Choose t and c whose product divides {heads}."
        )
    if isinstance(key_heads, int) and key_heads % strategy.tensor:
        raise ConfigError(
            f"allocation fsdp:{strategy}: the {key_heads} key/value heads of the model must be divisible by "
            f"t = {strategy.tensor}. Use a smaller t; context parallelism (c) has no such limit."
        )


def _read_json(model_path: str) -> dict[str, Any]:
    """Return the `config.json` of a model directory, or an empty dict if it is unreadable."""
    try:
        return dict(json.loads((Path(model_path) / "config.json").read_text()))
    except (
        OSError,
        ValueError,
    ):  # the file may not exist yet; the engine reports a broken file when it loads the model
        return {}
