"""A new directory is written completely or not at all, and all ranks receive an error of any rank."""

import os

import pytest

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.models.atomic_directory import new_directory


class RecordingContext(ParallelContext):
    """Parallel context that records the error passed to the other ranks."""

    def agree(self, error, doing):
        self.reported_error = error
        super().agree(error, doing)


def test_new_directory_rename_error_reaches_all_ranks(tmp_path, monkeypatch):
    def failing_replace(source, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", failing_replace)
    parallel = RecordingContext()

    with pytest.raises(OSError, match="Read-only"), new_directory(str(tmp_path / "new"), parallel):
        pass

    assert isinstance(parallel.reported_error, OSError)


def test_new_directory_private_file_gets_umask_mode(tmp_path):
    before = os.umask(0o027)
    try:
        with new_directory(str(tmp_path / "new"), ParallelContext()) as directory:
            (directory / "model.safetensors").touch(0o600)
    finally:
        os.umask(before)

    assert (tmp_path / "new" / "model.safetensors").stat().st_mode & 0o777 == 0o640
