"""Saved Hugging Face directories contain all tensors of their source, including persistent buffers."""

import json
from pathlib import Path

import pytest
import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine
from safetensors import safe_open
from test_fsdp_packed_forward import plain_logprobs_and_entropy

from rl_contracts.data import SaveLoadMeta
from rl_contracts.testing.families import make_family

FAMILIES_WITH_BUFFERS = [
    ("deepseek_v3", "bfloat16"),
    ("gemma4_text", "float32"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("glm4_moe", "float32"), ("apertus", "bfloat16"), ("minimax_m2", "float32"))
    ),
]


def read_tensors(path) -> dict[str, torch.Tensor]:
    """Return the tensors in the files of a model directory."""
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


def change_buffers(path) -> dict[str, torch.Tensor]:
    """Change the persistent buffers of a model directory to non-default values, and return them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    names = model.state_dict().keys() - dict(model.named_parameters()).keys() - {"lm_head.weight"}
    assert names
    for name in names:
        model.get_buffer(name).add_(0.25)
    model.save_pretrained(path)
    suffixes = {name.rpartition(".")[2] for name in names}
    changed = {name: value for name, value in read_tensors(path).items() if name.rpartition(".")[2] in suffixes}
    assert len(changed) == len(names)
    return changed


@pytest.mark.parametrize(("family", "dtype"), FAMILIES_WITH_BUFFERS)
def test_save_hf_keeps_source_keys_buffers_and_logprobs(family, dtype, tmp_path):
    source = make_family(tmp_path / "source", family)
    buffers = change_buffers(source)
    engine, batch = make_engine(str(source), dtype=dtype), make_batch()
    engine.train_batch(batch, loss_fn, loss_weight_fn)

    engine.save(SaveLoadMeta(str(tmp_path / "saved")))

    saved = read_tensors(tmp_path / "saved")
    assert saved.keys() == read_tensors(source).keys()
    assert all(torch.equal(saved[name], value) for name, value in buffers.items())
    if dtype == "float32":
        expected = engine.forward(batch, logprobs_of)
        actual, _ = plain_logprobs_and_entropy(str(tmp_path / "saved"), batch)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
        reloaded = make_engine(str(tmp_path / "saved")).forward(batch, logprobs_of)
        torch.testing.assert_close(reloaded, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_hf_restores_persistent_buffers(dtype, tmp_path):
    first, second = (str(make_family(tmp_path / str(seed), "deepseek_v3", seed)) for seed in (0, 1))
    change_buffers(second)
    engine, batch = make_engine(first, dtype=dtype), make_batch()

    engine.load(SaveLoadMeta(second))

    expected = make_engine(second, dtype=dtype).forward(batch, logprobs_of)
    torch.testing.assert_close(engine.forward(batch, logprobs_of), expected, atol=1e-6, rtol=1e-6)


def test_save_hf_keeps_source_config(tmp_path):
    source = make_family(tmp_path / "source", "starcoder2")
    before = json.loads((source / "config.json").read_text())

    make_engine(str(source), dtype="bfloat16").save(SaveLoadMeta(str(tmp_path / "saved")))

    after = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert after == before | {"dtype": "bfloat16"}
