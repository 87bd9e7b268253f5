"""Checkpoints of a run: the model in Hugging Face format, written in the background, and which of them stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import bounded, choice, require
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import EngineError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import record
from rl_contracts.runtime.run_files import steps_in
from rl_trainers.run_log.background_writes import BackgroundDirectory, remove, write_in_background
from rl_trainers.run_log.schedule import EveryConfig, Schedule

if TYPE_CHECKING:
    from rl_contracts.engine import Snapshot, TrainEngine

log = get_logger("trainers")


@dataclass
class CheckpointConfig(EveryConfig):
    """What is kept of a run. There is a checkpoint after the last step, whatever is set."""

    setting: ClassVar[str] = "checkpoint"
    save_batches: bool = False
    """Keep each training batch under `batches/`, for `rl replay`."""
    keep_last: int = bounded(0, "0 (all) or more", lambda number: number >= 0)
    """The newest checkpoints that stay; 0: all stay."""
    keep_best: int = bounded(0, "0 or more", lambda number: number >= 0)
    """How many stay beside them: those with the best `best_figure`."""
    best_figure: str = ""
    """Figure of `metrics.jsonl` by which checkpoints are compared, for example `eval/accuracy`; one whose step has no
    such figure is not."""
    best_mode: str = choice("max", ("max", "min"))
    """Whether more of it is better, or less."""
    timeout: float = bounded(240.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds in which a checkpoint must be written; the next one, and the end of the run, wait for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        complete = self.keep_last >= 1 and self.best_figure != ""
        expected = "0, or checkpoint.keep_last of at least 1 and checkpoint.best_figure set"
        require(self.keep_best == 0 or complete, "checkpoint.keep_best", expected, self.keep_best)


class Checkpoints:
    """Saves an engine under `checkpoints/step_<n>`, one checkpoint at a time; a directory that is there is whole.

    One that cannot be written is warned of and counted (`checkpoint/failed`), unless it is the last of the run.

    Args:
        engine: what is saved.
        run_dir: the run directory.
        config: when, and which stay.
        tokenizer_path: directory whose tokenizer goes into each checkpoint.
        epochs: passes over the data that are over; needed for `checkpoint.every_epochs`.
    """

    def __init__(
        self,
        engine: TrainEngine,
        run_dir: Path,
        config: CheckpointConfig,
        tokenizer_path: str | None = None,
        epochs: Callable[[], int] | None = None,
    ) -> None:
        self.engine, self.config, self.directory = engine, config, run_dir / "checkpoints"
        self._tokenizer_path, self._due = tokenizer_path, Schedule(config, epochs)
        self._passed: dict[str, Any] = {"seconds": 0.0, "passed": 0}  # of rank 0: all ranks say the same of themselves
        self._rated: dict[int, float] = {}
        self._pending: BackgroundDirectory | None = None
        self._written: Path | None = None
        """The last one that this process has seen whole."""
        self._warned = False
        self._names: set[str] = set()
        """Of the figures that steps had."""

    def is_due(self, step: int) -> bool:
        """Whether there is to be one after this step (collective); hears of the one that is being written."""
        if not (self.config.regular or self._pending):
            return False
        status = self._pending and self._pending.status()
        replies = self.engine.parallel.gather_json([self._due.is_due(step), self._due.state_dict(), status])
        if self._pending and self._pending.merge([peer_status for _, _, peer_status in replies]):
            self._clear_pending()
        self._passed = replies[0][1]
        return bool(replies[0][0])

    def start_write(self, step: int) -> None:
        """Copy the model, and have it written (collective)."""
        try:
            self._finish()
            if self._pending:
                raise EngineError(f"{self._pending.path} is still being written after checkpoint.timeout.")
            path = self.directory / f"step_{step}"
            self._pending = BackgroundDirectory(path, self.engine.parallel, self._copy, self.config.timeout)
        except (EngineError, OSError) as error:
            self._failed(str(error))

    def rate(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Note how good the model of this step is, for which a checkpoint was begun or may be."""
        if not self.config.keep_best:
            return
        self._names |= {name for name, value in figures.items() if value is not None}
        value = figures.get(self.config.best_figure)
        if value is not None and math.isfinite(value):
            self._rated[step] = value
        elif self._pending and self._pending.path.name == f"step_{step}" and not self._warned:
            self._warned = True
            log.warning(
                "checkpoint.best_figure=%s: step %d has no such figure, so its checkpoint is not compared. Evaluate at "
                "the steps of checkpoints (evaluation.every).",
                self.config.best_figure,
                step,
            )

    def finish(self, step: int) -> None:
        """See that there is a whole one of the last step (collective).

        Raises:
            EngineError: it cannot be written.
        """
        self._finish()
        if self.config.keep_best and self._names and self.config.best_figure not in self._names:
            near = get_close_matches(self.config.best_figure, self._names, 1)
            meant = f"; did you mean {near[0]}?" if near else "."
            log.warning("checkpoint.best_figure=%s: no step had such a figure%s", self.config.best_figure, meant)
        path = self.directory / f"step_{step}"
        if self._written != path:  # one of that name may be another run's
            self.start_write(step)
            self._finish()
            if self._written != path:
                raise EngineError(f"{path}: the last checkpoint could not be written; the log says why.")

    def state_dict(self) -> dict[str, Any]:
        """When the last one was, and how good those are that stay."""
        return {"due": self._passed, "figure": self.config.best_figure, "rated": sorted(self._rated.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._passed = state["due"]
        self._due.load_state_dict(self._passed)
        if state.get("figure", self.config.best_figure) == self.config.best_figure:  # else they are of something else
            self._rated = {int(step): float(value) for step, value in state["rated"]}

    def _copy(self, directory: Path) -> Sequence[Snapshot]:
        meta = SaveLoadMeta(str(directory), "hf", self._tokenizer_path)
        if (written := self.engine.snapshot(meta)) is not None:
            return [written]
        below = directory / ".saved"
        self.engine.save(SaveLoadMeta(str(below), "hf", self._tokenizer_path))
        return [partial(_move_up, below)] if self.engine.parallel.is_main else []

    def _finish(self) -> None:
        if self._pending and self._pending.wait():
            self._clear_pending()

    def _clear_pending(self) -> None:
        assert self._pending is not None
        done, self._pending = self._pending, None
        if done.error:
            self._failed(f"{done.path}: {done.error}")
            return
        self._written = done.path
        if self.engine.parallel.is_main:
            log.info("checkpoint: %s", done.path)
            if self.config.keep_last:
                write_in_background(partial(self._prune, int(done.path.name.removeprefix("step_")), dict(self._rated)))

    def _failed(self, why: str) -> None:
        record("checkpoint/failed", 1, kind="max")
        log.warning("a checkpoint could not be written: %s", why)

    def _prune(self, newest: int, rated: Mapping[int, float]) -> None:
        there = [step for step in steps_in(self.directory) if step <= newest]  # later ones are another run's
        for step in {*there} - select_retained(there, rated, self.config):
            remove(self.directory / f"step_{step}")


def select_retained(steps: Collection[int], rated: Mapping[int, float], config: CheckpointConfig) -> set[int]:
    """Which checkpoints stay: the newest, and the best of those that are rated; of equal ones the later."""
    sign = 1 if config.best_mode == "max" else -1
    best = sorted((step for step in steps if step in rated), key=lambda step: (sign * rated[step], step))
    newest = sorted(steps)[-config.keep_last :]
    return {*newest, *best[len(best) - min(config.keep_best, len(best)) :]}


def _move_up(directory: Path) -> list[Path]:
    """Move what an engine saved by itself one level up."""
    moved = [entry.rename(directory.parent / entry.name) for entry in directory.iterdir()]
    directory.rmdir()
    return [file for entry in moved for file in ([entry] if entry.is_file() else entry.rglob("*")) if file.is_file()]
