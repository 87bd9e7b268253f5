"""Settings of the Megatron engine, and what goes together with layout and run. Does not import torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import bounded, choice
from rl_contracts.data import DTYPES, FinetuneSpec
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.errors import ConfigError
from rl_engines_megatron.model.mixture import check_experts

OPTIMIZERS = ("adamw", "sgd")
"""Names of optimizers that megatron-core has."""


@dataclass
class MegatronEngineConfig(TrainEngineConfig):
    """A model in training on megatron-core."""

    sequence_parallel: bool = False
    """Split what lies between the matrices (norms, residuals) over tensor ranks by tokens; less memory. Needs t above
    1."""
    interleaved: int = bounded(1, "at least 1", lambda parts: parts >= 1)
    """Parts of the model on each pipeline rank, with which the stages wait less for each other. More than 1 needs p
    above 1."""
    stage_layers: list[int] = field(default_factory=list)
    """Layers of each stage in the order of the model, p times `interleaved` numbers (the parts of a rank are not
    neighbours); empty: equally many."""
    distributed_optimizer: bool = True
    """Split the state of `adamw` over data and context ranks. Saved states go with one value of this."""
    offload_moments: bool = False
    """Keep what the optimizer remembers of each parameter in host memory, but while a step is taken: on a GPU, 8 bytes
    less per parameter of a rank, for the time that it takes to move them there and back."""
    recompute: str = choice("", ("", "selective", "full"))
    """What is computed again in backward rather than kept: nothing, `selective` (the inside of attention), or `full`
    (all of a layer but its input)."""
    transformer_engine: bool = True
    """Let TransformerEngine multiply by the matrices of the layers, where it is installed, on a GPU and in 16 bits (in
    float32 it computes in TF32). false: torch does."""
    serve_dtype: str = choice("", ("", *DTYPES))
    """Type in which weights are published and saved: `float32`, `bfloat16`; empty: the one in which the model
    computes."""
    max_logits: int = bounded(0, "0 (what suits the device) or more entries", lambda entries: entries >= 0)
    """Entries of a [tokens, vocabulary] float32 block that exist at once; what is over is done in blocks of tokens (and
    of vocabulary, where it is large) and computed again in backward. 0: 2^19 on a CPU, 2^26 on a GPU."""
    max_shard_gb: float = bounded(5.0, "more than 0", lambda size: size > 0)
    """Largest file of a saved Hugging Face directory, in 10^9 bytes."""
    timeout_seconds: float = bounded(600.0, "more than 0", lambda seconds: seconds > 0)
    """Deadline of every collective."""

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Refuse what this engine does not do; see `TrainEngineConfig.check`.

        Raises:
            ConfigError: megatron-core is not installed, or the settings do not go with the layout or the run.
        """
        where = f"allocation megatron:{strategy}"
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(f"{where}: expected megatron-core, found none. Install rl-engines-megatron[megatron].")
        check_experts(spec.model_path, strategy, self.sequence_parallel)
        for setting, wrong, reason in (
            (
                "sequence_parallel=true",
                self.sequence_parallel and strategy.tensor == 1,
                f"{where}, which has no t > 1; set one, or leave sequence_parallel out",
            ),
            (
                f"interleaved={self.interleaved}",
                self.interleaved > 1 and strategy.pipeline == 1,
                f"{where}, which has no p > 1; set one, or interleaved=1",
            ),
            ("deterministic=true", spec.deterministic, "the megatron engine; use fsdp, or leave deterministic out"),
            ("offload_moments=true", self.offload_moments and spec.device == "cpu", "device=cpu; leave it out"),
            ("dtype=bfloat16", spec.dtype != "float32" and spec.device == "cpu", "device=cpu; set dtype=float32"),
        ):
            if wrong:
                raise ConfigError(f"{setting} does not go with {reason}.")
        if spec.optimizer is not None and spec.optimizer.name not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer.name={spec.optimizer.name} does not go with {where}: the megatron engine has "
                f"{' and '.join(OPTIMIZERS)}. Choose one of them, or the engine fsdp."
            )
        from rl_engines_megatron.model.checks import check_model

        check_model(spec, strategy, self.interleaved, self.stage_layers)
