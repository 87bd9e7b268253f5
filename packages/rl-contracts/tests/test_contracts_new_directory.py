"""A directory that ranks write appears whole or not at all, and all of them hear of it."""

import os

import pytest

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.models.atomic_directory import new_directory


class Heard(ParallelContext):
    """What the other ranks hear."""

    def agree(self, error, doing):
        self.heard = error
        super().agree(error, doing)


def test_new_directory_that_cannot_be_renamed_is_told_to_all_ranks(tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", refused)
    parallel = Heard()

    with pytest.raises(OSError, match="Read-only"), new_directory(str(tmp_path / "new"), parallel):
        pass

    assert isinstance(parallel.heard, OSError)


def test_new_directory_private_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with new_directory(str(tmp_path / "new"), ParallelContext()) as directory:
            (directory / "model.safetensors").touch(0o600)
    finally:
        os.umask(before)

    assert (tmp_path / "new" / "model.safetensors").stat().st_mode & 0o777 == 0o640
