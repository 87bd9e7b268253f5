import subprocess
import sys

import pytest

from rl_contracts import registry
from rl_contracts.errors import ConfigError
from rl_engines_fsdp import FSDPEngineConfig


def test_import_does_not_import_torch():
    code = "import sys, rl_engines_fsdp; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_engine_is_found_by_its_entry_point():
    assert registry.load("rl.train_engines", "fsdp").__name__ == "FSDPEngine"


@pytest.mark.parametrize(
    "wrong",
    [
        {"serve_dtype": "int8"},
        {"max_logits": -1},
        {"max_shard_gb": 0},
        {"timeout_seconds": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_config_with_a_wrong_value_names_the_field(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FSDPEngineConfig(**wrong)
