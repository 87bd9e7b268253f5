"""Modes of the files that a run leaves."""

from __future__ import annotations

from pathlib import Path


def follow_umask(directory: Path) -> None:
    """Give the files of a directory the mode that `open` gives: safetensors writes private ones, and copies keep that
    of their source."""
    mode = directory.stat().st_mode & 0o666
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(mode)
