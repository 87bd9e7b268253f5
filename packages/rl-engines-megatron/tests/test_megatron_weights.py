"""Which files of a Hugging Face directory are read, and what may lie in them."""

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


def weights_of(path, save=None, **settings):
    """As they come out of the engine, which saves them too."""
    engine = MegatronEngine(MegatronEngineConfig(**settings))
    try:
        engine.initialize(FinetuneSpec(str(path), 1, device="cpu", optimizer=None))
        if save is not None:
            engine.save(SaveLoadMeta(str(save), "hf"))
        return {name: tensor.clone() for name, tensor in engine.full_parameters()}
    finally:
        engine.destroy()


def test_weights_beside_others_and_with_stored_rotary_buffers_are_loaded(model):
    stored = load_file(model / "model.safetensors")
    of_others = {"layers.0.attention.wq.weight": torch.ones(2)}
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file(of_others, model / name)
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(16) for n in range(2)}
    save_file(stored | buffers | {HEAD: stored[EMBEDDING].clone()}, model / "model.safetensors", {"format": "pt"})

    found = weights_of(model)

    assert found.keys() == stored.keys()
    assert all(same_bits(found[name], stored[name]) for name in stored)


def test_head_that_differs_from_the_embedding_is_untied(model, tmp_path):
    stored = load_file(model / "model.safetensors")
    stored[HEAD] = stored[EMBEDDING] + 1
    save_file(stored, model / "model.safetensors", {"format": "pt"})

    found = weights_of(model, save=tmp_path / "saved")

    assert torch.equal(found[HEAD], stored[HEAD])
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False


def test_weight_files_are_those_of_the_index_where_there_is_one(tmp_path):
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
def test_check_weights_that_would_not_be_read_are_refused_before_anything_starts(model, name):
    (model / "model.safetensors").rename(model / name)

    with pytest.raises(ConfigError, match=rf"expected model\.safetensors\.index\.json or .*, found {name}\. Load it"):
        MegatronEngineConfig().check(ParallelStrategy(tensor=2), FinetuneSpec(str(model), 1, device="cpu"))


@pytest.mark.slow
def test_export_in_several_files_is_loaded_by_transformers_and_again(model, tmp_path):
    stored, saved = load_file(model / "model.safetensors"), tmp_path / "saved"

    weights_of(model, saved, max_shard_gb=1e-4)

    sizes = [file.stat().st_size for file in saved.glob("*.safetensors")]
    assert len(sizes) >= 3
    assert max(sizes) < 1.1e5
    theirs = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    ours = weights_of(saved)
    assert all(same_bits(found[name], stored[name]) for name in stored for found in (theirs, ours))
