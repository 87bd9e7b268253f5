"""Whether a path is a Hugging Face model directory; imports nothing heavy, so that it can be asked early."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rl_contracts.errors import ModelError

_WRITERS = ("_name_or_path", "transformers_version")
"""Settings of a model that say who wrote them."""


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
        ModelError: says what was expected and what is there; also of a safetensors file that is cut off or none at all,
            and of settings (`config.json`, a tokenizer's) that are no JSON.
    """
    directory = Path(path)
    if not (directory.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1):
        return
    found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    absent = "nothing in it" if directory.is_dir() else "nothing there (there is no such directory)"
    absent = "a file" if directory.is_file() else absent
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
    for file in sorted({*_sharded(directory), *directory.glob("*.safetensors")}):
        if problem := _unreadable(file):
            raise ModelError(f"{name} {path}: {file.name} {problem}. Copy or download it again.")
    for file in (directory / "config.json", *(sorted(directory.glob("tokenizer*.json")) if tokenizer else ())):
        if problem := _no_json(file):
            raise ModelError(f"{name} {path}: {file.name} {problem}. Copy or download it again.")


def _sharded(directory: Path) -> set[Path]:
    """The files that the indices of weights in a directory name."""
    shards = {shard for file in directory.glob("*.safetensors.index.json") for shard in _shards_of(file)}
    return {directory / shard for shard in shards}


def _no_json(file: Path) -> str:
    """What is wrong with a file of settings; empty where nothing is."""
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        return f"cannot be read as JSON ({error})"
    return "" if isinstance(settings, dict) else f"is no JSON object: {str(settings)[:40]}"


def _shards_of(index: Path) -> list[str]:
    """The files that an index of weights names; none where it cannot be read: whoever loads it says so."""
    try:
        return [*json.loads(index.read_text())["weight_map"].values()]
    except (OSError, ValueError, KeyError, AttributeError):
        return []


def _unreadable(file: Path) -> str:
    """What is wrong with a safetensors file, by its header and its size; empty where nothing is."""
    try:
        size, (length, entries) = file.stat().st_size, _header(file)
        whole = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read as safetensors ({type(error).__name__}: {error})"
    return "" if size == whole else f"is cut off or damaged: expected {whole} bytes by its header, found {size}"


def _header(file: Path) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of the header of a safetensors file, and what it says of each tensor."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(min(length, file.stat().st_size)))
    return length, [entry for name, entry in header.items() if name != "__metadata__"]


def parameters_in(path: str) -> int:
    """Number of parameters in the safetensors files of a model directory; 0 where it has none. Beside files that an
    index names, or `model.safetensors`, others hold the same once more."""
    one = Path(path, "model.safetensors")
    files = _sharded(Path(path)) or ([one] if one.exists() else Path(path).glob("*.safetensors"))
    entries = (entry for file in files for entry in _header(file)[1])
    return sum(math.prod(entry["shape"]) for entry in entries)


def context_length(path: str) -> int | None:
    """Tokens that the model of a directory can hold, by its `config.json`; None where that does not say."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next((size for name in names if (size := _size(path, name))), None)


def vocabulary_size(path: str) -> int | None:
    """Tokens that the model of a directory gives a probability, by its `config.json`; None where that does not say."""
    return _size(path, "vocab_size")


def end_ids(path: str) -> list[int]:
    """Ids of the tokens that end a text, by the `generation_config.json` of a directory; empty if it names none."""
    found = _config(path, "generation_config.json").get("eos_token_id")
    return [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]


def same_model(one: str, other: str) -> bool:
    """Whether two directories hold models of one architecture and size, whatever their weights are: they are one, or
    their `config.json` say the same. A hub id stands for its directory in the hub's cache."""
    if one == other or Path(one).resolve() == Path(other).resolve():
        return True
    if any(f"models--{a.replace('/', '--')}" in Path(b).parts for a, b in ((one, other), (other, one))):
        return True
    sides = [{key: value for key, value in _config(path).items() if key not in _WRITERS} for path in (one, other)]
    return bool(sides[0]) and sides[0] == sides[1]


def _size(path: str, name: str) -> int | None:
    """A size of the language model in a directory; None where its settings do not say."""
    found = _config(path)
    try:
        return int((found.get("text_config") or found)[name])
    except (KeyError, TypeError, ValueError):  # whoever loads the model says what is wrong with it
        return None


def _config(path: str, file: str = "config.json") -> dict[str, Any]:
    """The settings in a file of a model directory; empty if they cannot be read."""
    try:
        found = json.loads((Path(path) / file).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
