import pytest

from rl_contracts.conformance.train_engine import TrainEngineConformance
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig


class TestFSDPEngine(TrainEngineConformance):
    def make_engine(self) -> FSDPEngine:
        return FSDPEngine(FSDPEngineConfig())


@pytest.mark.gpu
class TestFSDPEngineOnCuda(TestFSDPEngine):
    device = "cuda"
