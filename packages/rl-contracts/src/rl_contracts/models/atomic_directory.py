"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_contracts.runtime.file_modes import follow_umask


@contextmanager
def new_directory(path: str, parallel: ParallelContext) -> Iterator[Path]:
    """A block that writes a directory which appears whole or not at all (collective).

    The block is given the directory to write into, beside the one of that name; at its end rank 0 renames it, unless
    the block failed on any rank.

    Raises:
        ModelError, EngineError: the directory exists already and is not empty, or cannot be made; or the block failed.
    """
    final = Path(path)
    scratch = final.with_name(f".{final.name}.partial")
    with parallel.agree_on_errors(f"preparing {final}"):
        if parallel.is_main:
            if final.exists() and (not final.is_dir() or any(final.iterdir())):
                raise ModelError(f"{final}: expected a new directory to save into, found one with files.")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
    try:
        with parallel.agree_on_errors(f"saving {final}"):
            yield scratch
    except Exception:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    with parallel.agree_on_errors(f"renaming {scratch}"):
        if parallel.is_main:
            follow_umask(scratch)
            os.replace(scratch, final)  # also takes the place of an empty directory
