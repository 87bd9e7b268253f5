"""Loading and saving of Hugging Face directories: files that are read, and their contents."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import ConfigError, ModelError
from rl_contracts.testing import make_tiny_model
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig
from rl_engines_megatron.model.checks import weight_files
from rl_engines_megatron.weights.layouts import same_bits

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "model")


def weights_of(path, save=None):
    """Return the weights of an engine that loads a model, and optionally saves it."""
    engine = MegatronEngine(MegatronEngineConfig())
    try:
        engine.initialize(FinetuneSpec(str(path), 1, device="cpu", optimizer=None))
        if save is not None:
            engine.save(SaveLoadMeta(str(save), "hf"))
        return {name: tensor.clone() for name, tensor in engine.full_parameters()}
    finally:
        engine.destroy()


def test_load_ignores_other_weight_files_and_rotary_buffers(model):
    stored = load_file(model / "model.safetensors")
    foreign = {"layers.0.attention.wq.weight": torch.ones(2)}
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file(foreign, model / name)
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(16) for n in range(2)}
    save_file(stored | buffers | {HEAD: stored[EMBEDDING].clone()}, model / "model.safetensors", {"format": "pt"})

    loaded = weights_of(model)

    assert loaded.keys() == stored.keys()
    assert all(same_bits(loaded[name], stored[name]) for name in stored)


def test_lm_head_that_differs_from_embedding_is_untied(model, tmp_path):
    stored = load_file(model / "model.safetensors")
    stored[HEAD] = stored[EMBEDDING] + 1
    save_file(stored, model / "model.safetensors", {"format": "pt"})

    loaded = weights_of(model, save=tmp_path / "saved")

    assert torch.equal(loaded[HEAD], stored[HEAD])
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False


def test_weight_files_follow_index_if_it_exists(tmp_path):
    for name in ("model.safetensors", "a.safetensors", "b.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(str(tmp_path)) == [tmp_path / "model.safetensors"]

    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(str(tmp_path)) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]

    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json cannot be read: KeyError\('weight_map'\)\. Copy"):
        weight_files(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors"])
def test_check_rejects_weights_that_would_not_be_loaded(model, name):
    (model / "model.safetensors").rename(model / name)

    with pytest.raises(ConfigError, match=rf"expected model\.safetensors\.index\.json or .*, found {name}\."):
        MegatronEngineConfig().check(ParallelStrategy(tensor=2), FinetuneSpec(str(model), 1, device="cpu"))


@pytest.mark.slow
def test_export_in_several_files_is_loaded_by_transformers_and_engine(model, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_engines_megatron.weights.export.MAX_FILE_BYTES", 100_000)
    stored, saved = load_file(model / "model.safetensors"), tmp_path / "saved"

    weights_of(model, saved)

    sizes = [file.stat().st_size for file in saved.glob("*.safetensors")]
    assert len(sizes) >= 3
    assert max(sizes) < 1.1e5
    by_transformers = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    by_engine = weights_of(saved)
    assert all(same_bits(loaded[name], stored[name]) for name in stored for loaded in (by_transformers, by_engine))
