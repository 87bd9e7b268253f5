"""Settings of the FSDP engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import MicroBatchConfig, OptimizerConfig, require, require_choice
from rl_contracts.errors import ConfigError
from rl_engines_fsdp.lora_config import LoRAConfig

DTYPES = ("float32", "bfloat16")
HEADS = ("lm", "value", "score")


@dataclass
class FSDPEngineConfig:
    """A model in training on PyTorch FSDP2."""

    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """AdamW and its schedule; None for a model that is never trained (a reference policy)."""
    micro_batch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    """How much is run at once."""
    head: str = "lm"
    """What the model says of each token: `lm` log-probs and entropies of its vocabulary; `value` a critic's estimate,
    made before the token is seen; `score` a reward model's, made after it. The last two load a causal language model,
    whose head they replace by a new one that is zero, or a saved model of their own."""
    lora: LoRAConfig | None = None
    """Train adapters of low rank instead of all weights; needs the extra `rl-engines-fsdp[lora]`. None: all weights."""
    dtype: str = "float32"
    """Type in which the model computes: `float32`, or `bfloat16` with float32 master weights and reductions."""
    serve_dtype: str = ""
    """Type in which weights are published and saved: `float32`, `bfloat16`; empty: the same as `dtype`."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where there is one."""
    entropy_grad: bool = False
    """Let the entropy carry gradient, for a loss that has an entropy bonus; costs memory and time in backward."""
    max_logits: int = 0
    """Entries of a [tokens, vocabulary] float32 block that exist at once; what is over is done in blocks of tokens (and
    of vocabulary, where it is large) and computed again in backward. 0: what suits the device: 2^19 (2 MiB, which a
    core's cache holds) on a CPU, 2^26 on a GPU."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in backward."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward and gather them again in backward."""
    compile: bool = False
    """Compile the decoder's layers with `torch.compile`: the first steps take minutes, later ones less memory traffic.
    Not together with `deterministic`."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and gather a layer's parameters on the GPU when it
    is computed; the optimizer step runs on the CPU. Needs CUDA."""
    max_shard_gb: float = 5.0
    """Largest file of a saved Hugging Face directory, in 10^9 bytes."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of after the last: less memory, more traffic."""
    verify_model: bool = True
    """Before sharding, compare the packed forward with the plain one of transformers on a few tokens, so that a model
    whose layers mix packed sequences, or whose logits are made in an unknown way, is refused."""
    deterministic: bool = False
    """The same rows give the same bits, and the log-probs of an embedded server that is deterministic too: each row is
    a micro-batch of its own, with one block of logits, on one thread, with algorithms of a fixed order. Slow. Promised
    for one process on the CPU in float32."""
    timeout_seconds: float = 600.0
    """Deadline of every collective."""

    def __post_init__(self) -> None:
        require_choice("head", self.head, HEADS)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("serve_dtype", self.serve_dtype, ("", *DTYPES))
        require_choice("device", self.device, ("auto", "cpu", "cuda"))
        require(self.max_logits >= 0, "max_logits", "0 (what suits the device) or more entries", self.max_logits)
        require(self.max_shard_gb > 0, "max_shard_gb", "more than 0", self.max_shard_gb)
        require(not (self.compile and self.deterministic), "compile", "false with deterministic", self.compile)
        require(self.timeout_seconds > 0, "timeout_seconds", "more than 0", self.timeout_seconds)

    @property
    def served_dtype(self) -> str:
        """Name of the torch dtype in which weights leave the engine."""
        return self.serve_dtype or self.dtype


def check_strategy(strategy: ParallelStrategy, config: FSDPEngineConfig) -> None:
    """Refuse what this engine does not do.

    Raises:
        ConfigError: a dimension other than data, context or tensor (`d`, `c`, `t`) is larger than 1, or the settings
            do not go with the layout.
    """
    if strategy.pipeline != 1 or strategy.expert != 1 or strategy.expert_tensor not in (None, 1):
        raise ConfigError(
            f"allocation fsdp:{strategy}: the FSDP engine splits a model over data, context and tensor ranks (d, c, t) "
            f"only; pipeline and expert dimensions must be 1. Use for example fsdp:d{strategy.world_size}, or the "
            "megatron engine."
        )
    if strategy.tensor > 1 and (config.lora is not None or config.compile):
        setting = "compile" if config.lora is None else "lora"
        raise ConfigError(
            f"{setting} and allocation fsdp:{strategy}: {setting} does not work with tensor parallelism. Unset "
            f"{setting}, or use data and context parallelism (d and c) without t."
        )
