import pytest
import torch
import torch.nn.functional as F
from megatron_toys import toy_config

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.errors import ConfigError, ModelError
from rl_engines_megatron import gpt_model_kwargs, transformer_kwargs


def test_transformer_kwargs_follow_from_model_and_strategy():
    strategy = ParallelStrategy(tensor=2, pipeline=2, context=2)

    kwargs = transformer_kwargs(toy_config("qwen3"), strategy, dtype=torch.bfloat16)

    assert kwargs == {
        "num_layers": 4,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 4,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "layernorm_zero_centered_gamma": False,
        "softmax_scale": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "fp16": False,
    }


@pytest.mark.parametrize(("family", "qkv_bias", "qk_norm"), [("llama", False, False), ("qwen2", True, False)])
def test_transformer_kwargs_select_bias_and_qk_norm_by_family(family, qkv_bias, qk_norm):
    kwargs = transformer_kwargs(toy_config(family), ParallelStrategy())

    assert (kwargs["add_qkv_bias"], kwargs["qk_layernorm"]) == (qkv_bias, qk_norm)


def test_transformer_kwargs_derive_unset_head_dim_from_hidden_size():
    config = toy_config("qwen2", hidden_size=64, num_key_value_heads=None)
    del config.head_dim

    kwargs = transformer_kwargs(config, ParallelStrategy())

    assert (kwargs["kv_channels"], kwargs["num_query_groups"]) == (8, 8)


def test_gpt_model_kwargs_of_stages_of_tied_model():
    config, strategy = toy_config(tie_word_embeddings=True), ParallelStrategy(tensor=2, pipeline=2)

    first, last = (gpt_model_kwargs(config, strategy, pp_rank=stage, vocab_multiple=8) for stage in range(2))

    assert first == {
        "vocab_size": 32,
        "max_sequence_length": 64,
        "pre_process": True,
        "post_process": False,
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 1e6,
    }
    assert last == first | {"pre_process": False, "post_process": True}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (LLAMA3, {"rope_scaling": True, "rope_scaling_factor": 8.0}),
        ({"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, {"seq_len_interpolation_factor": 2.0}),
    ],
    ids=["llama3", "linear"],
)
def test_gpt_model_kwargs_contain_supported_rotary_scaling(rope, expected):
    kwargs = gpt_model_kwargs(toy_config("llama", rope_parameters=rope), ParallelStrategy())

    assert expected.items() <= kwargs.items()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "'yarn' is not supported; supported are default"),
        (LLAMA3 | {"high_freq_factor": 2.0}, "found .*'high_freq_factor': 2.0"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, found 0.5"),
        (None, "rope_parameters: expected a mapping with rope_theta, found None"),
    ],
    ids=["yarn", "other-llama3", "no-factor", "partial", "none"],
)
def test_gpt_model_kwargs_reject_unsupported_rotary_embedding(rope, message):
    with pytest.raises(ModelError, match=message):
        gpt_model_kwargs(toy_config("llama", rope_parameters=rope), ParallelStrategy())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            toy_config("gemma3"),
            "'gemma3' is not supported; supported are gemma2, gemma3_text, llama, mistral, mixtral, qwen2, qwen3, ",
        ),
        (toy_config("llama", attention_bias=True), "attention_bias"),
        (toy_config("llama", mlp_bias=True), "mlp_bias"),
        (toy_config("llama", hidden_act="gelu"), "hidden_act: expected 'silu', found 'gelu'"),
        (toy_config("qwen2", layer_types=["chunked_attention"] * 4), "chunked_attention"),
        (toy_config("qwen2", layer_types=["sliding_attention"] * 4), "sliding_window=None"),
        (toy_config("qwen2", layer_types=["full_attention"] * 3), "for 3"),
        (toy_config("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (toy_config(num_key_value_heads=3), "num_attention_heads=8 .*num_key_value_heads=3"),
        (toy_config(head_dim=None, hidden_size=12), "hidden_size=12 .*8 heads"),
        (toy_config(hidden_size="16"), "hidden_size: expected a whole number of at least 1, found '16'"),
        (object(), "has no model_type"),
    ],
    ids=[
        "family",
        "attention-bias",
        "mlp-bias",
        "activation",
        "chunks",
        "no-window",
        "fewer-layers",
        "bidirectional",
        "groups",
        "head-dim",
        "type",
        "no-config",
    ],
)
def test_transformer_kwargs_reject_unsupported_model_with_reason(config, message):
    with pytest.raises(ModelError, match=message):
        transformer_kwargs(config, ParallelStrategy())


@pytest.mark.parametrize(
    ("changes", "strategy", "message"),
    [
        (
            {},
            {"pipeline": 3},
            r"pipeline parallel size 3 does not divide num_hidden_layers = 4; use one of 1, 2, 4, or set stage_layers",
        ),
        ({}, {"tensor": 3}, r"tensor parallel size 3 does not divide num_attention_heads = 8"),
        ({"intermediate_size": 22}, {"tensor": 4}, r"tensor parallel size 4 does not divide intermediate_size = 22"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            {"tensor": 4},
            r"tensor parallel size 4 .*6 key-value heads",
        ),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 1, "intermediate_size": 8},
            {"tensor": 4},
            r"does not divide rows of the fused qkv projection = 6",
        ),
        ({}, {"data": 2, "expert": 2}, r"have no experts, found expert=2"),
    ],
    ids=["layers", "heads", "intermediate", "groups", "fused-rows", "experts"],
)
def test_transformer_kwargs_reject_strategy_that_does_not_fit(changes, strategy, message):
    with pytest.raises(ConfigError, match=message):
        transformer_kwargs(toy_config(**changes), ParallelStrategy(**strategy))


def test_gpt_model_kwargs_reject_stage_that_does_not_exist():
    with pytest.raises(ConfigError, match="pp_rank: expected between 0 and 1, found 2"):
        gpt_model_kwargs(toy_config(), ParallelStrategy(pipeline=2), pp_rank=2)
