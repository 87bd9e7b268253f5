"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext


class NewDirectory:
    """A directory that appears whole or not at all: rank 0 writes beside it and renames."""

    def __init__(self, path: str, parallel: ParallelContext) -> None:
        self.final = Path(path)
        self.scratch = self.final.with_name(f".{self.final.name}.partial")
        self.parallel = parallel

    def prepare(self) -> None:
        """Make the scratch directory (collective).

        Raises:
            ModelError, EngineError: the directory exists already and is not empty, or cannot be made.
        """
        error: Exception | None = None
        if self.parallel.is_main:
            try:
                if self.final.exists() and (not self.final.is_dir() or any(self.final.iterdir())):
                    raise ModelError(f"{self.final}: expected a new directory to save into, found one with files.")
                shutil.rmtree(self.scratch, ignore_errors=True)
                self.scratch.mkdir(parents=True)
            except (OSError, ModelError) as failure:
                error = failure
        self.parallel.agree(error, f"preparing {self.final}")

    def commit(self, error: Exception | None) -> None:
        """Rename the scratch directory, unless writing failed on any rank (collective).

        Raises:
            EngineError: writing failed.
        """
        try:
            self.parallel.agree(error, f"saving {self.final}")
        except Exception:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        if self.parallel.is_main:
            if self.final.exists():
                self.final.rmdir()
            os.replace(self.scratch, self.final)
        self.parallel.barrier()
