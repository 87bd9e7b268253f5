"""A cache of directories, each under the hash of everything that it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_contracts.errors import ModelError
from rl_contracts.logging import get_logger

_KEY_LENGTH = 16


def default_cache_dir() -> Path:
    """`$HF_HOME/rl/embedded` if Hugging Face's home is set, else `~/.cache/rl/embedded`."""
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rl" / "embedded"


def key_of(ingredients: Mapping[str, Any], sources: list[Path]) -> str:
    """A short hash of JSON values and of the source files that turn them into a model."""
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode())
    for source in sorted(sources, key=lambda path: path.name):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:_KEY_LENGTH]


def cached(cache_dir: Path, key: str, make: Callable[[Path], None]) -> Path:
    """The directory of `key`, made by `make` if there is none yet.

    `make` fills a directory of its own, which then takes its place under one rename: what stands there is whole. Of
    several processes that make the same key at once, the first to finish is kept.

    Raises:
        ModelError: the cache directory cannot be written.
    """
    final = cache_dir / key
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache_dir))
    except OSError as error:
        raise ModelError(
            f"the embedded model cannot be cached: expected a directory to write to, found {cache_dir} ({error}). "
            "Set HF_HOME to a directory of yours."
        ) from error
    try:
        make(unfinished)
        unfinished.chmod(0o755)  # temporary directories are private; a cache may be shared
        unfinished.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        get_logger("embedded").debug("another process made %s first", final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final
