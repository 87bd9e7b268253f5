from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.conformance.train_engine import TrainEngineConformance
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig


class TestFSDPEngine(TrainEngineConformance):
    def make_engine(self, optimizer: OptimizerConfig, micro_batch_tokens: int) -> FSDPEngine:
        settings = FSDPEngineConfig(optimizer=optimizer, micro_batch=MicroBatchConfig(micro_batch_tokens), device="cpu")
        return FSDPEngine(settings)
