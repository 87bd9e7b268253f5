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
"""File that marks the run of `config.yaml` as finished."""
NAMES = "names"
"""Directory that processes of a run and tools use to find each other; see `rl_launchers.supervise.control`."""
JOB = "job"
"""Key that holds the name of the scheduler to which the run was submitted as a job."""
LOCATION_SETTINGS = ("run_dir", "experiment", "trial", "model.directories")
"""Settings that are only locations and names; reports do not compare them."""


def names_of(directory: Path) -> NameService:
    """Return the name service of a run, stored as files in its directory."""
    return FileNames(directory / NAMES)


def last_records(directory: Path, number: int) -> list[dict[str, Any]]:
    """Return the complete records among the last `number` lines of `metrics.jsonl`, oldest first."""
    records: list[dict[str, Any]] = []
    for line in tail(directory / "metrics.jsonl", number).splitlines():
        with suppress(ValueError):  # incomplete line of a killed trainer
            records.append(json.loads(line))
    return records


def last_record(directory: Path) -> dict[str, Any]:
    """Return the newest complete record of a run, or an empty dictionary."""
    return (last_records(directory, 2) or [{}])[-1]


def progress_of(directory: Path) -> tuple[int, int]:
    """Return the last step of a run and the step of its newest recovery checkpoint; 0 for none."""
    return last_record(directory).get("step", 0), last_recovery_checkpoint(directory / "recover") or 0


def read_config(file: Path) -> dict[str, Any]:
    """Return the settings in a `config.yaml`.

    Raises:
        ConfigError: the file is not valid YAML or not a mapping.
    """
    try:
        parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        parsed = " ".join(str(error).split())
    expected = "a mapping of settings; delete the file to continue with the settings of this command"
    require(isinstance(parsed, dict), str(file), expected, parsed)
    settings: dict[str, Any] = parsed
    return settings


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dictionary with dotted names."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {k: v for name, part in value.items() for k, v in flatten(part, f"{key}.{name}".lstrip(".")).items()}
