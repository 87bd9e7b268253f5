"""Checks of Hugging Face model directories. They import nothing heavy, so that they can run early."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rl_contracts.errors import ModelError

IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Settings of a vision-language model with the token id that it replaces by image features, in order of preference."""
_WRITERS = ("_name_or_path", "transformers_version")
"""Settings of a model that identify the software or path it was written from."""


def check_model_directory(
    path: str, name: str = "model", weights: Sequence[str] = ("*.safetensors",), tokenizer: bool = False
) -> None:
    """Reject a local path that is not a model directory; a path that looks like a hub id passes.

    Args:
        path: a directory, or a hub id.
        name: setting that holds the path, for the message.
        weights: patterns of file names, at least one of which must match.
        tokenizer: whether the directory must contain a tokenizer.

    Raises:
        ModelError: a required file is missing, a safetensors file is truncated or invalid, or a settings file
            (`config.json`, a tokenizer's) is not a JSON object.
    """
    directory = Path(path)
    if not (directory.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1):
        return
    entries = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    placeholder = "nothing in it" if directory.is_dir() else "nothing there (there is no such directory)"
    placeholder = "a file" if directory.is_file() else placeholder
    listing = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "") or placeholder
    needed = {"config.json": ["config.json"], f"weights ({' or '.join(weights)}) beside config.json": weights}
    if tokenizer:
        needed["a tokenizer (tokenizer.json) beside the weights"] = ["tokenizer*"]
    for requirement, patterns in needed.items():
        if not any(fnmatch(entry, pattern) for entry in entries for pattern in patterns):
            raise ModelError(
                f"{name} {path}: expected {requirement}, found {listing}. Give a directory written by "
                "`save_pretrained` or downloaded whole from a hub, or a run's checkpoints/step_<n>."
            )
    for file in sorted({*_indexed_files(directory), *directory.glob("*.safetensors")}):
        if problem := _safetensors_problem(file):
            raise ModelError(f"{name} {path}: {file.name} {problem}. Copy or download it again.")
    for file in (directory / "config.json", *(sorted(directory.glob("tokenizer*.json")) if tokenizer else ())):
        if problem := _json_problem(file):
            raise ModelError(f"{name} {path}: {file.name} {problem}. Copy or download it again.")


def _indexed_files(directory: Path) -> set[Path]:
    """Return the files listed in the weight indexes (`*.safetensors.index.json`) of a directory."""
    shards = {shard for file in directory.glob("*.safetensors.index.json") for shard in _shards_of(file)}
    return {directory / shard for shard in shards}


def _json_problem(file: Path) -> str:
    """Return a description of the damage in a JSON settings file, or an empty string."""
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        return f"cannot be read as JSON ({error})"
    return "" if isinstance(settings, dict) else f"is not a JSON object: {str(settings)[:40]}"


def _shards_of(index: Path) -> list[str]:
    """Return the files that a weight index lists; none if it cannot be read, which loading the model reports."""
    try:
        return [*json.loads(index.read_text())["weight_map"].values()]
    except (OSError, ValueError, KeyError, AttributeError):
        return []


def _safetensors_problem(file: Path) -> str:
    """Return a description of the damage in a safetensors file, or an empty string. Reads only header and size."""
    try:
        size, (length, entries) = file.stat().st_size, _header(file)
        expected = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read as safetensors ({type(error).__name__}: {error})"
    return "" if size == expected else f"is truncated or damaged: its header implies {expected} bytes, found {size}"


def _header(file: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the length in bytes of a safetensors file's header, and its entry for each tensor."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(min(length, file.stat().st_size)))
    return length, [entry for name, entry in header.items() if name != "__metadata__"]


def parameters_in(path: str) -> int:
    """Return the number of parameters in the safetensors files of a model directory; 0 without such files.

    If there is an index, or else a `model.safetensors`, only its files count: other files repeat the same parameters.
    """
    single = Path(path, "model.safetensors")
    files = _indexed_files(Path(path)) or ([single] if single.exists() else Path(path).glob("*.safetensors"))
    entries = (entry for file in files for entry in _header(file)[1])
    return sum(math.prod(entry["shape"]) for entry in entries)


def context_length(path: str) -> int | None:
    """Return the maximum sequence length in tokens from a model's `config.json`, or None if it is not set."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next((size for name in names if (size := _size(path, name))), None)


def vocabulary_size(path: str) -> int | None:
    """Return the vocabulary size from a model's `config.json`, or None if it is not set."""
    return _size(path, "vocab_size")


def image_token(path: str) -> int | None:
    """Return the token id that a vision-language model replaces by image features, or None if its config has none."""
    settings = _config(path)
    return next((token for name in IMAGE_TOKENS if isinstance(token := settings.get(name), int)), None)


def end_ids(path: str) -> list[int]:
    """Return the ids of the end-of-text tokens from `generation_config.json`; empty if it names none."""
    ids = _config(path, "generation_config.json").get("eos_token_id")
    return [token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int)]


def same_model(one: str, other: str) -> bool:
    """Return whether two directories hold models of the same architecture and size, regardless of their weights.

    They do if they are the same directory, or if their `config.json` files have the same settings. A hub id stands for
    its directory in the hub's cache.
    """
    if one == other or Path(one).resolve() == Path(other).resolve():
        return True
    if any(f"models--{a.replace('/', '--')}" in Path(b).parts for a, b in ((one, other), (other, one))):
        return True
    configs = [{key: value for key, value in _config(path).items() if key not in _WRITERS} for path in (one, other)]
    return bool(configs[0]) and configs[0] == configs[1]


def _size(path: str, name: str) -> int | None:
    """Return a size of the language model in a directory, or None if its settings lack it."""
    settings = _config(path)
    try:
        return int((settings.get("text_config") or settings)[name])
    except (KeyError, TypeError, ValueError):  # loading the model reports the problem
        return None


def _config(path: str, file: str = "config.json") -> dict[str, Any]:
    """Return the settings in a file of a model directory; empty if they cannot be read."""
    try:
        settings = json.loads((Path(path) / file).read_text())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
