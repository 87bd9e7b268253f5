"""What tensor and context parallelism decide before any process starts."""

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
def test_check_with_pipeline_or_expert_parallelism_says_what_is_supported(strategy):
    with pytest.raises(ConfigError, match=r"data, context and tensor ranks\s+\(d, c, t\)"):
        FSDPEngineConfig().check(strategy, SPEC)


@pytest.mark.parametrize(
    ("setting", "value"), [("compile", True), ("lora", LoRAConfig(rank=2))], ids=["compile", "lora"]
)
def test_check_with_tensor_parallelism_and_a_setting_that_does_not_go_with_it_names_both(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} and allocation fsdp:t2"):
        FSDPEngineConfig(**{setting: value}).check(ParallelStrategy(tensor=2), SPEC)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"compile": True}, {"deterministic": True}),
        ({"max_logits": 100}, {"deterministic": True}),
        ({"offload": True}, {"device": "cpu"}),
    ],
)
def test_check_of_a_setting_that_does_not_go_with_the_run_names_both(setting, told):
    (name, _), (other, _) = *setting.items(), *told.items()
    config = FSDPEngineConfig(**setting)

    with pytest.raises(ConfigError, match=f"{name}=.* does not go with {other}="):
        config.check(ParallelStrategy(), replace(SPEC, **told))
    config.check(ParallelStrategy(), SPEC)


def test_check_of_a_model_that_is_there_reads_its_heads_and_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 6, "num_key_value_heads": 2}}')
    code = (
        "import sys\nfrom rl_contracts.allocation import ParallelStrategy\n"
        "from rl_contracts.data import FinetuneSpec as S\n"
        "from rl_engines_fsdp import FSDPEngineConfig\n"
        f"try: FSDPEngineConfig().check(ParallelStrategy(context=4), S({str(tmp_path)!r}, 1))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "assert 'torch' not in sys.modules"
    )

    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout

    assert (
        "ConfigError allocation fsdp:c4: expected attention heads that divide by tensor * context = 4, found 6" in said
    )


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Mistral", "Phi", "Granite"])
def test_planned_modules_are_the_linear_layers_of_every_decoder_layer(family):
    model = empty_model(config_of(family))

    planned = {name: style for name, _, style in planned_modules(model)}

    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers." in n}
    assert {name for name, style in planned.items() if style in (COLUMNS, ROWS)} == linear
    norms = {name for name, style in planned.items() if style == PARTIAL}
    expected = family in ("Qwen3", "Gemma3Text")
    assert norms == ({n for n, _ in model.named_modules() if n.endswith(("q_norm", "k_norm"))} if expected else set())


def test_planned_modules_without_a_plan_says_so():
    with pytest.raises(ModelError, match="transformers has none for this model"):
        planned_modules(empty_model(config_of("GPT2")))


def test_planned_modules_with_a_style_that_is_not_known_names_it():
    model = empty_model(config_of("Qwen3Moe"))

    with pytest.raises(ModelError, match=r"plan has '\w+' for model\.layers\.0\.mlp\.experts"):
        planned_modules(model)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelStrategy(context=3), "attention heads that divide by tensor \\* context = 3, found 4"),
        (ParallelStrategy(tensor=2, context=4), "tensor \\* context = 8, found 4"),
        (ParallelStrategy(tensor=4), "key/value heads that divide by the tensor size 4, found 2"),
    ],
)
def test_check_heads_that_do_not_divide_says_which(layout, message):
    with pytest.raises(ConfigError, match=message):
        check_heads(vars(config_of("Llama")), layout)


def test_check_heads_that_divide_passes():
    check_heads(vars(config_of("Llama")), ParallelStrategy(tensor=2, context=2))
    check_heads(vars(config_of("Llama")), ParallelStrategy(context=4))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize(("heads", "key_heads"), [(24, 24), (24, 8), (24, 6), (24, 4), (24, 1)])
def test_key_repeats_gives_each_rank_the_key_heads_of_its_query_heads(heads, key_heads, ranks):
    repeats = key_repeats(heads, key_heads, ranks)

    repeated = [head for head in range(key_heads) for _ in range(repeats)]
    mine, queries = len(repeated) // ranks, heads // ranks
    assert len(repeated) % ranks == 0
    for rank in range(ranks):
        keys = repeated[rank * mine : (rank + 1) * mine]
        for local in range(queries):
            assert keys[local // (queries // mine)] == (rank * queries + local) // (heads // key_heads)


def test_key_repeats_with_heads_that_do_not_divide_says_which():
    with pytest.raises(ModelError, match="divide by 5, found 24"):
        key_repeats(24, 8, 5)
