"""Checkpoints of a run: the model in Hugging Face format, written in the background, and which of them to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import record
from rl_contracts.runtime.run_files import steps_in
from rl_trainers.run_log import background_writes
from rl_trainers.run_log.background_writes import BackgroundDirectory, remove, write_in_background

if TYPE_CHECKING:
    from rl_contracts.engine import Snapshot, TrainEngine

log = get_logger("trainers")


@dataclass
class CheckpointConfig(Settings):
    """Schedule and retention of checkpoints. A checkpoint always follows the last step."""

    setting: ClassVar[str] = "checkpoint"
    every: int = bounded(0, "0 (none) or more steps", lambda steps: steps >= 0)
    """Steps between saves; 0 disables this interval."""
    every_epochs: int = bounded(0, "0 (none) or more passes over the data", lambda epochs: epochs >= 0)
    """Passes over the data between saves; a save follows the first step after the last example is handed out. 0
    disables this interval."""
    save_batches: bool = False
    """Save each training batch under `batches/`, for `rl replay`."""
    keep_last: int = bounded(0, "0 (all) or more", lambda number: number >= 0)
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_best: int = bounded(0, "0 or more", lambda number: number >= 0)
    """Number of checkpoints with the best `best_metric` to keep; they may be among the newest."""
    best_metric: str = ""
    """Metric of `metrics.jsonl` that ranks checkpoints, for example `eval/accuracy`. A checkpoint whose step lacks this
    metric is not ranked."""
    best_mode: str = choice("max", ("max", "min"))
    """Direction of `best_metric`: `max` if higher is better, `min` if lower is better."""

    def __post_init__(self) -> None:
        super().__post_init__()
        complete = self.keep_last >= 1 and self.best_metric != ""
        expected = "0, or checkpoint.keep_last of at least 1 and checkpoint.best_metric set"
        require(self.keep_best == 0 or complete, "checkpoint.keep_best", expected, self.keep_best)
        unused = "no metric with checkpoint.keep_best=0"
        require(self.keep_best > 0 or not self.best_metric, "checkpoint.best_metric", unused, self.best_metric)


class Checkpoints:
    """Writer of an engine's checkpoints under `checkpoints/step_<n>`, one at a time.

    A directory of that name is complete. A checkpoint that cannot be written is logged and counted
    (`checkpoint/failed`); the last one of the run raises an error instead.

    Args:
        engine: the engine to save.
        run_dir: the run directory.
        config: schedule and retention.
        tokenizer_path: directory whose tokenizer is copied into each checkpoint.
        epochs: returns the number of completed passes over the data; needed for `checkpoint.every_epochs`.

    Raises:
        ConfigError: `checkpoint.every_epochs` is set without `epochs`.
    """

    def __init__(
        self,
        engine: TrainEngine,
        run_dir: Path,
        config: CheckpointConfig,
        tokenizer_path: str | None = None,
        epochs: Callable[[], int] | None = None,
    ) -> None:
        if config.every_epochs and epochs is None:
            raise ConfigError(
                f"checkpoint.every_epochs={config.every_epochs} needs data whose epochs are counted (argument "
                "`epochs`); use checkpoint.every."
            )
        self.engine, self.config, self.directory = engine, config, run_dir / "checkpoints"
        self._tokenizer_path, self._epochs = tokenizer_path, epochs or (lambda: 0)
        self._epochs_at_save = self._epochs()
        """Completed passes over the data on rank 0 when the last checkpoint was due."""
        self._rated: dict[int, float] = {}
        self._pending: BackgroundDirectory | None = None
        self._written: Path | None = None
        """Newest checkpoint that this process has seen complete."""
        self._warned = False
        self._names: set[str] = set()
        """Names of the metrics in all steps so far."""

    def is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after this step (collective); also checks the pending one."""
        every, every_epochs = self.config.every, self.config.every_epochs
        if not (every or every_epochs or self._pending):
            return False
        status = self._pending and self._pending.status()
        replies = self.engine.parallel.gather_json([self._epochs(), status])
        if self._pending and self._pending.merge([peer_status for _, peer_status in replies]):
            self._clear_pending()
        epochs = replies[0][0]  # of rank 0, so that all ranks save the same steps and have the same state
        is_due = (every > 0 and step % every == 0) or (
            every_epochs > 0 and epochs // every_epochs > self._epochs_at_save // every_epochs
        )
        if is_due:
            self._epochs_at_save = epochs
        return is_due

    def start_write(self, step: int) -> None:
        """Copy the model, and start writing it in the background (collective)."""
        try:
            self._finish()
            if self._pending:
                raise EngineError(
                    f"{self._pending.path} was not written within {2 * background_writes.WRITE_SECONDS:g} s; use a "
                    "faster disk, or save less often (checkpoint.every)."
                )
            path = self.directory / f"step_{step}"
            self._pending = BackgroundDirectory(path, self.engine.parallel, self._copy)
        except (EngineError, OSError) as error:
            self._failed(str(error))

    def rate(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Store the rating of this step's model, whether or not its checkpoint has started."""
        if not self.config.keep_best:
            return
        self._names |= {name for name, value in metrics.items() if value is not None}
        value = metrics.get(self.config.best_metric)
        if value is not None and math.isfinite(value):
            self._rated[step] = value
        elif self._pending and self._pending.path.name == f"step_{step}" and not self._warned:
            self._warned = True
            log.warning(
                "checkpoint.best_metric=%s: step %d has no such metric, so its checkpoint is not ranked. Choose "
                "evaluation.every so that the steps of checkpoints are evaluated.",
                self.config.best_metric,
                step,
            )

    def finish(self, step: int) -> None:
        """Make sure that the last step has a complete checkpoint (collective).

        Raises:
            EngineError: the checkpoint cannot be written.
        """
        self._finish()
        if self.config.keep_best and self._names and self.config.best_metric not in self._names:
            matches = get_close_matches(self.config.best_metric, self._names, 1)
            suggestion = f"; did you mean {matches[0]}?" if matches else "."
            log.warning("checkpoint.best_metric=%s: no step had such a metric%s", self.config.best_metric, suggestion)
        path = self.directory / f"step_{step}"
        if self._written != path:  # an existing directory of that name may belong to another run
            self.start_write(step)
            self._finish()
            if self._written != path:
                raise EngineError(f"{path}: the last checkpoint could not be written; see the warning in the log.")

    def state_dict(self) -> dict[str, Any]:
        """Return the passes over the data at the last checkpoint, and the ratings of steps."""
        due, rated = {"passed": self._epochs_at_save}, sorted(self._rated.items())
        return {"due": due, "figure": self.config.best_metric, "rated": rated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._epochs_at_save = int(state["due"]["passed"])
        if (
            state.get("figure", self.config.best_metric) == self.config.best_metric
        ):  # otherwise the ratings are of another metric
            self._rated = {int(step): float(value) for step, value in state["rated"]}

    def _copy(self, directory: Path) -> Sequence[Snapshot]:
        meta = SaveLoadMeta(str(directory), "hf", self._tokenizer_path)
        if (snapshot := self.engine.snapshot(meta)) is not None:
            return [snapshot]
        subdirectory = directory / ".saved"
        self.engine.save(SaveLoadMeta(str(subdirectory), "hf", self._tokenizer_path))
        return [partial(_move_up, subdirectory)] if self.engine.parallel.is_main else []

    def _finish(self) -> None:
        if self._pending and self._pending.wait():
            self._clear_pending()

    def _clear_pending(self) -> None:
        assert self._pending is not None
        finished, self._pending = self._pending, None
        if finished.error:
            self._failed(f"{finished.path}: {finished.error}")
            return
        self._written = finished.path
        if self.engine.parallel.is_main:
            log.info("checkpoint: %s", finished.path)
            if self.config.keep_last:
                write_in_background(
                    partial(self._prune, int(finished.path.name.removeprefix("step_")), dict(self._rated))
                )

    def _failed(self, reason: str) -> None:
        record("checkpoint/failed", 1, kind="max")
        log.warning("a checkpoint could not be written: %s", reason)

    def _prune(self, newest: int, rated: Mapping[int, float]) -> None:
        steps = [step for step in steps_in(self.directory) if step <= newest]  # later ones belong to another run
        for step in {*steps} - select_retained(steps, rated, self.config):
            remove(self.directory / f"step_{step}")


def select_retained(steps: Collection[int], rated: Mapping[int, float], config: CheckpointConfig) -> set[int]:
    """Return the steps whose checkpoints to keep: the newest, and the best rated; of equal ratings, the later."""
    sign = 1 if config.best_mode == "max" else -1
    best = sorted((step for step in steps if step in rated), key=lambda step: (sign * rated[step], step))
    newest = sorted(steps)[-config.keep_last :]
    return {*newest, *best[len(best) - min(config.keep_best, len(best)) :]}


def _move_up(directory: Path) -> list[Path]:
    """Move the files of an engine without snapshots one level up, and return them."""
    moved = [entry.rename(directory.parent / entry.name) for entry in directory.iterdir()]
    directory.rmdir()
    return [file for entry in moved for file in ([entry] if entry.is_file() else entry.rglob("*")) if file.is_file()]
