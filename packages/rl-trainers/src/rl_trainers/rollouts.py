"""Every trajectory on disk, readable: what the model was asked, what it wrote, and what it was worth."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_contracts.trajectory import Trajectory


class RolloutWriter:
    """Writes JSON lines into a directory, one file per step and rank."""

    def __init__(self, directory: str | Path, rank: int = 0) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.rank = rank

    def write(self, name: str, trajectories: Iterable[Trajectory]) -> Path:
        """Append trajectories to `<name>-<rank>.jsonl`, one object each, and return its path."""
        path = self.directory / f"{name}-{self.rank}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(as_json(row), ensure_ascii=False) + "\n" for row in trajectories)
        return path


def as_json(row: Trajectory) -> dict[str, Any]:
    """A trajectory as a JSON object: its `info`, its ids and outcome, and per generated token id, log-prob and
    version."""
    generated = row.versions >= 0
    versions = row.versions[generated]
    return {
        **row.info,
        "reward": row.reward,
        "truncated": row.truncated,
        "prompt_id": row.prompt_id,
        "group_id": row.group_id,
        "episode_id": row.episode_id,
        "temperature": row.temperature,
        "version_first": int(versions.min()) if len(versions) else None,
        "version_last": int(versions.max()) if len(versions) else None,
        "token_ids": row.input_ids[generated].tolist(),
        "logprobs": [round(x, 5) for x in row.logprobs[generated].tolist()],
        "versions": versions.tolist(),
    }
