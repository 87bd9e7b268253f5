"""Whether a path is a Hugging Face model directory; imports nothing heavy, so that it can be asked early."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from rl_contracts.errors import ModelError


def check_model_directory(
    path: str, name: str = "model", weights: Sequence[str] = ("*.safetensors",), tokenizer: bool = False
) -> None:
    """Refuse a local path that is no model directory; what looks like a hub id passes.

    Args:
        path: a directory, or a hub id.
        name: what has this value, for the message.
        weights: patterns of file names of which one must be there.
        tokenizer: whether there must be one.

    Raises:
        ModelError: says what was expected and what is there.
    """
    directory = Path(path)
    if not (directory.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1):
        return
    found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    absent = "nothing in it" if directory.is_dir() else "nothing there (there is no such directory)"
    listing = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") or absent
    needed = {"config.json": ["config.json"], f"weights ({' or '.join(weights)}) beside config.json": weights}
    if tokenizer:
        needed["a tokenizer (tokenizer.json) beside the weights"] = ["tokenizer*"]
    for what, patterns in needed.items():
        if not any(fnmatch(entry, pattern) for entry in found for pattern in patterns):
            raise ModelError(
                f"{name} {path}: expected {what}, found {listing}. Give a directory written by `save_pretrained` or "
                "downloaded whole from a hub, or a run's checkpoints/step_<n>."
            )
