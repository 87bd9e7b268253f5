"""Checks of model directories, and their error messages."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rl_contracts.errors import ModelError
from rl_contracts.models.directory import check_model_directory, parameters_in


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "expected config.json, found nothing in it"),
        (["config.json"], r"expected weights \(\*\.safetensors\) beside config.json, found config.json"),
        (["config.json", "model.safetensors"], "expected a tokenizer"),
    ],
)
def test_check_model_directory_missing_file_raises_with_listing(files, expected, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=f"model.path {tmp_path}: {expected}"):
        check_model_directory(str(tmp_path), "model.path", tokenizer=True)


def test_check_model_directory_rejects_bad_path_and_accepts_hub_id(tmp_path):
    for name in ("config.json", "pytorch_model-00001.bin"):
        (tmp_path / name).write_text("{}")
    for path in (str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(ModelError, match="found nothing there"):
            check_model_directory(path)
    with pytest.raises(ModelError, match=r"expected config\.json, found a file"):
        check_model_directory(str(tmp_path / "config.json"))
    check_model_directory("Qwen/Qwen3-0.6B")
    check_model_directory(str(tmp_path), weights=("*.safetensors", "pytorch_model*.bin"))


def _write_and_check(names, directory, index=None):
    (directory / "config.json").write_text("{}")
    for name in names:
        save_file({"weight": torch.zeros(4, 3)}, directory / name)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_model_directory(str(directory))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "cannot be read as safetensors"),
        (bytes(range(7, 200)), "cannot be read as safetensors"),
        ((2).to_bytes(8, "little") + b"[]", "cannot be read as safetensors"),
        (None, "is truncated or damaged: .* 120 bytes, found 100"),
    ],
)
def test_check_model_directory_unreadable_weights_raise_naming_file(content, expected, tmp_path):
    _write_and_check(["model-00001.safetensors", "model-00002.safetensors"], tmp_path)
    file = tmp_path / "model-00002.safetensors"
    file.write_bytes(file.read_bytes()[:100] if content is None else content)

    with pytest.raises(ModelError, match=rf"model {tmp_path}: model-00002.safetensors {expected}"):
        check_model_directory(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", b'{"a": ', "cannot be read as JSON"),
        ("tokenizer_config.json", b'{"\xff": 1}', "cannot be read as JSON"),
        ("config.json", b"[]", r"is not a JSON object: \[\]"),
    ],
)
def test_check_model_directory_invalid_json_raises_naming_file(name, content, expected, tmp_path):
    _write_and_check(["model.safetensors"], tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_model_directory(str(tmp_path), tokenizer=True)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ModelError, match=rf"model {tmp_path}: {name} {expected}.*Copy or download it again"):
        check_model_directory(str(tmp_path), tokenizer=True)


def test_check_model_directory_missing_shard_raises_naming_it(tmp_path):
    _write_and_check(["model-1.safetensors", "model-2.safetensors"], tmp_path, {"a": "model-1.safetensors"})
    with pytest.raises(ModelError, match=r"model-3.safetensors cannot be read as safetensors .FileNotFoundError"):
        _write_and_check([], tmp_path, {"a": "model-1.safetensors", "b": "model-3.safetensors"})


def test_parameters_in_shards_with_consolidated_file_counts_once(tmp_path):
    for file in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        save_file({"weight": torch.zeros(3, 4)}, tmp_path / file)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert parameters_in(str(tmp_path)) == 24
