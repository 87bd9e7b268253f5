import json
from pathlib import Path

import pytest
import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of
from safetensors.torch import load_file, save_file

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ModelError
from rl_contracts.models.config_files import read_config
from rl_engines_fsdp import LoRAConfig


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


# ---- publishing weights


def test_full_parameters_have_hugging_face_names_and_served_dtype(model_path):
    from transformers import AutoModelForCausalLM

    engine = make_engine(model_path, serve_dtype="bfloat16")
    engine.train_batch(make_batch(), loss_fn, loss_weight_fn)

    published = dict(engine.full_parameters())

    assert [spec.name for spec in engine.param_specs()] == list(published)
    assert {spec.dtype for spec in engine.param_specs()} == {"bfloat16"}
    for name, value in weights_of(engine).items():
        assert torch.equal(published[name], value)
    server_model = AutoModelForCausalLM.from_pretrained(model_path)
    report = server_model.load_state_dict(published, strict=False)
    assert report.missing_keys == ["lm_head.weight"]  # tied weights are sent once
    assert not report.unexpected_keys


def test_as_served_computes_with_published_weights(model_path, tmp_path):
    engine = make_engine(model_path, serve_dtype="bfloat16")
    engine.train_batch(make_batch(), loss_fn, loss_weight_fn)
    weights, logprobs = weights_of(engine), engine.forward(make_batch(), logprobs_of)

    with engine.as_served():
        served_logprobs = engine.forward(make_batch(), logprobs_of)

    engine.save(SaveLoadMeta(str(tmp_path / "published")))
    published = make_engine(str(tmp_path / "published"))
    assert torch.equal(served_logprobs, published.forward(make_batch(), logprobs_of))
    assert not torch.equal(served_logprobs, logprobs)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(engine).items())
    with pytest.raises(ZeroDivisionError), engine.as_served():
        1 / 0  # noqa: B018
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(engine).items())
    for settings in ({}, {"lora": LoRAConfig(), "serve_dtype": "bfloat16"}, {"dtype": "bfloat16"}):
        assert make_engine(model_path, **settings).as_served() is None


# ---- Hugging Face directories


def test_save_hf_loads_with_transformers_and_gives_the_same_logprobs(tmp_path):
    from transformers import AutoModelForCausalLM

    engine = make_engine(make_model(tmp_path / "model", "Llama"))  # not tied; the conformance suite has a tied model
    engine.train_batch(make_batch(), loss_fn, loss_weight_fn)
    target = tmp_path / "saved"

    engine.save(SaveLoadMeta(str(target)))

    loaded = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
    for name, value in weights_of(engine).items():
        assert torch.equal(loaded[name], value)
    reloaded = make_engine(str(target)).forward(make_batch(), logprobs_of)
    torch.testing.assert_close(reloaded, engine.forward(make_batch(), logprobs_of), atol=0, rtol=0)


def test_save_hf_keeps_generation_config_and_copies_tokenizer_files(tmp_path):
    path = Path(make_model(tmp_path / "model"))
    # transformers rejects these settings on save: a temperature without sampling
    settings = {"do_sample": False, "temperature": 0.7, "eos_token_id": [3, 5]}
    (path / "generation_config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_text("{}")
    target = tmp_path / "saved"

    make_engine(str(path)).save(SaveLoadMeta(str(target), tokenizer_path=str(path)))

    saved = json.loads((target / "generation_config.json").read_text())
    assert {name: saved.get(name, False) for name in settings} == settings
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {f.name for f in target.iterdir()}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "saved"]  # no temporary files remain


def test_save_hf_in_several_files_has_an_index_and_loads(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_engines_fsdp.checkpoint.hugging_face.MAX_FILE_BYTES", 20_000)
    engine, target = make_engine(model_path), tmp_path / "saved"

    engine.save(SaveLoadMeta(str(target)))

    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {file.name for file in files}
    expected = weights_of(engine)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(make_engine(str(target))).items())


def test_save_that_is_rejected_or_fails_leaves_no_files(model_path, tmp_path):
    engine, target = make_engine(model_path), tmp_path / "saved"

    with pytest.raises(ModelError, match="tokenizer"):
        engine.save(SaveLoadMeta(str(target), tokenizer_path=str(tmp_path / "no tokenizer")))
    with pytest.raises(ModelError, match="'onnx'"):
        engine.save(SaveLoadMeta(str(target), kind="onnx"))

    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.txt").write_text("content")
    with pytest.raises(ModelError, match="empty directory"):
        engine.save(SaveLoadMeta(str(tmp_path)))


# ---- states


def test_load_of_another_kind_or_model_is_rejected(model_path, tmp_path):
    engine, other = make_engine(model_path), make_model(tmp_path / "llama", "Llama")
    make_engine(other).save(SaveLoadMeta(str(tmp_path / "state"), kind="state"))

    with pytest.raises(ModelError, match="kind 'hf'"):
        engine.load(SaveLoadMeta(model_path, kind="state"))
    with pytest.raises(ModelError, match="same model"):
        engine.load(SaveLoadMeta(other))
    with pytest.raises(ModelError, match="does not match this model"):
        engine.load(SaveLoadMeta(str(tmp_path / "state"), kind="state"))


def test_save_hf_omits_missing_model_code(tmp_path):
    path = Path(make_model(tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))

    make_engine(str(path)).save(SaveLoadMeta(str(tmp_path / "saved")))

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # without and with fully_shard
def test_model_tied_in_config_but_not_in_weights_is_untied(dtype, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(make_model(tmp_path / "model", tie_word_embeddings=True))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = make_engine(str(path), dtype=dtype)

    engine.save(SaveLoadMeta(str(tmp_path / "saved")))

    assert not AutoConfig.from_pretrained(tmp_path / "saved").tie_word_embeddings
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    torch.testing.assert_close(saved.lm_head.weight, weights["lm_head.weight"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("file", "prefix"), [("pytorch_model.bin", ""), ("model.safetensors", "language_model.")])
def test_read_config_with_untied_weights_file_unties(file, prefix, tmp_path):
    path = Path(make_model(tmp_path / "model", tie_word_embeddings=True))
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    weights = {prefix + name: value for name, value in weights.items()}
    save = torch.save if file.endswith("bin") else save_file
    save(weights, path / file)

    assert not read_config(str(path)).tie_word_embeddings


def test_read_config_with_equal_head_in_file_stays_tied(tmp_path):
    path = Path(make_model(tmp_path / "model", tie_word_embeddings=True))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})

    assert read_config(str(path)).tie_word_embeddings
