"""Origin of a run, recorded in its directory: command, machine, packages, and commit of the code."""

from __future__ import annotations

import json
import platform
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_contracts.runtime.json_lines import append

COMMANDS = "commands.jsonl"
"""File of a run with one line per command that started or resumed it."""
GIT_SECONDS = 10.0
"""Timeout of a git command in seconds."""
HIDDEN = "***"
_SECRET = re.compile(r"((?:key|token|secret|password)\w*=)\S+", re.IGNORECASE)


def record_command(directory: Path, argv: list[str]) -> None:
    """Append a line about this command. Takes about a second, mostly to list the packages.

    Raises:
        OSError: the file cannot be written.
    """
    append(directory / COMMANDS, json.dumps(facts_of(argv)) + "\n")


def facts_of(argv: list[str]) -> dict[str, Any]:
    """Return `command`, `started` (seconds since the epoch), `host`, `system`, `python`, `directory`, `packages` by
    name, `commits` by directory. Values of settings named key, token, secret or password are hidden in `command`."""
    working_directory, code = Path.cwd(), Path(__file__).parent
    commits = {str(root): text for root, text in filter(None, map(_commit, (working_directory, code)))}
    return {
        "command": [_SECRET.sub(rf"\g<1>{HIDDEN}", word) for word in argv],
        "started": time.time(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "directory": str(working_directory),
        "packages": {
            package.name: package.version for package in sorted(metadata.distributions(), key=lambda d: d.name)
        },
        "commits": commits,
    }


def commands_of(directory: Path) -> list[dict[str, Any]]:
    """Return the recorded commands, oldest first; empty if none were recorded."""
    commands = []
    with suppress(OSError):
        for line in (directory / COMMANDS).read_bytes().splitlines():  # str.splitlines would split at more characters
            with suppress(ValueError):
                commands.append(json.loads(line))
    return commands


def _commit(directory: Path) -> tuple[str, str] | None:
    """Return root and commit of the checkout that contains a directory. A suffix marks modified files."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(directory), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
        return done.stdout.strip()

    try:
        root, commit = git("rev-parse", "--show-toplevel", "HEAD").split("\n")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError, ValueError):  # no git, no checkout, no commit
        return None
    return root, commit + (", with changes" if changed else "")
