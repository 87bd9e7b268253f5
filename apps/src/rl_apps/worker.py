"""A trainer process: `python -m rl_apps.worker <command> <run directory> <server addresses, comma-separated>`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from rl_apps.compose import from_yaml
from rl_apps.driver import App
from rl_contracts.errors import RLError
from rl_contracts.logging import configure, get_logger

log = get_logger("apps.worker")


def main(argv: list[str]) -> int:
    """Read the run's config and train; the exit code is 1 if the run failed."""
    name, run_dir, addresses = argv
    app: App = importlib.import_module(f"rl_apps.{name.replace('-', '_')}").APP
    configure(rank=int(os.environ.get("RANK", "0")), role="trainer")
    signal.signal(signal.SIGTERM, _end)
    directory = Path(run_dir)
    config = from_yaml(directory / "config.yaml", app.schema)
    try:
        app.train(config, app.layout(config), directory, [a for a in addresses.split(",") if a])
    except RLError as error:
        log.exception("%s: %s", type(error).__name__, error)
        return 1
    return 0


def _end(number: int, _: object) -> NoReturn:
    """SIGTERM ends the process by the ordinary way out, so that everything closes what it opened."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
