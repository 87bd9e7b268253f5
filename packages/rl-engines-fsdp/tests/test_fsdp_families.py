"""What a family of models may do that a few tokens in evaluation mode do not show: against transformers, by rows."""

import re

import pytest
import torch
import torch.nn.functional as F
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, record_gradients
from test_fsdp_packed_forward import plain_logprobs_and_entropy

from rl_contracts.batch.trajectory import select
from rl_contracts.config import OptimizerConfig
from rl_contracts.errors import ModelError
from rl_contracts.testing.families import VARIANTS
from rl_contracts.testing.families import make_family as make_plain_family
from rl_engines_fsdp.model import attention, loading
from rl_engines_fsdp.model.rope import RowFrequencies
from rl_engines_fsdp.ranks.sharding import decoder_layers

RANDOM = ["starcoder2", "seed_oss", "phimoe", "mixtral", "opt", "gpt_bigcode", "llama"]
"""Drop, jitter, or draw their experts in training mode."""
COMMON = ["llama", "mixtral", "qwen2_moe", "phi3"]
OTHERS = [
    "starcoder2",
    "seed_oss",
    "phimoe",
    "phimoe, window",
    "opt",
    "gpt_bigcode",
    "afmoe",
    "jetmoe",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "glm4",
    "deepseek_v3",
    "granite",
    "cohere",
    "gpt_neox",
    "biogpt",
]
FAMILIES = [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def make_family(path, name, **settings):
    """A family, or a variant of one by its name."""
    family, own = VARIANTS.get(name, (name, {}))
    return make_plain_family(path, family, **(own | settings))


def plain_gradients(path, batch) -> dict[str, torch.Tensor]:
    """Of `loss_fn`, by transformers' own forward of one row at a time in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for row in range(len(batch)):
        ids = batch["input_ids"][row][batch["attention_mask"][row]]
        logits = model(ids[None], use_cache=False).logits[0, :-1].float() / batch["temperature"][row]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        weights = (batch["advantages"] * batch["loss_mask"])[row, 1 : len(ids)]
        (-(logprobs * weights).sum() / loss_weight_fn(batch)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_packed_rows_are_those_of_each_row_alone(family, tmp_path):
    path, batch = str(make_family(tmp_path, family)), make_batch()
    expected, _ = plain_logprobs_and_entropy(path, batch)

    found = make_engine(path).forward(batch, logprobs_of)

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packed_rows_are_those_of_each_row_alone(family, tmp_path):
    path, batch = str(make_family(tmp_path, family)), make_batch()
    engine = make_engine(path, optimizer=OptimizerConfig(max_grad_norm=1e9), gradient_checkpointing=family in RANDOM)
    found = record_gradients(engine)

    engine.train_batch(batch, loss_fn, loss_weight_fn)

    for name, expected in plain_gradients(path, batch).items():
        bound = 1e-4 * expected.abs().max().item() + 1e-7
        torch.testing.assert_close(
            found[name], expected, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", RANDOM)
def test_two_passes_while_training_are_equal(family, tmp_path):
    engine, batch = make_engine(str(make_family(tmp_path, family))), make_batch()

    first, second = (engine.forward(batch, logprobs_of) for _ in range(2))

    assert torch.equal(first, second)


@pytest.mark.parametrize("family", ["phi3", "llama, dynamic rope"], ids=["longrope", "dynamic"])
def test_rows_choose_their_rotary_frequencies_by_their_own_length(family, tmp_path):
    path, batch = str(make_family(tmp_path, family)), make_batch()
    assert min(batch["attention_mask"].sum(1)) <= 8 < max(batch["attention_mask"].sum(1))
    # one model for each row: transformers' own remembers the longest that it met
    alone = [plain_logprobs_and_entropy(path, select(batch, [row]))[0] for row in range(len(batch))]
    expected = torch.cat([F.pad(row, (0, batch["input_ids"].shape[1] - row.shape[1])) for row in alone])

    for micro_batch in (19, 10_000):
        found = make_engine(path, micro_batch=micro_batch).forward(batch, logprobs_of)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "settings", "planted"),
    [
        ("qwen2_moe", {"sliding_window": 4096, "max_position_embeddings": 8192}, "a window in the mask alone"),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 8192}, "a window that is not honoured"),
        ("phi3", {}, "frequencies of the longest row"),
    ],
)
def test_verify_meets_windows_and_lengths_far_beyond_its_rows(family, settings, planted, tmp_path, monkeypatch):
    path = str(make_family(tmp_path, family, **settings))
    make_engine(path).destroy()
    if family == "phi3":
        monkeypatch.setattr(RowFrequencies, "rows", lambda self, *_: None)
    else:
        band = attention._one_segment
        monkeypatch.setattr(
            attention, "_one_segment", lambda q, k, v, scale, _, *more: band(q, k, v, scale, None, *more)
        )

    with pytest.raises(ModelError, match="packed sequences differ by"):
        make_engine(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "jamba"])
def test_verify_refuses_layers_that_mix_rows_at_the_initialisation_of_transformers(family, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "other_layers", lambda _: [])  # what a configuration says is refused before
    settings = {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    path = str(make_family(tmp_path, family, spread=None, **settings))

    with pytest.raises(ModelError, match=r"mix packed sequences|expected full or sliding attention, found 'hybrid'"):
        make_engine(path)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama4_text", "layers of type ['chunked_attention']"),
        ("deepseek_v32", "layers of type"),
        ("deepseek_v4", "layers of type ['heavily_compressed_attention']"),
        ("qwen3_next", "layers of type ['linear_attention']"),
        # as of transformers 5.24, which lets the attention of gptj be replaced
        pytest.param("git", "does not let its attention be replaced", marks=pytest.mark.slow),
    ],
)
def test_a_family_that_packed_rows_cannot_be_run_through_is_refused_in_a_sentence(family, reason, tmp_path):
    path = str(make_family(tmp_path, family))

    with pytest.raises(ModelError, match=re.escape(reason)):
        make_engine(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["stablelm", "gpt_oss"])
@pytest.mark.parametrize("ranks", ["one", "recomputed"])
def test_families_with_lost_keyword_arguments_or_sinks_learn_as_transformers_does(family, ranks, tmp_path):
    path, batch = str(make_family(tmp_path, family)), make_batch()
    settings = {"optimizer": OptimizerConfig(max_grad_norm=1e9), "gradient_checkpointing": ranks == "recomputed"}
    engine = make_engine(path, **settings)
    found = record_gradients(engine)

    engine.train_batch(batch, loss_fn, loss_weight_fn)

    for name, expected in plain_gradients(path, batch).items():
        bound = 1e-4 * expected.abs().max().item() + 1e-7
        torch.testing.assert_close(found[name], expected, atol=bound, rtol=0)


@pytest.mark.parametrize("only_with_gradients", [False, True])
def test_verify_refuses_randomness_that_evaluation_mode_leaves_on(only_with_gradients, tmp_path, monkeypatch):
    attend = attention._one_segment

    def drop(*arguments):
        out = attend(*arguments)
        return out if only_with_gradients and not torch.is_grad_enabled() else torch.nn.functional.dropout(out, 0.1)

    monkeypatch.setattr(attention, "_one_segment", drop)

    with pytest.raises(ModelError, match=r"passes of training over the same rows differ by .* random"):
        make_engine(str(make_family(tmp_path, "llama")))


@pytest.mark.parametrize("family", ["llama", "biogpt"])
def test_decoder_layers_are_found_where_a_family_declares_none(family, tmp_path):
    """Each is sharded, compiled and checkpointed by itself; without them the model would be one piece."""
    engine = make_engine(str(make_family(tmp_path, family)))

    layers = decoder_layers(engine._model)

    assert len(layers) == 2
    assert bool(engine._model.model._no_split_modules) == (family == "llama")
