"""What a checkpoint has to hold: all that its source holds, for models that keep more than parameters."""

import json
from pathlib import Path

import pytest
import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine
from safetensors import safe_open
from test_fsdp_packed_forward import plain_logprobs_and_entropy

from rl_contracts.data import SaveLoadMeta
from rl_contracts.testing.families import make_family

KEEPING_BUFFERS = [
    "deepseek_v3",
    "gemma4_text",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4_moe", "apertus", "minimax_m2")),
]


def stored(path) -> dict[str, torch.Tensor]:
    """What the files of a model directory hold."""
    found = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def with_moved_buffers(path) -> dict[str, torch.Tensor]:
    """Give the persistent buffers of a model directory values that no fresh model has; returns them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    names = model.state_dict().keys() - dict(model.named_parameters()).keys() - {"lm_head.weight"}
    assert names
    for name in names:
        model.get_buffer(name).add_(0.25)
    model.save_pretrained(path)
    ends = {name.rpartition(".")[2] for name in names}
    moved = {name: value for name, value in stored(path).items() if name.rpartition(".")[2] in ends}
    assert len(moved) == len(names)
    return moved


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", KEEPING_BUFFERS)
def test_export_has_the_keys_of_its_source_and_what_no_step_changes_as_it_was(family, dtype, tmp_path):
    source = make_family(tmp_path / "source", family)
    moved = with_moved_buffers(source)
    engine = make_engine(str(source), dtype=dtype)
    engine.train_batch(make_batch(), loss_fn, loss_weight_fn)

    engine.save(SaveLoadMeta(str(tmp_path / "saved")))

    saved = stored(tmp_path / "saved")
    assert saved.keys() == stored(source).keys()
    assert all(torch.equal(saved[name], value) for name, value in moved.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", KEEPING_BUFFERS)
def test_export_loads_with_transformers_and_in_the_engine_and_says_the_same(family, tmp_path):
    source = make_family(tmp_path / "source", family)
    with_moved_buffers(source)
    engine, batch = make_engine(str(source)), make_batch()
    engine.train_batch(batch, loss_fn, loss_weight_fn)
    expected = engine.forward(batch, logprobs_of)

    engine.save(SaveLoadMeta(str(tmp_path / "saved")))

    found, _ = plain_logprobs_and_entropy(str(tmp_path / "saved"), batch)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    fresh = make_engine(str(tmp_path / "saved"))
    torch.testing.assert_close(fresh.forward(batch, logprobs_of), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_hf_restores_what_is_kept_beside_the_parameters(dtype, tmp_path):
    first, second = (str(make_family(tmp_path / str(seed), "deepseek_v3", seed)) for seed in (0, 1))
    with_moved_buffers(second)
    engine, batch = make_engine(first, dtype=dtype), make_batch()

    engine.load(SaveLoadMeta(second))

    expected = make_engine(second, dtype=dtype).forward(batch, logprobs_of)
    torch.testing.assert_close(engine.forward(batch, logprobs_of), expected, atol=1e-6, rtol=1e-6)


def test_export_keeps_the_settings_of_its_source(tmp_path):
    source = make_family(tmp_path / "source", "starcoder2")
    before = json.loads((source / "config.json").read_text())

    make_engine(str(source), dtype="bfloat16").save(SaveLoadMeta(str(tmp_path / "saved")))

    after = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert after == before | {"dtype": "bfloat16"}
