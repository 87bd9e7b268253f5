import pytest

from rl_contracts.conformance.train_engine import TrainEngineConformance
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig


@pytest.mark.slow
class TestMegatronEngine(TrainEngineConformance):
    def make_engine(self) -> MegatronEngine:
        return MegatronEngine(MegatronEngineConfig())


@pytest.mark.gpu
class TestMegatronEngineOnCuda(TestMegatronEngine):
    device = "cuda"
