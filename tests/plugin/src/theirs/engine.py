"""A train engine: the reference engine, which can leave parameters as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing.reference_engine import ReferenceTrainEngine, ReferenceTrainEngineConfig


@dataclass
class TheirTrainEngineConfig(ReferenceTrainEngineConfig):
    """What may be set about it."""

    freeze: list[str] = field(default_factory=list)
    """Parameters whose names contain one of these are not trained."""


class TheirTrainEngine(ReferenceTrainEngine):
    """Trains what it is not told to freeze."""

    def __init__(self, config: TheirTrainEngineConfig | None = None, strategy: ParallelStrategy | None = None) -> None:
        self.config: TheirTrainEngineConfig
        super().__init__(config or TheirTrainEngineConfig(), strategy)

    def initialize(self, spec: FinetuneSpec) -> None:
        super().initialize(spec)
        for name, parameter in self.model.named_parameters():
            if any(part in name for part in self.config.freeze):
                parameter.requires_grad_(False)
