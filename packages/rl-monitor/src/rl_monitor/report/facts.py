"""Where a run comes from: the command, the machine, the packages, and the commit of the code. Kept in its directory."""

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
"""File of a run: a line for each command that went on with it."""
GIT_SECONDS = 10.0
"""Time in which git must say which commit it is."""
HIDDEN = "***"
_SECRET = re.compile(r"((?:key|token|secret|password)\w*=)\S+", re.IGNORECASE)


def record_command(directory: Path, argv: list[str]) -> None:
    """Add a line about this command; takes a second, most of it to ask for the packages.

    Raises:
        OSError: it cannot be written.
    """
    append(directory / COMMANDS, json.dumps(facts_of(argv)) + "\n")


def facts_of(argv: list[str]) -> dict[str, Any]:
    """`command` (without values of what is called a key, token, secret or password), `started` (seconds since the
    epoch), `host`, `system`, `python`, `directory`, `packages` by name, `commits` by directory."""
    place, code = Path.cwd(), Path(__file__).parent
    commits = {str(root): text for root, text in filter(None, map(_commit, (place, code)))}
    return {
        "command": [_SECRET.sub(rf"\g<1>{HIDDEN}", word) for word in argv],
        "started": time.time(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "directory": str(place),
        "packages": {found.name: found.version for found in sorted(metadata.distributions(), key=lambda d: d.name)},
        "commits": commits,
    }


def commands_of(directory: Path) -> list[dict[str, Any]]:
    """What was recorded, oldest first; none of a run that kept nothing of it."""
    found = []
    with suppress(OSError):
        for line in (directory / COMMANDS).read_bytes().splitlines():  # text has more ends of lines
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def _commit(directory: Path) -> tuple[str, str] | None:
    """The root of the checkout that a directory lies in, and its commit, with a word where files were changed."""

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
