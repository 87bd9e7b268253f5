"""Model families compared with transformers per sequence: randomness, windows, RoPE lengths and other special cases."""

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

RECOMPUTED = {"starcoder2", "phimoe, window", "mixtral", "opt", "gpt_bigcode", "llama", "stablelm"}
"""Families that the tests train with recomputed activations.

All except stablelm have dropout, jitter or sampled experts in training mode. The layers of stablelm drop arguments.
"""
COMMON = ["llama", "mixtral", "qwen2_moe", "phi3"]
SLOW_FAMILIES = [
    "starcoder2",
    "phimoe, window",
    "opt",
    "gpt_bigcode",
    "afmoe",
    "jetmoe",
    "glm4",
    "deepseek_v3",
    "gpt_neox",
    "biogpt",
    "stablelm",
    "gpt_oss",
]
FAMILIES = [
    *((name, name in RECOMPUTED) for name in COMMON),
    *(pytest.param(name, name in RECOMPUTED, marks=pytest.mark.slow) for name in SLOW_FAMILIES),
    pytest.param("gpt_oss", True, marks=pytest.mark.slow),  # attention sinks
]
"""Families and variants, and whether activations are recomputed.

test_fsdp_invariance.py tests further families, and a nightly test tests all families.
"""


def make_family(path, name, **settings):
    """Save a model of a family, or of a named variant of a family."""
    family, variant_settings = VARIANTS.get(name, (name, {}))
    return make_plain_family(path, family, **(variant_settings | settings))


def plain_gradients(path, batch) -> dict[str, torch.Tensor]:
    """Compute gradients of `loss_fn` with transformers, one sequence at a time in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for index in range(len(batch)):
        ids = batch["input_ids"][index][batch["attention_mask"][index]]
        logits = model(ids[None], use_cache=False).logits[0, :-1].float() / batch["temperature"][index]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        weights = (batch["advantages"] * batch["loss_mask"])[index, 1 : len(ids)]
        (-(logprobs * weights).sum() / loss_weight_fn(batch)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "recomputes"), FAMILIES)
def test_packed_logprobs_and_gradients_equal_single_sequences(family, recomputes, tmp_path):
    path, batch = str(make_family(tmp_path, family)), make_batch()
    expected_logprobs, _ = plain_logprobs_and_entropy(path, batch)
    optimizer = OptimizerConfig(max_grad_norm=1e9)
    engine = make_engine(path, optimizer=optimizer, gradient_checkpointing=recomputes)
    gradients = record_gradients(engine)

    torch.testing.assert_close(engine.forward(batch, logprobs_of), expected_logprobs, atol=2e-5, rtol=0)
    engine.train_batch(batch, loss_fn, loss_weight_fn)

    for name, expected in plain_gradients(path, batch).items():
        bound = 1e-4 * expected.abs().max().item() + 1e-7
        torch.testing.assert_close(
            gradients[name], expected, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", ["phi3", "llama, dynamic rope"], ids=["longrope", "dynamic"])
def test_rotary_frequencies_depend_on_each_sequence_length(family, tmp_path):
    path, batch = str(make_family(tmp_path, family)), make_batch()
    assert min(batch["attention_mask"].sum(1)) <= 8 < max(batch["attention_mask"].sum(1))
    # one model per sequence, because transformers keeps the frequencies of the longest input
    single = [plain_logprobs_and_entropy(path, select(batch, [index]))[0] for index in range(len(batch))]
    expected = torch.cat([F.pad(logprobs, (0, batch["input_ids"].shape[1] - logprobs.shape[1])) for logprobs in single])

    for micro_batch in (19, 10_000):
        actual = make_engine(path, micro_batch=micro_batch).forward(batch, logprobs_of)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "settings", "fault"),
    [
        ("qwen2_moe", {"sliding_window": 4096, "max_position_embeddings": 8192}, "a window only in the mask"),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 8192}, "an ignored window"),
        ("phi3", {}, "frequencies of the longest sequence"),
    ],
)
def test_verify_detects_faults_in_long_windows_and_rope(family, settings, fault, tmp_path, monkeypatch):
    path = str(make_family(tmp_path, family, **settings))
    make_engine(path).destroy()
    if family == "phi3":
        monkeypatch.setattr(RowFrequencies, "rows", lambda self, *_: None)
    else:
        original = attention._one_segment
        monkeypatch.setattr(
            attention, "_one_segment", lambda q, k, v, scale, _, *more: original(q, k, v, scale, None, *more)
        )

    with pytest.raises(ModelError, match="packed sequences differ by"):
        make_engine(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_verify_with_layers_that_mix_sequences_rejects(family, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "other_layers", lambda _: [])  # disable the check of the configuration
    settings = {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    path = str(make_family(tmp_path, family, spread=None, **settings))

    with pytest.raises(ModelError, match=r"mix packed sequences|expected full or sliding attention, found 'hybrid'"):
        make_engine(path)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama4_text", "layers of type ['chunked_attention']"),
        ("qwen3_next", "layers of type ['linear_attention']"),
        # gptj is supported since transformers 5.24
        ("falcon", "attention to be replaced"),
    ],
)
def test_initialize_with_unsupported_family_names_reason(family, reason, tmp_path):
    path = str(make_family(tmp_path, family))

    with pytest.raises(ModelError, match=re.escape(reason)):
        make_engine(path)


@pytest.mark.parametrize("only_with_gradients", [False, True])
def test_verify_with_randomness_in_evaluation_mode_rejects(only_with_gradients, tmp_path, monkeypatch):
    original = attention._one_segment

    def drop(*arguments):
        out = original(*arguments)
        return out if only_with_gradients and not torch.is_grad_enabled() else torch.nn.functional.dropout(out, 0.1)

    monkeypatch.setattr(attention, "_one_segment", drop)

    with pytest.raises(ModelError, match=r"forward passes with gradients differ by .* random"):
        make_engine(str(make_family(tmp_path, "llama")))


@pytest.mark.parametrize("family", ["llama", "biogpt"])
def test_decoder_layers_without_declaration_are_found(family, tmp_path):
    """Each layer is sharded, compiled and checkpointed separately, so the layers must be found in every family."""
    engine = make_engine(str(make_family(tmp_path, family)))

    layers = decoder_layers(engine._model)

    assert len(layers) == 2
    assert bool(engine._model.model._no_split_modules) == (family == "llama")
