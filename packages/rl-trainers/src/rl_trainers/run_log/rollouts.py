"""Every trajectory on disk, readable: what the model was asked, what it wrote, and what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import Settings, bounded
from rl_contracts.errors import DataError
from rl_contracts.runtime.json_lines import FOR_A_WHILE, append, to_json
from rl_contracts.runtime.logging import get_logger

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import Trajectory

log = get_logger("trainers")

LEARNED_KEYS = ("group_ids", "episode_ids", "versions", "loss_mask", "advantages", "prox_logprobs")
"""Entries of a batch from which it is told what was learned."""

WAITING_TOKENS = 50_000_000
"""Tokens that may wait to be written, about 1 GB; where the disk is slower than that, what comes is left out."""

RETRY_SECONDS = 1.0
"""Seconds until what a full disk refused is tried again."""

CLOSE_SECONDS = 30.0
"""Time that the writer has to finish at the end."""


@dataclass
class KeptConfig(Settings):
    """What is kept of the answers of evaluations, under `rollouts/`."""

    setting: ClassVar[str] = "rollouts"
    tokens: bool = True
    """With the id, log-prob and version of each generated token, which are most of the bytes."""


@dataclass
class RolloutsConfig(KeptConfig):
    """What is kept of all answers, under `rollouts/`."""

    every: int = bounded(1, "0 (never) or more steps", lambda steps: steps >= 0)
    """Steps between those whose answers are written; 0: of no training step. Evaluations are always written."""


class RolloutWriter:
    """Writes JSON lines into a directory, one file per step and rank, in a thread of its own.

    Args:
        directory: made if it does not exist.
        rank: part of the file names.
        config: what is written.
    """

    def __init__(self, directory: str | Path, rank: int = 0, config: KeptConfig | None = None) -> None:
        self.directory, self.rank, self.config = Path(directory), rank, config or RolloutsConfig()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.left_out = 0
        """Trajectories that were not written because the disk was too slow."""
        self._waiting: SimpleQueue[tuple[Path, Iterable[dict[str, Any]], int] | None] = SimpleQueue()
        self._waiting_tokens = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rollout-writer", daemon=True)
        self._thread.start()

    def write_training(self, step: int, trajectories: Sequence[Trajectory], rejected: str | None = None) -> None:
        """As `write`, of a training step, if it is one of `config.every`; never where only evaluations are kept."""
        if self._is_due(step):
            self.write(f"step_{step}", trajectories, rejected)

    def write_learned(self, step: int, batch: TensorDict) -> None:
        """Append what was learned from a training step's rows to `learned_step_<step>-<rank>.jsonl`, soon, one object
        for each (see `to_learned_record`), if the step is one of `config.every`. Rows may lie on another rank than
        their answers. Returns at once.

        Args:
            step: that was taken.
            batch: this replica's rows with their `advantages`, not changed from now on.

        Raises:
            DataError: see `write`.
        """
        if self._is_due(step):
            columns = {name: batch[name].cpu().numpy() for name in LEARNED_KEYS if name in batch}
            rows = to_learned_record(columns, self.config.tokens)
            self._add(f"learned_step_{step}", rows, len(batch), batch["versions"].numel())

    def _is_due(self, step: int) -> bool:
        every = self.config.every if isinstance(self.config, RolloutsConfig) else 0
        return every > 0 and step % every == 0

    def write(self, name: str, trajectories: Sequence[Trajectory], rejected: str | None = None) -> None:
        """Append trajectories to `<name>-<rank>.jsonl`, one object each, soon. Returns at once, on any thread.

        Args:
            name: first part of the file's name.
            trajectories: not changed from now on.
            rejected: why they are not trained on.

        Raises:
            DataError: something could not be written before.
        """
        rows = (to_record(row, rejected, self.config.tokens) for row in trajectories)
        self._add(name, rows, len(trajectories), sum(map(len, trajectories)))

    def _add(self, name: str, rows: Iterable[dict[str, Any]], count: int, tokens: int) -> None:
        """Have rows written that the thread makes."""
        if self._error is not None:
            remedy = "Make room" if isinstance(self._error, OSError) else "Correct what the workflow adds to `info`"
            raise DataError(
                f"rollouts cannot be written to {self.directory}: {self._error!r}. {remedy}, or set rollouts.every=0."
            ) from self._error
        with self._lock:
            if self._waiting_tokens and self._waiting_tokens + tokens > WAITING_TOKENS:
                self.left_out += count
                log.warning("rollouts: the disk is too slow; %d answers are not written so far", self.left_out)
                return
            self._waiting_tokens += tokens
        self._waiting.put((self.directory / f"{name}-{self.rank}.jsonl", rows, tokens))

    def destroy(self) -> None:
        """Write what waits, and end. Safe to call twice."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("rollouts: not all answers are written after %g s; the rest is lost", CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            for path, rows, tokens in iter(self._waiting.get, None):
                lines = "".join(to_json(row) + "\n" for row in rows)
                self._append(path, lines.encode(errors="replace").decode())  # half characters of a workflow's texts
                with self._lock:
                    self._waiting_tokens -= tokens
        except Exception as error:  # noqa: BLE001 - the next call of write raises it
            self._error = error

    def _append(self, path: Path, lines: str) -> None:
        """Write lines, as soon as the disk is not full: for those behind them it is a slow one."""
        warned = False
        while True:
            try:
                return append(path, lines)
            except OSError as error:
                if error.errno not in FOR_A_WHILE:
                    raise
                if not warned:
                    log.warning("rollouts: %s cannot be written, and will be again: %s", path, error)
            warned = True
            time.sleep(RETRY_SECONDS)


def to_record(row: Trajectory, rejected: str | None = None, tokens: bool = True) -> dict[str, Any]:
    """A trajectory as a JSON object: its `info`, its ids and outcome, why it was rejected (null: it was not), and, with
    `tokens`, per generated token its id, log-prob and version."""
    import numpy as np

    generated = row.versions >= 0
    versions = row.versions[generated]
    found = {
        **row.info,
        "reward": row.reward,
        "rejected": rejected,
        "truncated": row.truncated,
        "prompt_id": row.prompt_id,
        "group_id": row.group_id,
        "episode_id": row.episode_id,
        "temperature": row.temperature,
        "version_first": int(versions.min()) if len(versions) else None,
        "version_last": int(versions.max()) if len(versions) else None,
    }
    if tokens:
        found["token_ids"] = row.input_ids[generated].tolist()
        found["logprobs"] = np.round(row.logprobs[generated].astype(np.float64), 5).tolist()
        found["versions"] = versions.tolist()
    return found


def to_learned_record(columns: Mapping[str, np.ndarray], tokens: bool = True) -> Iterator[dict[str, Any]]:
    """What was learned from each row of a batch as a JSON object: its ids, the number of its generated `tokens`, and
    their mean `advantage`. With `tokens`, and null where a generated token was not trained: `advantages`, where they
    differ, and, where it was computed, the log-prob of each by the trainer before the step, `proximal`.

    Args:
        columns: entries of the batch by `LEARNED`, [B] or [B, T] each; `prox_logprobs` may be missing.
        tokens: whether to tell of single tokens.
    """
    for i, versions in enumerate(columns["versions"]):
        generated, advantages = versions >= 0, columns["advantages"][i]
        learn = generated & columns["loss_mask"][i]
        of_learned = advantages[learn]
        found: dict[str, Any] = {
            "group_id": int(columns["group_ids"][i]),
            "episode_id": int(columns["episode_ids"][i]),
            "tokens": int(generated.sum()),
            "advantage": round(float(of_learned.mean()), 6) if len(of_learned) else None,
        }
        single = {"advantages": advantages} if len(of_learned) and (of_learned != of_learned[0]).any() else {}
        single |= {"proximal": columns["prox_logprobs"][i]} if "prox_logprobs" in columns else {}
        for name, values in single.items() if tokens else ():
            pairs = zip(values[generated].tolist(), learn[generated].tolist(), strict=True)
            found[name] = [round(value, 5) if trained else None for value, trained in pairs]
        yield found
