"""Directories that are written completely or not at all."""

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
    """Yield a scratch directory to write into, and rename it to `path` at the end of the block (collective).

    The scratch directory is next to the final one. Rank 0 creates and renames it. If the block fails on any rank, the
    scratch directory is deleted.

    Args:
        path: the directory to create; it must be new or empty.
        parallel: the ranks that write together.

    Raises:
        ModelError: the directory exists and is not empty.
        EngineError: with several ranks, on all of them: any rank failed to prepare, write or rename the directory. A
            single rank raises its own error instead.
    """
    final = Path(path)
    scratch = final.with_name(f".{final.name}.partial")
    with parallel.agree_on_errors(f"preparing {final}"):
        if parallel.is_main:
            if final.exists() and (not final.is_dir() or any(final.iterdir())):
                raise ModelError(f"{final}: expected a new or empty directory, found existing files; use another path.")
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
            os.replace(scratch, final)  # also replaces an empty directory
