"""Modes of the files that a run writes."""

from __future__ import annotations

from pathlib import Path


def follow_umask(directory: Path) -> None:
    """Give the files below a directory the directory's read and write bits, which follow the umask.

    safetensors writes files that only their owner can read, and copies keep the mode of their source.
    """
    mode = directory.stat().st_mode & 0o666
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(mode)
