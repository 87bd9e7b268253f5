"""Entry point of a trainer process.

`python -m rl_apps.run.worker <app> <run directory> <device> <server addresses, comma-separated>`
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from rl_apps.run.app import App, Run
from rl_apps.run.components import SigtermHandler
from rl_apps.run.directory import held_by_trainer
from rl_apps.settings.compose import compose
from rl_apps.settings.device_layout import layout_of
from rl_contracts import registry
from rl_contracts.errors import is_user_error
from rl_contracts.runtime.logging import configure, get_logger
from rl_launchers.supervise.heartbeat import beat
from rl_launchers.supervise.launcher import USERS_FAULT
from rl_monitor.run_directory import FINISHED, names_of

log = get_logger("apps.worker")


def main(argv: list[str]) -> int:
    """Read the config of the run and train.

    Returns:
        the exit code: 1 if the run failed, 2 (`USERS_FAULT`) if the user's code or settings are the cause.
    """
    reference, directory, device, addresses = argv
    rank = os.environ.get("RANK", "0")
    configure(rank=int(rank), role="trainer")
    signal.signal(signal.SIGTERM, SigtermHandler())
    try:
        app: App = registry.load("rl.apps", reference)
        config = compose(app.schema, [Path(directory) / "config.yaml"])
        layout = layout_of(config.allocation, app.servers)
        run = Run(config, layout, Path(directory), device, tuple(a for a in addresses.split(",") if a))
        beat(names_of(run.directory), f"{layout.actor.name}-{rank}", config.launcher.health_timeout)
        with held_by_trainer(run.directory):
            app.train(run)
            if rank == "0":  # even if the command was asked to stop meanwhile
                (run.directory / FINISHED).touch()
    except Exception as error:  # noqa: BLE001 - reported by the log and the exit code
        traceback.print_exception(error)
        # repeat the error in one line at the end of the log, which the command prints
        log.error("%s: %s", type(error).__name__, str(error).partition("\n")[0])
        return USERS_FAULT if is_user_error(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
