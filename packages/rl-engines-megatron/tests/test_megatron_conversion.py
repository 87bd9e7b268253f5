import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_toys import toy_config, toy_state

from rl_contracts.errors import ConfigError, ModelError
from rl_engines_megatron import from_megatron, to_megatron

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
SPLITS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


def shards_of(state, config, tp=1, pp=1, **kwargs):
    return [
        to_megatron(state, config, tp_rank=t, tp_size=tp, pp_rank=p, pp_size=pp, **kwargs)
        for p in range(pp)
        for t in range(tp)
    ]


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("family", "split", "tied"), zip(FAMILIES, SPLITS, [False, True] * 3, strict=True), ids=FAMILIES
)
def test_round_trip_of_every_family_and_split_is_bitwise_exact(family, split, tied):
    config, (tp, pp) = toy_config(family, tie_word_embeddings=tied), split
    state = toy_state(config)

    back = from_megatron(shards_of(state, config, tp, pp), config, tp_size=tp, pp_size=pp)

    assert_same_bits(back, state)


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    groups=st.sampled_from([1, 2, 4, 8]),
    heads_per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    vocab=st.integers(1, 40),
    vocab_multiple=st.sampled_from([1, 3, 8]),
    tied=st.booleans(),
    split=st.sampled_from(SPLITS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_round_trip_of_any_head_and_group_count_is_bitwise_exact(
    family, groups, heads_per_group, head_dim, vocab, vocab_multiple, tied, split, dtype
):
    tp, pp = split
    heads = groups * heads_per_group
    if heads % tp:
        heads *= tp
    config = toy_config(
        family,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    state = toy_state(config, dtype)

    shards = shards_of(state, config, tp, pp, vocab_multiple=vocab_multiple)
    back = from_megatron(shards, config, tp_size=tp, pp_size=pp, vocab_multiple=vocab_multiple)

    assert_same_bits(back, state)


@pytest.mark.parametrize(("family", "tp", "pp"), [("qwen2", 4, 1), ("qwen3", 1, 2), ("gemma2", 2, 2)])
def test_to_megatron_uses_values_once_and_norms_once_per_tensor_rank(family, tp, pp):
    config = toy_config(family, vocab_size=32)  # no padding, so no zeros
    state = toy_state(config)

    shards = shards_of(state, config, tp, pp)

    values, counts = torch.cat([t.flatten() for shard in shards for t in shard.values()]).unique(return_counts=True)
    expected = {name: tp if "norm" in name else 1 for name in state}
    assert torch.equal(values, torch.cat([t.flatten() for t in state.values()]))
    assert counts.tolist() == [n for name, t in state.items() for n in [expected[name]] * t.numel()]


def test_to_megatron_interleaves_qkv_by_query_group():
    # four query heads in two groups, each head two rows; each row has a unique value
    config = toy_config(
        "qwen2", num_hidden_layers=1, hidden_size=1, num_attention_heads=4, num_key_value_heads=2, head_dim=2
    )
    state = toy_state(config)
    prefix = "model.layers.0.self_attn"
    for name, rows in (
        ("q", [[10, 11], [20, 21], [30, 31], [40, 41]]),
        ("k", [[50, 51], [60, 61]]),
        ("v", [[70, 71], [80, 81]]),
    ):
        state[f"{prefix}.{name}_proj.weight"] = torch.tensor(rows).float().reshape(-1, 1)
        state[f"{prefix}.{name}_proj.bias"] = -torch.tensor(rows).float().reshape(-1)
    first_group = [10, 11, 20, 21, 50, 51, 70, 71]
    second_group = [30, 31, 40, 41, 60, 61, 80, 81]
    whole = first_group + second_group

    for tp, expected in (
        (1, [whole]),
        (2, [first_group, second_group]),
        (4, [whole[:4], whole[4:8], whole[8:12], whole[12:]]),
    ):
        shards = shards_of(state, config, tp)
        name = "decoder.layers.0.self_attention.linear_qkv"
        assert [s[f"{name}.weight"].flatten().tolist() for s in shards] == expected
        assert [(-s[f"{name}.bias"]).tolist() for s in shards] == expected


def test_to_megatron_stacks_gate_and_up_within_each_rank():
    config = toy_config("llama", num_hidden_layers=1, hidden_size=1, intermediate_size=4)
    state = toy_state(config)
    state["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    state["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[5.0], [6.0], [7.0], [8.0]])

    shards = shards_of(state, config, tp=2)

    assert [s["decoder.layers.0.mlp.linear_fc1.weight"].flatten().tolist() for s in shards] == [
        [1, 2, 5, 6],
        [3, 4, 7, 8],
    ]


def test_to_megatron_splits_output_projections_by_columns():
    config = toy_config("llama")
    state = toy_state(config)

    shards = shards_of(state, config, tp=2)

    for megatron_name, hf_name in (
        ("self_attention.linear_proj", "self_attn.o_proj"),
        ("mlp.linear_fc2", "mlp.down_proj"),
    ):
        whole = torch.cat([shard[f"decoder.layers.3.{megatron_name}.weight"] for shard in shards], dim=1)
        assert torch.equal(whole, state[f"model.layers.3.{hf_name}.weight"])


def test_to_megatron_stages_number_layers_from_zero():
    config = toy_config("llama")
    state = toy_state(config)

    first, second = shards_of(state, config, pp=2)

    assert "embedding.word_embeddings.weight" in first
    assert "embedding.word_embeddings.weight" not in second
    assert "output_layer.weight" not in first
    assert "decoder.final_layernorm.weight" not in first
    norms = [second[f"decoder.layers.{i}.input_layernorm.weight"] for i in range(2)]
    assert [
        torch.equal(n, state[f"model.layers.{i}.input_layernorm.weight"]) for i, n in ((2, norms[0]), (3, norms[1]))
    ]
    assert "decoder.layers.2.input_layernorm.weight" not in second


def test_to_megatron_copies_tied_embeddings_to_last_stage():
    config = toy_config(tie_word_embeddings=True)
    state = toy_state(config)

    assert "output_layer.weight" not in to_megatron(state, config)
    first, last = shards_of(state, config, pp=2)
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


def test_to_megatron_pads_vocabulary_with_zeros_to_equal_shards():
    config = toy_config(vocab_size=9)

    shards = shards_of(toy_state(config), config, tp=4, vocab_multiple=4)

    rows = torch.cat([shard["output_layer.weight"] for shard in shards])
    assert [len(shard["output_layer.weight"]) for shard in shards] == [4, 4, 4, 4]
    assert torch.equal(rows[:9], toy_state(config)["lm_head.weight"])
    assert not rows[9:].any()


def test_conversion_results_share_no_memory():
    config = toy_config(num_key_value_heads=1)
    state = toy_state(config)
    shards = shards_of(state, config)
    back = from_megatron(shards, config)

    tensors = [t for mapping in (state, *shards, back) for t in mapping.values()]

    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert all(t.is_contiguous() for t in tensors)


def test_to_megatron_reads_only_tensors_of_the_stage():
    read = []

    class Recording(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    config = toy_config()
    to_megatron(Recording(toy_state(config)), config, pp_rank=1, pp_size=2)

    assert {name.split(".")[2] for name in read if ".layers." in name} == {"2", "3"}
    assert "model.embed_tokens.weight" not in read


def test_to_megatron_accepts_only_equal_lm_head_of_tied_model():
    config = toy_config(tie_word_embeddings=True)
    state = toy_state(config)

    back = from_megatron([to_megatron(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, config)], config)

    assert_same_bits(back, state)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        to_megatron(state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, config)


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        (lambda s: s.pop("model.layers.3.mlp.up_proj.weight"), r"missing.*model\.layers\.3\.mlp\.up_proj\.weight"),
        (lambda s: s.update({"model.layers.4.x": torch.ones(1)}), r"unknown.*model\.layers\.4\.x"),
        (
            lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            r"unknown.*layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            lambda s: s.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(32, 16)}),
            r"layers\.1\.self_attn\.k_proj\.weight: expected shape \[16, 16\], found \[32, 16\]",
        ),
        (
            lambda s: s.update({"model.layers.1.self_attn.v_proj.weight": torch.ones(16, 16).bfloat16()}),
            r"layers\.1\.self_attn\.v_proj\.weight is torch\.bfloat16",
        ),
    ],
    ids=["missing", "unknown", "bias-of-another-family", "misshaped", "other-dtype"],
)
def test_to_megatron_with_injected_fault_names_parameter(inject, message):
    config = toy_config("qwen3")
    state = toy_state(config)
    inject(state)

    with pytest.raises(ModelError, match=message):
        to_megatron(state, config)


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        (lambda s: s[3].pop("output_layer.weight"), r"missing.*tensor rank 1, pipeline stage 1.*output_layer\.weight"),
        (lambda s: s[0].update(extra=torch.ones(1)), r"unknown.*tensor rank 0, pipeline stage 0.*extra"),
        (
            lambda s: s[1].update({"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(16, 24)}),
            r"linear_fc2\.weight \(tensor rank 1, pipeline stage 0\): expected shape \[16, 12\], found \[16, 24\]",
        ),
        (
            lambda s: s[1]["decoder.layers.1.input_layernorm.weight"].add_(1),
            r"layers\.1\.input_layernorm\.weight \(tensor rank 1, pipeline stage 0\) differs",
        ),
        (lambda s: s[2]["output_layer.weight"].add_(1), r"output_layer\.weight differs from embedding"),
        (
            lambda s: s[1].update({"embedding.word_embeddings.weight": torch.ones(15, 16).double()}),
            r"word_embeddings\.weight \(tensor rank 1, pipeline stage 0\) is torch\.float64",
        ),
        (lambda s: s[0].update({"embedding.word_embeddings.weight": None}), r"expected a tensor, found NoneType"),
        (lambda s: s.insert(0, s.pop()), r"tensor rank 0, pipeline stage 0"),
    ],
    ids=["missing", "unknown", "misshaped", "drifted-norm", "drifted-tied-head", "other-dtype", "no-tensor", "order"],
)
def test_from_megatron_with_injected_fault_names_parameter_and_rank(inject, message):
    config = toy_config(tie_word_embeddings=True)
    shards = shards_of(toy_state(config), config, tp=2, pp=2)
    inject(shards)

    with pytest.raises(ModelError, match=message):
        from_megatron(shards, config, tp_size=2, pp_size=2)


def test_from_megatron_ignores_extra_state_entries():
    config = toy_config()
    state = toy_state(config)
    shard = to_megatron(state, config) | {"decoder.layers.0.mlp.linear_fc1._extra_state": None}

    assert_same_bits(from_megatron([shard], config), state)


def test_from_megatron_accepts_nan_norms_on_all_ranks():
    config = toy_config()
    state = toy_state(config)
    state["model.norm.weight"].fill_(torch.nan)

    back = from_megatron(shards_of(state, config, tp=2), config, tp_size=2)

    assert back["model.norm.weight"].isnan().all()


def test_from_megatron_rejects_wrong_number_of_shards():
    config = toy_config()

    with pytest.raises(ConfigError, match=r"expected 4 shards .*found 2"):
        from_megatron(shards_of(toy_state(config), config, tp=2), config, tp_size=2, pp_size=2)


@pytest.mark.parametrize("rank", [{"tp_rank": 2, "tp_size": 2}, {"pp_rank": -1, "pp_size": 2}])
def test_to_megatron_rejects_rank_that_does_not_exist(rank):
    config = toy_config()

    with pytest.raises(ConfigError, match=next(iter(rank))):
        to_megatron(toy_state(config), config, **rank)
