"""Settings of the Megatron engine, and checks that they fit the parallel layout and the run. Does not import torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import OptimizerConfig, bounded, choice
from rl_contracts.data import DTYPES, FinetuneSpec
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.errors import ConfigError
from rl_engines_megatron.model.moe import check_experts

OPTIMIZERS: dict[str, frozenset[str]] = {"adamw": frozenset(), "sgd": frozenset({"momentum"})}
"""Optimizers of this engine, each with its options."""


@dataclass
class MegatronEngineConfig(TrainEngineConfig):
    """Settings of the Megatron engine."""

    sequence_parallel: bool = False
    """Split the activations between the matrix multiplications (norms, residuals) over tensor ranks by tokens, to
    save memory. Requires tensor parallelism: `t` above 1."""
    interleaved: int = bounded(1, "at least 1", lambda chunks: chunks >= 1)
    """Model chunks on each pipeline rank. With more chunks the pipeline stages wait less for each other. More than 1
    requires pipeline parallelism: `p` above 1."""
    stage_layers: list[int] = field(default_factory=list)
    """Number of layers of each stage in model order. Each model chunk is a stage, so p * `interleaved` numbers
    are required. Empty: the same number for all stages."""
    offload_moments: bool = False
    """Keep the optimizer moments in host memory, except during the optimizer step. Saves 8 bytes of GPU memory per
    parameter of a rank; each step then copies the moments to the GPU and back. Requires CUDA."""
    recompute: str = choice("", ("", "selective", "full"))
    """Activations to recompute in backward instead of storing them: none (empty), those inside attention
    (`selective`), or all except the input of each layer (`full`)."""
    transformer_engine: bool = True
    """Use TransformerEngine for the linear layers, if it is installed, on a GPU and with a 16-bit dtype. (It would
    compute float32 in TF32.) If false, torch computes them."""
    serve_dtype: str = choice("", ("", *DTYPES))
    """Dtype of published and saved weights: `float32` or `bfloat16`. Empty: the dtype in which the model computes."""
    max_logits: int = bounded(0, "0 (device default) or more entries", lambda entries: entries >= 0)
    """Maximum entries of a [tokens, vocabulary] float32 block of logits. Larger logits are computed in blocks of
    tokens (and of the vocabulary, if it is large) and recomputed in backward. 0 selects 2^19 on a CPU and 2^26 on a
    GPU."""
    timeout_seconds: float = bounded(600.0, "more than 0", lambda seconds: seconds > 0)
    """Timeout of each collective in seconds."""

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Reject settings that this engine does not support; see `TrainEngineConfig.check`.

        Raises:
            ConfigError: megatron-core is not installed, or the settings conflict with the layout, the run or the model.
        """
        where = f"allocation megatron:{strategy}"
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                f"{where} requires megatron-core, which is not installed. Install rl-engines-megatron[megatron]."
            )
        check_experts(spec.model_path, strategy, self.sequence_parallel)
        for setting, is_conflict, reason in (
            (
                "sequence_parallel=true",
                self.sequence_parallel and strategy.tensor == 1,
                f"{where}, which has t=1; set t above 1, or sequence_parallel=false",
            ),
            (
                f"interleaved={self.interleaved}",
                self.interleaved > 1 and strategy.pipeline == 1,
                f"{where}, which has p=1; set p above 1, or interleaved=1",
            ),
            (
                "deterministic=true",
                spec.deterministic,
                "the megatron engine; use the fsdp engine, or unset deterministic",
            ),
            ("freeze", bool(spec.freeze), "the megatron engine; use the fsdp engine, or remove freeze"),
            (
                "offload_moments=true",
                self.offload_moments and spec.device == "cpu",
                "device=cpu; set offload_moments=false",
            ),
            ("dtype=bfloat16", spec.dtype != "float32" and spec.device == "cpu", "device=cpu; set dtype=float32"),
        ):
            if is_conflict:
                raise ConfigError(f"{setting} does not work with {reason}.")
        if spec.optimizer is not None:
            _check_optimizer(spec.optimizer, where)
        from rl_engines_megatron.model.checks import check_model

        check_model(spec, strategy, self.interleaved, self.stage_layers)


def _check_optimizer(optimizer: OptimizerConfig, where: str) -> None:
    if optimizer.name not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer.name={optimizer.name} does not work with {where}: the megatron engine supports "
            f"{' and '.join(OPTIMIZERS)}. Choose one of them, or use the fsdp engine."
        )
    if unknown := sorted(optimizer.options.keys() - OPTIMIZERS[optimizer.name]):
        raise ConfigError(
            f"optimizer.options {unknown} of {optimizer.name} do not work with {where}: the megatron engine supports "
            f"{sorted(OPTIMIZERS[optimizer.name]) or 'none'}. Remove them, or use the fsdp engine."
        )
