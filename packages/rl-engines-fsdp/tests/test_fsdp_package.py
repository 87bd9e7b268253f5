import subprocess
import sys

import pytest

from rl_contracts.errors import ConfigError
from rl_engines_fsdp import FSDPEngineConfig


def test_import_does_not_import_torch():
    code = "import sys, rl_engines_fsdp; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "settings",
    [
        {"serve_dtype": "int8"},
        {"max_logits": -1},
        {"timeout_seconds": 0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_config_with_invalid_value_names_the_field(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FSDPEngineConfig(**settings)
