"""Settings of the log-prob gap gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded, require


@dataclass
class GapConfig(Settings):
    """Thresholds of the log-prob gap gate."""

    setting: ClassVar[str] = "gap"
    sequences: int = bounded(4, "0 (off) or more", lambda count: count >= 0)
    """Number of sequences to compare per batch, over all replicas. Each replica compares at least one. The sequences
    come from as many groups as possible; with fewer than 4 groups, it takes more steps to detect a server with old
    weights. 0 switches the gate off."""
    warn: float = bounded(0.02, "more than 0", lambda nats: nats > 0)
    """Mean absolute log-prob gap, in nats, above which a warning is logged. bfloat16 on either side causes 0.01 to
    0.05."""
    stop: float = 0.5
    """Mean absolute log-prob gap, in nats, above which the run stops at once; at least `warn`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.stop >= self.warn, "gap.stop", f"at least gap.warn ({self.warn})", self.stop)
