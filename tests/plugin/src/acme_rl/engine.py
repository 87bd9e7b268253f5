"""A train engine: the reference engine with frozen parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing.reference_engine import ReferenceTrainEngine, ReferenceTrainEngineConfig


@dataclass
class AcmeTrainEngineConfig(ReferenceTrainEngineConfig):
    """Settings of the engine."""

    freeze: list[str] = field(default_factory=list)
    """Freeze the parameters whose names contain one of these texts."""


class AcmeTrainEngine(ReferenceTrainEngine):
    """Train all parameters except those that `freeze` names."""

    def __init__(self, config: AcmeTrainEngineConfig | None = None, strategy: ParallelStrategy | None = None) -> None:
        self.config: AcmeTrainEngineConfig
        super().__init__(config or AcmeTrainEngineConfig(), strategy)

    def initialize(self, spec: FinetuneSpec) -> None:
        super().initialize(spec)
        for name, parameter in self.model.named_parameters():
            if any(part in name for part in self.config.freeze):
                parameter.requires_grad_(False)
