"""Settings of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_contracts.config import require


@dataclass
class LoRAConfig:
    """Low-rank adapters instead of all weights."""

    rank: int = 16
    """Rank of an adapter."""
    alpha: float = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    target_modules: list[str] = field(default_factory=list)
    """Layers that are adapted, by the ends of their names (`q_proj`); empty: all linear layers of the decoder."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, "lora.rank", "at least 1", self.rank)
        require(self.alpha > 0, "lora.alpha", "more than 0", self.alpha)

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank
