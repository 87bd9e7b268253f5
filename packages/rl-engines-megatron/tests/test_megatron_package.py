import json
import subprocess
import sys

import pytest

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError
from rl_engines_megatron import MegatronEngineConfig


def test_import_does_not_import_torch():
    code = "import sys, rl_engines_megatron; assert not {'torch', 'transformers', 'megatron'} & sys.modules.keys()"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("settings", "strategy", "spec", "message"),
    [
        ({"sequence_parallel": True}, ParallelStrategy(data=2), {}, "sequence_parallel=true .*t=1"),
        ({"interleaved": 2}, ParallelStrategy(tensor=2), {}, "interleaved=2 .*p=1"),
        ({}, ParallelStrategy(), {"deterministic": True}, "deterministic"),
        ({}, ParallelStrategy(), {"freeze": ("vision_tower",)}, "freeze"),
        ({}, ParallelStrategy(), {"dtype": "bfloat16", "device": "cpu"}, "dtype"),
        ({}, ParallelStrategy(), {"optimizer": OptimizerConfig(name="muon")}, r"optimizer\.name"),
        ({}, ParallelStrategy(), {"optimizer": OptimizerConfig(options={"momentum": 0.9})}, r"options \['momentum'\]"),
    ],
)
def test_check_rejects_conflicting_settings_by_name(settings, strategy, spec, message):
    with pytest.raises(ConfigError, match=message):
        MegatronEngineConfig(**settings).check(strategy, FinetuneSpec("model", 1, **spec))


@pytest.mark.parametrize(
    ("settings", "strategy", "changes", "message"),
    [
        (
            {},
            ParallelStrategy(),
            {"model_type": "gpt2"},
            "megatron:d1.*model_type 'gpt2' is not supported; supported are",
        ),
        ({}, ParallelStrategy(), {"model_type": "qwen2_5_vl"}, "megatron:d1.*model_type 'qwen2_5_vl' is not supported"),
        (
            {"interleaved": 2},
            ParallelStrategy(pipeline=2),
            {},
            r"parallel size 4 does not divide num_hidden_layers = 6",
        ),
        ({"stage_layers": [4, 1]}, ParallelStrategy(pipeline=2), {}, r"stage_layers: .*num_hidden_layers=6.*\[4, 1\]"),
        ({"stage_layers": [6]}, ParallelStrategy(pipeline=2), {}, r"stage_layers: expected 2 .*\[6\]"),
        (
            {},
            ParallelStrategy(),
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type 'yarn' is not supported",
        ),
        ({}, ParallelStrategy(), {"quantization_config": {"quant_method": "fp8"}}, "megatron:d1.*quantization_config"),
    ],
)
def test_check_rejects_model_that_does_not_fit_layout(tmp_path, settings, strategy, changes, message):
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes | changes))

    with pytest.raises(ConfigError, match=message):
        MegatronEngineConfig(**settings).check(strategy, FinetuneSpec(str(tmp_path), 1))


def test_check_accepts_model_that_does_not_exist_yet():
    MegatronEngineConfig().check(ParallelStrategy(tensor=2), FinetuneSpec("nowhere", 1))
