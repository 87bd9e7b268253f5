"""What a model directory must have; needs neither torch nor transformers, so that a mistake shows at once."""

from __future__ import annotations

from pathlib import Path

from rl_contracts.errors import ModelError

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def check_directory(path: Path) -> None:
    """Refuse what cannot be a Hugging Face model directory.

    Raises:
        ModelError: says what was expected and what is there.
    """
    if not path.is_dir():
        raise ModelError(f"model: expected a Hugging Face model directory, found no directory at {path}.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: expected a model directory with config.json, found {_listing(path)}.")
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise ModelError(
            f"{path}: expected weights (*.safetensors) beside config.json, found {_listing(path)}. "
            "Save the model there with `save_pretrained`, or point to the directory that has them."
        )


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "an empty directory"
