"""Split of a model over tensor, pipeline and expert ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.data import HEADS
from rl_contracts.errors import ConfigError
from rl_engines_megatron.model.architecture import Architecture
from rl_engines_megatron.model.moe import expert_tensor


@dataclass(frozen=True)
class Partition(Settings):
    """Split of a model over tensor-parallel ranks and pipeline stages, with the padding of its vocabulary.

    Raises:
        ConfigError: the model cannot be split this way; the message has the numbers.
    """

    architecture: Architecture
    """Architecture of the model."""
    tp_size: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Ranks over which each matrix is split."""
    pp_size: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Stages over which the layers are split. With interleaved stages and P pipeline ranks, rank p holds stages p, p
    + P, and so on."""
    vocab_multiple: int = bounded(1, "at least 1", lambda rows: rows >= 1)
    """Divisor of the number of vocabulary rows on each tensor-parallel rank."""
    head: str = choice("lm", HEADS)
    """Head of the model: the vocabulary (`lm`), or a scalar."""
    ep_size: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Ranks over which the experts of a layer are distributed."""
    etp_size: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Ranks over which each matrix of an expert is split."""
    stage_sizes: tuple[int, ...] = ()
    """Layers of each stage; empty: the same number for all stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        architecture, tp = self.architecture, self.tp_size
        if self.stage_sizes:
            fits = len(self.stage_sizes) == self.pp_size and sum(self.stage_sizes) == architecture.layers
            expected = (
                f"{self.pp_size} positive numbers (one per stage) with the sum num_hidden_layers={architecture.layers}"
            )
            require(fits and min(self.stage_sizes) > 0, "stage_layers", expected, list(self.stage_sizes))
        else:
            uneven = ", or set stage_layers to the number of layers of each stage"
            _require_divides("pipeline", self.pp_size, "num_hidden_layers", architecture.layers, uneven)
        _require_divides("tensor", tp, "num_attention_heads", architecture.heads)
        moe = architecture.moe
        if moe is None or len(moe.layers) < architecture.layers:
            _require_divides("tensor", tp, "intermediate_size", architecture.intermediate)
        if moe is not None:
            _require_divides("expert", self.ep_size, moe.names.count, moe.experts)
            _require_divides("expert tensor", self.etp_size, moe.names.width, moe.width)
        elif self.ep_size * self.etp_size > 1:
            raise ConfigError(
                f"megatron: {architecture.model_type} models have no experts, found expert={self.ep_size} and "
                f"expert_tensor={self.etp_size}; omit e and t of ffn."
            )
        groups = architecture.groups
        if groups % tp and tp % groups:
            raise ConfigError(
                f"megatron: tensor parallel size {tp} must divide the {groups} key-value heads or be a multiple "
                f"of them; choose a t that divides {groups}."
            )
        # if ranks share a key-value head, megatron-core splits the fused matrix by rows, not at heads
        rows = (architecture.heads + 2 * groups) * architecture.head_dim
        _require_divides("tensor", tp, "rows of the fused qkv projection", rows)

    def check_rank(self, tp_rank: int, pp_rank: int, ep_rank: int = 0, etp_rank: int = 0) -> None:
        """Raise a `ConfigError` unless all ranks exist."""
        for name, rank in (("tp", tp_rank), ("pp", pp_rank), ("ep", ep_rank), ("etp", etp_rank)):
            size = getattr(self, f"{name}_size")
            require(0 <= rank < size, f"{name}_rank", f"between 0 and {size - 1}", rank)

    def is_first(self, pp_rank: int) -> bool:
        """Return whether the stage holds the embedding (megatron-core: `pre_process`)."""
        return pp_rank == 0

    def is_last(self, pp_rank: int) -> bool:
        """Return whether the stage holds the final norm and the output layer (megatron-core: `post_process`)."""
        return pp_rank == self.pp_size - 1

    def stage_layers(self, pp_rank: int) -> range:
        """Return the layer numbers of a stage in the model, from 0.

        megatron-core numbers them from 0 within the stage.
        """
        sizes = self.stage_sizes or (self.architecture.layers // self.pp_size,) * self.pp_size
        first = sum(sizes[:pp_rank])
        return range(first, first + sizes[pp_rank])

    def megatron_layout(self) -> list[list[str]]:
        """Return the layers of each stage, as in `TransformerConfig.pipeline_model_parallel_layout`."""
        stages = [["decoder"] * len(self.stage_layers(stage)) for stage in range(self.pp_size)]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return stages

    @property
    def local_experts(self) -> int:
        """Number of experts of a layer that a rank holds."""
        return 0 if self.architecture.moe is None else self.architecture.moe.experts // self.ep_size

    @property
    def stage_size(self) -> int:
        """Number of ranks that together hold a stage.

        Rank r of them is tensor rank `r % tp_size`, expert tensor rank `r % etp_size` and expert rank `r // etp_size %
        ep_size`.
        """
        return math.lcm(self.tp_size, self.ep_size * self.etp_size)

    def holders(self, ep_rank: int | None) -> list[list[int]]:
        """Return the ranks of a stage that hold each shard of a parameter.

        Args:
            ep_rank: expert rank that holds the parameter; None if it does not belong to an expert.
        """
        ranks, size = list(range(self.stage_size)), self.tp_size
        if ep_rank is not None:
            size = self.etp_size
            ranks = [rank for rank in ranks if rank // size % self.ep_size == ep_rank]
        return [[rank for rank in ranks if rank % size == shard] for shard in range(size)]

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding after padding: the next multiple of `tp_size * vocab_multiple`."""
        multiple = self.tp_size * self.vocab_multiple
        return -(-self.architecture.vocab // multiple) * multiple


def partition_of(
    architecture: Architecture,
    strategy: ParallelStrategy,
    stages: int,
    vocab_multiple: int = 1,
    head: str = "lm",
    stage_sizes: tuple[int, ...] = (),
) -> Partition:
    """Return the partition of a model into `stages` by a strategy.

    Raises:
        ConfigError: see `Partition`.
    """
    dense = architecture.moe is None
    etp = strategy.expert_tensor or 1 if dense else expert_tensor(strategy)
    sizes = {"ep_size": strategy.expert, "etp_size": etp}
    return Partition(architecture, strategy.tensor, stages, vocab_multiple, head, stage_sizes=stage_sizes, **sizes)


def _require_divides(dimension: str, size: int, name: str, value: int, alternative: str = "") -> None:
    if value % size:
        fitting = ", ".join(str(n) for n in range(1, min(value, 64) + 1) if value % n == 0)
        raise ConfigError(
            f"megatron: {dimension} parallel size {size} does not divide {name} = {value}; use one of {fitting}"
            f"{alternative}."
        )
