"""How one model is cut over tensor-parallel and pipeline-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.data import HEADS
from rl_contracts.errors import ConfigError
from rl_engines_megatron.architecture import Architecture


@dataclass(frozen=True)
class Partition(Settings):
    """A model over tensor-parallel ranks and pipeline stages of equal length, with the padding of its vocabulary.

    Raises:
        ConfigError: the model cannot be cut this way, with the numbers.
    """

    architecture: Architecture
    """What is cut."""
    tp_size: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Ranks over which each matrix is split."""
    pp_size: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Stages over which the layers are split, each with `layers / pp_size` of them. Interleaved, a rank holds several:
    with P ranks, rank p has stages p, p + P, and so on."""
    vocab_multiple: int = bounded(1, "at least 1", lambda rows: rows >= 1)
    """Each tensor-parallel rank holds a multiple of this many rows of the vocabulary."""
    head: str = choice("lm", HEADS)
    """What stands behind the decoder: the vocabulary, or a scalar."""

    def __post_init__(self) -> None:
        super().__post_init__()
        architecture, tp = self.architecture, self.tp_size
        _require_divides("pipeline", self.pp_size, "num_hidden_layers", architecture.layers)
        _require_divides("tensor", tp, "num_attention_heads", architecture.heads)
        _require_divides("tensor", tp, "intermediate_size", architecture.intermediate)
        groups = architecture.groups
        if groups % tp and tp % groups:
            raise ConfigError(
                f"megatron: tensor parallel size {tp} neither divides the {groups} key-value heads nor is a multiple "
                f"of them; choose t that divides {groups}."
            )
        # where ranks share a key-value head, megatron-core cuts the fused matrix by rows, not at heads
        rows = (architecture.heads + 2 * groups) * architecture.head_dim
        _require_divides("tensor", tp, "rows of the fused qkv projection", rows)

    def check_rank(self, tp_rank: int, pp_rank: int) -> None:
        """Raise a `ConfigError` unless both ranks exist."""
        require(0 <= tp_rank < self.tp_size, "tp_rank", f"between 0 and {self.tp_size - 1}", tp_rank)
        require(0 <= pp_rank < self.pp_size, "pp_rank", f"between 0 and {self.pp_size - 1}", pp_rank)

    def is_first(self, pp_rank: int) -> bool:
        """Whether the stage holds the embedding (megatron-core: pre_process)."""
        return pp_rank == 0

    def is_last(self, pp_rank: int) -> bool:
        """Whether the stage holds the final norm and the output layer (megatron-core: post_process)."""
        return pp_rank == self.pp_size - 1

    def stage_layers(self, pp_rank: int) -> range:
        """The model's layer numbers (from 0) of a stage; megatron-core numbers them from 0 within the stage."""
        length = self.architecture.layers // self.pp_size
        return range(pp_rank * length, (pp_rank + 1) * length)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding after padding: the next multiple of `tp_size * vocab_multiple`."""
        step = self.tp_size * self.vocab_multiple
        return -(-self.architecture.vocab // step) * step


def _require_divides(dimension: str, size: int, name: str, value: int) -> None:
    if value % size:
        fitting = ", ".join(str(n) for n in range(1, min(value, 64) + 1) if value % n == 0)
        raise ConfigError(
            f"megatron: {dimension} parallel size {size} does not divide {name} = {value}; sizes that do: {fitting}."
        )
