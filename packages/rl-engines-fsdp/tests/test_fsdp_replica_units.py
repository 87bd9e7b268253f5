"""Checks of tensor and context parallelism that run before any process starts."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from fsdp_toys import FAMILIES, SIZES

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, ModelError
from rl_engines_fsdp import FSDPEngineConfig
from rl_engines_fsdp.config import LoRAConfig, check_heads
from rl_engines_fsdp.model.attention import key_repeats
from rl_engines_fsdp.model.loading import empty_model
from rl_engines_fsdp.ranks.tensor_parallel import COLUMNS, PARTIAL, ROWS, planned_modules

SPEC = FinetuneSpec("no such model", 1)


def config_of(family: str, **settings):
    import transformers

    return getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES.get(family, {}) | settings))


@pytest.mark.parametrize("strategy", [ParallelStrategy(pipeline=2), ParallelStrategy(2, expert=2)])
def test_check_with_pipeline_or_expert_names_supported_dimensions(strategy):
    with pytest.raises(ConfigError, match=r"data, context and tensor ranks\s+\(d, c, t\)"):
        FSDPEngineConfig().check(strategy, SPEC)


@pytest.mark.parametrize(
    ("setting", "value"), [("compile", True), ("lora", LoRAConfig(rank=2))], ids=["compile", "lora"]
)
def test_check_with_tensor_ranks_and_unsupported_setting_names_both(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} and allocation fsdp:t2"):
        FSDPEngineConfig(**{setting: value}).check(ParallelStrategy(tensor=2), SPEC)


@pytest.mark.parametrize(
    ("setting", "run_settings"),
    [
        ({"compile": True}, {"deterministic": True}),
        ({"max_logits": 100}, {"deterministic": True}),
        ({"offload": True}, {"device": "cpu"}),
    ],
)
def test_check_with_setting_that_conflicts_with_run_names_both(setting, run_settings):
    (name, _), (conflicting, _) = *setting.items(), *run_settings.items()
    config = FSDPEngineConfig(**setting)

    with pytest.raises(ConfigError, match=f"{name}=.* does not work with {conflicting}="):
        config.check(ParallelStrategy(), replace(SPEC, **run_settings))
    config.check(ParallelStrategy(), SPEC)


def test_check_reads_attention_heads_without_importing_torch(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 6, "num_key_value_heads": 2}}')
    code = (
        "import sys\nfrom rl_contracts.allocation import ParallelStrategy\n"
        "from rl_contracts.data import FinetuneSpec as S\n"
        "from rl_engines_fsdp import FSDPEngineConfig\n"
        f"try: FSDPEngineConfig().check(ParallelStrategy(context=4), S({str(tmp_path)!r}, 1))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "assert 'torch' not in sys.modules"
    )

    output = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout

    assert "ConfigError allocation fsdp:c4: the 6 attention heads of the model must be divisible by t * c = 4" in output


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Phi"])
def test_planned_modules_are_the_linear_layers_of_every_decoder_layer(family):
    model = empty_model(config_of(family))

    planned = {name: style for name, _, style in planned_modules(model)}

    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers." in n}
    assert {name for name, style in planned.items() if style in (COLUMNS, ROWS)} == linear
    norms = {name for name, style in planned.items() if style == PARTIAL}
    has_norms = family == "Qwen3"
    assert norms == ({n for n, _ in model.named_modules() if n.endswith(("q_norm", "k_norm"))} if has_norms else set())


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("GPT2", "has no tensor-parallel plan"),
        ("Qwen3Moe", r"style '\w+' for model\.layers\.0\.mlp\.experts"),
    ],
)
def test_planned_modules_without_plan_or_with_unknown_style_are_rejected(family, message):
    with pytest.raises(ModelError, match=message):
        planned_modules(empty_model(config_of(family)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelStrategy(tensor=2, context=4), "4 attention heads .* divisible by t \\* c = 8"),
        (ParallelStrategy(tensor=4), "2 key/value heads .* divisible by t = 4"),
    ],
)
def test_check_heads_that_do_not_divide_names_sizes(layout, message):
    check_heads(vars(config_of("Llama")), ParallelStrategy(tensor=2, context=2))
    check_heads(vars(config_of("Llama")), ParallelStrategy(context=4))
    with pytest.raises(ConfigError, match=message):
        check_heads(vars(config_of("Llama")), layout)


def test_key_repeats_gives_each_rank_the_key_heads_of_its_query_heads():
    with pytest.raises(ModelError, match=r"24 attention heads .* divisible by the 5"):
        key_repeats(24, 8, 5)
    for key_heads, ranks in itertools.product((24, 8, 6, 4, 1), (1, 2, 3, 4, 6, 8, 12)):
        repeats = key_repeats(24, key_heads, ranks)

        repeated = [head for head in range(key_heads) for _ in range(repeats)]
        keys_per_rank, queries_per_rank = len(repeated) // ranks, 24 // ranks
        assert len(repeated) % ranks == 0
        for rank in range(ranks):
            keys = repeated[rank * keys_per_rank : (rank + 1) * keys_per_rank]
            used = [keys[local // (queries_per_rank // keys_per_rank)] for local in range(queries_per_rank)]
            assert used == [(rank * queries_per_rank + local) // (24 // key_heads) for local in range(queries_per_rank)]
