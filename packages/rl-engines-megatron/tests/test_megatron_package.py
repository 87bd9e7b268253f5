import subprocess
import sys

import pytest

from rl_contracts import registry
from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError
from rl_engines_megatron import MegatronEngineConfig


def test_import_does_not_import_torch():
    code = "import sys, rl_engines_megatron; assert not {'torch', 'transformers', 'megatron'} & sys.modules.keys()"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_engine_is_found_by_its_entry_point():
    assert registry.load("rl.train_engines", "megatron").__name__ == "MegatronEngine"


@pytest.mark.parametrize(
    ("settings", "strategy", "spec", "named"),
    [
        ({"sequence_parallel": True}, ParallelStrategy(data=2), {}, "sequence_parallel"),
        ({"interleaved": 2}, ParallelStrategy(pipeline=2), {}, "interleaved"),
        ({}, ParallelStrategy(), {"deterministic": True}, "deterministic"),
        ({}, ParallelStrategy(), {"dtype": "bfloat16", "device": "cpu"}, "dtype"),
        ({}, ParallelStrategy(), {"optimizer": OptimizerConfig(name="muon")}, r"optimizer\.name"),
    ],
)
def test_check_what_does_not_go_together_is_refused_by_name(settings, strategy, spec, named):
    with pytest.raises(ConfigError, match=named):
        MegatronEngineConfig(**settings).check(strategy, FinetuneSpec("model", 1, **spec))
