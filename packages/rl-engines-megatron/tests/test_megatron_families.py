"""Log-probs and weights of each family in each layout, compared with transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.testing.processes import run_ranks

RANKS = Path(__file__).parent / "megatron_family_ranks.py"
SIZES = {
    "vocab_size": 97,  # odd, so two ranks need padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
}
GEMMA = {
    "head_dim": 24,
    "sliding_window": 5,  # shorter than the sequences
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 2.0,  # low, so that it has an effect; transformers ignores it for Gemma 3
    "final_logit_softcapping": 3.0,
}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma2-untied": ("Gemma2Config", GEMMA | {"tie_word_embeddings": False}),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"rope_parameters": TWO_ROPES, "layer_types": MIXED}),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24}
MIXTURES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": ("Qwen3MoeConfig", EXPERTS | {"mlp_only_layers": [1], "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("families"), MODELS)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("mixtures"), MIXTURES)


def make_models(directory, models):
    for name, (config, settings) in models.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES | settings))
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.data += 0.1 * torch.randn_like(parameter)  # equal values would hide misplaced ones
        model.save_pretrained(directory / name)
    return directory


TWO = [
    ({"tensor": 2}, {}),
    ({"tensor": 2}, {"sequence_parallel": True}),
    ({"pipeline": 2}, {}),
    ({"context": 2}, {}),
]
INTERLEAVED = [({"pipeline": 2}, {"interleaved": 2})]
FOUR = [({"tensor": 2, "pipeline": 2}, {}), ({"tensor": 4}, {})]  # t4: more ranks than key-value heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (1, [({}, {})]),
        pytest.param(2, TWO, marks=pytest.mark.nightly),
        pytest.param(2, INTERLEAVED, marks=pytest.mark.nightly),
        pytest.param(4, FOUR, marks=pytest.mark.nightly),
    ],
    ids=["one", "two", "interleaved", "four"],
)
def test_family_matches_transformers_and_its_weights_round_trip(models, ranks, layouts):
    outputs = run_ranks(RANKS, [str(models), json.dumps(layouts)], ranks, seconds=480)

    for output in outputs:
        assert [name for name in MODELS if f"{name} as in transformers" in output] == list(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param({}, {}, id="d1"),
        pytest.param({"tensor": 2, "expert": 2}, {"sequence_parallel": True}, id="t2e2", marks=pytest.mark.nightly),
        pytest.param({"pipeline": 2}, {"interleaved": 2}, id="p2-interleaved", marks=pytest.mark.nightly),
        pytest.param({"context": 2, "expert": 2}, {}, id="c2e2", marks=pytest.mark.nightly),
        pytest.param(
            {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2},
            {"sequence_parallel": True},
            id="d2t2-of-experts-t2e2",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_moe_family_matches_transformers_and_its_weights_round_trip(mixtures, layout, settings):
    world = ParallelStrategy(**layout).world_size

    outputs = run_ranks(RANKS, [str(mixtures), json.dumps([[layout, settings]])], world)

    for output in outputs:
        assert [name for name in MIXTURES if f"{name} as in transformers" in output] == list(MIXTURES)
