"""Entry point of the installed commands. Modules are imported in the function, so that Ctrl-C works from the start."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run `rl`, or the app with the name of this command (entry-point group `rl.apps`). Returns the exit code."""
    name = Path(sys.argv[0]).name
    try:
        if name == "rl":
            from rl_apps.cli.main import main as rl

            return rl()
        from rl_apps.cli import driver

        return driver.main(name)
    except KeyboardInterrupt:
        return 130
