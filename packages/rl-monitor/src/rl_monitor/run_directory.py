"""Read a run directory: settings, records, names of its processes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rl_contracts.config import require
from rl_contracts.runtime.name_service import FileNames, NameService
from rl_contracts.runtime.run_files import last_recovery_checkpoint, tail

FINISHED = "finished"
"""File that says that the run of `config.yaml` came to its end."""
NAMES = "names"
"""Directory in which the processes of a run find each other, and tools find them; see
`rl_launchers.supervise.control`."""
JOB = "job"
"""Name of the scheduler to which the run was handed in as a job."""
LOCATION_SETTINGS = ("run_dir", "experiment", "trial", "model.directories")
"""Settings that say where something is, and not what."""


def names_of(directory: Path) -> NameService:
    """The names of a run, which are files in its directory."""
    return FileNames(directory / NAMES)


def last_records(directory: Path, number: int) -> list[dict[str, Any]]:
    """Return the whole ones of the last `number` lines of a run's records, oldest first."""
    records: list[dict[str, Any]] = []
    for line in tail(directory / "metrics.jsonl", number).splitlines():
        with suppress(ValueError):  # half of a line, of a trainer that was killed
            records.append(json.loads(line))
    return records


def last_record(directory: Path) -> dict[str, Any]:
    """The newest whole record of a run; empty where there is none."""
    return (last_records(directory, 2) or [{}])[-1]


def progress_of(directory: Path) -> tuple[int, int]:
    """The last step that a run took, and the step of its newest recover point; 0 where there is none."""
    return last_record(directory).get("step", 0), last_recovery_checkpoint(directory / "recover") or 0


def read_config(file: Path) -> dict[str, Any]:
    """The settings in a `config.yaml`.

    Raises:
        ConfigError: there are none in it.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())
    expected = "the settings of the run in its directory; delete the file to go on with those of this command"
    require(isinstance(found, dict), str(file), expected, found)
    settings: dict[str, Any] = found
    return settings


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """The settings in a tree of them, by dotted name."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {k: v for name, part in value.items() for k, v in flatten(part, f"{key}.{name}".lstrip(".")).items()}
