"""Keeping the books of a run: metrics, evaluations, saved batches, and when there are checkpoints."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError
from rl_contracts.runtime.json_lines import LineFile, to_json
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import Metrics, MetricsWriter, collect
from rl_contracts.runtime.run_files import GROUPS_FILE
from rl_trainers.run_log.checkpoints import CheckpointConfig, Checkpoints
from rl_trainers.run_log.trace import Trace

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.engine import TrainEngine
    from rl_trainers.run_log.evaluation import Evaluation

log = get_logger("trainers")

RENAMED = {"loss": "loss/policy"}
"""Names of the engine's and the loss's statistics in `metrics.jsonl`, where they differ."""

COMPUTED = (
    "advantages",
    "returns",
    "values",
    "loss_weights",
    "group_tokens",
    "prox_logprobs",
    "ref_logprobs",
    "moment_dropped",
    "staleness",
)
"""Entries that a learner adds to a batch."""

OLDEST_GROUPS = 4
"""Ages of tokens from here on are counted together."""


class RunLog:
    """One per rank; every method is collective. Rank 0 writes.

    Args:
        engine: saved as checkpoints.
        run_dir: the run directory.
        config: what is kept.
        evaluations: run before the first step, every `evaluate_every` steps and after the last.
        counters: figures of the asynchronous side, for example `RolloutRuntime.stats`, or None.
        tokenizer_path: directory whose tokenizer goes into each checkpoint.
        renamed: names of statistics in `metrics.jsonl`, where they differ from the loss's.
        epochs: passes over the data that are over; needed for `checkpoint.every_epochs`.
        endings: what became of prompts, for example `RolloutRuntime.outcomes`, or None. Kept in `groups.jsonl`.
        learned: told of each step's batch when it was learned from, for example `RolloutWriter.write_learned`, or None.
    """

    def __init__(
        self,
        engine: TrainEngine,
        run_dir: str | Path,
        config: CheckpointConfig,
        *,
        evaluations: Sequence[Evaluation] = (),
        evaluate_every: int = 0,
        counters: Callable[[], Metrics] | None = None,
        tokenizer_path: str | None = None,
        renamed: dict[str, str] | None = None,
        epochs: Callable[[], int] | None = None,
        outcomes: Callable[[], list[dict[str, Any]]] | None = None,
        write_learned: Callable[[int, TensorDict], None] | None = None,
    ) -> None:
        self.engine, self.config, self.run_dir = engine, config, Path(run_dir)
        self.evaluations, self.evaluate_every = evaluations, evaluate_every
        self.checkpoints = Checkpoints(engine, self.run_dir, config, tokenizer_path, epochs)
        self.counters, self.endings, self.learned = counters, outcomes, write_learned
        self.renamed = RENAMED if renamed is None else renamed
        self.step = 0
        self.trace = Trace(f"trainer-{engine.parallel.rank}")
        self._figures = Metrics()
        self._clashes: set[str] = set()
        self._evaluated = -1
        self._seconds: dict[str, float] = defaultdict(float)
        self._step_begin = time.perf_counter()
        self._writer: MetricsWriter | None = None
        self._groups: LineFile | None = None
        if engine.parallel.is_main:
            self._writer = MetricsWriter(self.run_dir / "metrics.jsonl")
            self._groups = LineFile(self.run_dir / GROUPS_FILE)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the block's seconds to `time/<stage>` of this step, and show it in the run's trace. What is recorded in
        the block (`rl_contracts.runtime.metrics.record`), by a loss for example, goes into the step's record."""
        begin = time.perf_counter()
        try:
            with self.trace.span(stage, "step", step=self.step + 1), collect(self._figures):
                yield
        finally:
            self._seconds[stage] += time.perf_counter() - begin

    def state_dict(self) -> dict[str, Any]:
        """The last step, the last evaluation, and what there is to know of checkpoints.

        Raises:
            OSError: records of the steps so far cannot be written, so that none may go on after them.
        """
        self._flush()
        return {"step": self.step, "evaluated": self._evaluated, "checkpoints": self.checkpoints.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a step."""
        self.step, self._evaluated = int(state["step"]), int(state["evaluated"])
        if "checkpoints" in state:  # points of earlier commits do not have it
            self.checkpoints.load_state_dict(state["checkpoints"])

    def start(self, version: int) -> None:
        """Before the first step: evaluate what there is, and write it as the record of the step that is done. A run
        that goes on has done so before."""
        figures = self._evaluate() if self.step == 0 else {}
        if figures:
            self._write({"step": self.step, "version": version, "evaluation": True, **figures})
        self._start_step()

    def update_counters(self) -> None:
        """Read the counters of the asynchronous side for the step's record. Before the step ends there: what begins
        after that belongs to the next record, however fast it is."""
        if self.counters is not None:
            self._figures.merge(self.counters())

    def finish_step(
        self, step: int, batch: TensorDict, stats: dict[str, float | None], version_before: int, version: int
    ) -> None:
        """After a step: its record, and what is due with it.

        Raises:
            RLError: its evaluation failed; all else is done.
        """
        self.step = step
        of_batch = summarise(batch, version_before).over_replicas(self.engine.parallel).results()
        record: dict[str, float | None] = {"step": step, "version": version, **of_batch}
        record["reward/std"] = reward_std(record["reward/mean"], record.pop("reward/square"), record["rows"])
        record |= {self.renamed.get(name, name): value for name, value in stats.items()}
        if self.config.save_batches:
            self._save_batch(batch, version_before)
        if self.learned is not None and self.engine.parallel.is_dp_leader:
            self.learned(step, batch)
        with collect(self._figures):
            due = self.checkpoints.is_due(step)
        if due:
            with self.time("save"):
                self.checkpoints.start_write(step)
        seconds = time.perf_counter() - self._step_begin
        record |= {f"time/{stage}": spent for stage, spent in self._seconds.items()}
        record |= {"time/step": seconds, "throughput/trained_tokens_per_s": _rate(record["tokens/trained"], seconds)}
        record |= self.engine.stats()
        recorded = self._figures.drain().over_replicas(self.engine.parallel).results()
        if self.counters is not None:
            record["throughput/generated_tokens_per_s"] = _rate(recorded.get("tokens/generated"), seconds)
        self._add(record, recorded)
        failure: RLError | None = None
        if self.evaluate_every and step % self.evaluate_every == 0:
            try:
                record |= self._evaluate()
            except RLError as error:
                failure = error
        self.checkpoints.rate(step, record)
        self._add_counters(step)
        self._write(record)
        self._start_step()
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """After the last step: a last evaluation and checkpoint, unless the step had them; the trace of rank 0."""
        self._add_counters(self.step + 1)  # whoever goes on after the last step hears of these again
        if self._evaluated != self.step:
            figures = self._evaluate()
            if figures:
                self.checkpoints.rate(self.step, figures)
                self._write({"step": self.step, "version": self.engine.version, "evaluation": True, **figures})
        self.checkpoints.finish(self.step)
        if self.engine.parallel.is_main:
            self._flush()
            self.trace.save(self.run_dir / "trace.json")

    def fail(self) -> None:
        """The run ends by an error: write down which prompts of rank 0 failed or were rejected since the last step, for
        they may be why. Not collective, since other ranks may be gone; and of no step that is over, so a run that goes
        on cuts it off."""
        if self.endings is not None and self.engine.parallel.is_main:
            with suppress(RLError, OSError):  # which would hide why it ends
                self._write_outcomes(self.step + 1, [told for told in self.endings() if told["ending"] != "trained"])

    def _add_counters(self, step: int) -> None:
        """Write down what became of prompts since the last time, one line each."""
        if self.endings is not None:
            of_ranks = self.engine.parallel.gather_json(self.endings())
            self._write_outcomes(step, [ending for of_rank in of_ranks for ending in of_rank])

    def _write_outcomes(self, step: int, endings: list[dict[str, Any]]) -> None:
        if self._groups is not None:
            lines = (to_json({"step": step, **ending}) + "\n" for ending in endings)
            self._groups.write("".join(lines))

    def _flush(self) -> None:
        for file in (self._writer, self._groups):
            if file is not None:
                file.flush()

    def _evaluate(self) -> dict[str, float | None]:
        figures: dict[str, float | None] = {}
        with self.time("evaluate"), collect() as found:
            for evaluation in self.evaluations:
                figures |= evaluation(self.step)
        self._evaluated = self.step
        recorded = found.over_replicas(self.engine.parallel).results()
        self._add(figures, {f"eval/{name}": value for name, value in recorded.items()})
        return figures

    def _add(self, record: dict[str, float | None], recorded: dict[str, float | None]) -> None:
        """Add what was recorded anywhere to what the run says by itself, which wins: it is what its names stand for."""
        clashes = record.keys() & recorded.keys()
        if new := clashes - self._clashes:
            self._clashes |= new
            log.warning("figures %s are the run's own; what was recorded by these names is left out.", sorted(new))
        record |= {name: value for name, value in recorded.items() if name not in clashes}

    def _save_batch(self, batch: TensorDict, version: int) -> None:
        """The whole batch as it left the runtime, without what was computed from it, on rank 0."""
        raw: dict[str, torch.Tensor] = {str(k): v for k, v in batch.exclude(*COMPUTED).items()}  # type: ignore[misc]
        parts = self.engine.parallel.gather_tensors(raw)
        if not self.engine.parallel.is_main:
            return
        from tensordict import TensorDict

        from rl_contracts.batch.trajectory import concatenate, save_batch

        whole = concatenate([TensorDict(part, batch_size=part["input_ids"].shape[:1]) for part in parts])
        directory = self.run_dir / "batches"
        directory.mkdir(exist_ok=True)
        save_batch(whole, directory / f"step_{self.step}-version_{version}.safetensors")

    def _start_step(self) -> None:
        self._seconds.clear()
        self._step_begin = time.perf_counter()

    def _write(self, record: dict[str, float | None]) -> None:
        """Write a record, with its `timestamp`."""
        if self._writer is not None:
            self._writer.write({**record, "timestamp": time.time()})


def summarise(batch: TensorDict, version: int) -> Metrics:
    """Figures of one training batch: this rank's part of them.

    Args:
        batch: this rank's rows.
        version: the trainer's version when the batch left the runtime.

    Returns:
        `rows`, `tokens/trained`, `reward/mean`, `reward/square` (see `reward_std`), `truncated/fraction`,
        `staleness/mean` and `staleness/max` (version minus a row's oldest token's), `staleness/fraction_0` to
        `staleness/fraction_3` and `staleness/fraction_4_and_more` (trained tokens by age).
    """
    figures = Metrics()
    learn, versions, rewards = batch["loss_mask"], batch["versions"], batch["rewards"].double()
    generated = versions >= 0
    # the largest int stands for "no generated token", so that such rows do not count
    oldest = versions.masked_fill(~generated, 2**31 - 1).amin(-1)
    age, answered = version - oldest, generated.any(-1)
    figures.add("rows", rewards.new_ones(len(rewards)), kind="sum")
    figures.add("tokens/trained", learn, kind="sum")
    figures.add("reward/mean", rewards)
    figures.add("reward/square", rewards.square())
    figures.add("truncated/fraction", batch["truncated"])
    figures.add("staleness/mean", age, answered)
    figures.add("staleness/max", age, answered, kind="max")
    token_age = (version - versions).clamp(0, OLDEST_GROUPS)
    for old in range(OLDEST_GROUPS + 1):
        name = f"staleness/fraction_{old}" if old < OLDEST_GROUPS else f"staleness/fraction_{OLDEST_GROUPS}_and_more"
        figures.add(name, token_age == old, learn & generated)
    return figures


def reward_std(mean: float | None, square: float | None, rows: float | None) -> float | None:
    """Sample standard deviation over rows, from their mean, the mean of their squares, and their number."""
    if mean is None or square is None or rows is None or rows < 2:
        return None
    return max((square - mean**2) * rows / (rows - 1), 0.0) ** 0.5


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or not seconds else amount / seconds
