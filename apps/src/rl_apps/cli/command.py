"""Entry point of the commands. What they need is imported in it, so that Ctrl-C is answered from the first moment."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run `rl`, or the app that bears the command's name (entry-point group `rl.apps`). Returns the exit code."""
    name = Path(sys.argv[0]).name
    try:
        if name == "rl":
            from rl_apps.cli.main import main as rl

            return rl()
        from rl_apps.cli import driver

        return driver.main(name)
    except KeyboardInterrupt:
        return 130
