"""What is taken for a model directory, and what is said of anything else."""

import pytest

from rl_contracts.errors import ModelError
from rl_contracts.model_directory import check_model_directory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "expected config.json, found nothing in it"),
        (["model.safetensors"], "expected config.json, found model.safetensors"),
        (["config.json"], r"expected weights \(\*\.safetensors\) beside config.json, found config.json"),
        (["config.json", "model.safetensors"], "expected a tokenizer"),
    ],
)
def test_directory_that_lacks_something_is_refused_with_what_is_there(files, expected, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=f"model.path {tmp_path}: {expected}"):
        check_model_directory(str(tmp_path), "model.path", tokenizer=True)


def test_missing_path_and_file_are_refused_and_hub_id_and_whole_directory_pass(tmp_path):
    for name in ("config.json", "pytorch_model-00001.bin"):
        (tmp_path / name).touch()
    for path in (str(tmp_path / "none"), str(tmp_path / "config.json"), "./none", "a/b/c"):
        with pytest.raises(ModelError, match="found nothing there"):
            check_model_directory(path)
    check_model_directory("Qwen/Qwen3-0.6B")
    check_model_directory(str(tmp_path), weights=("*.safetensors", "pytorch_model*.bin"))
