"""Run log: metrics, evaluations, saved batches, prompt outcomes and the schedule of checkpoints."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError
from rl_contracts.runtime.json_lines import LineFile, to_json
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import Metrics, MetricsWriter, collect
from rl_contracts.runtime.run_files import GROUPS_FILE, StageFile
from rl_trainers.run_log.checkpoints import CheckpointConfig, Checkpoints
from rl_trainers.run_log.trace import Trace

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.engine import TrainEngine
    from rl_trainers.run_log.evaluation import Evaluation

log = get_logger("trainers")

RENAMED = {"loss": "loss/policy"}
"""Names in `metrics.jsonl` of statistics that the engine or the loss names differently."""

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

MAX_AGE_BUCKET = 4
"""Age from which tokens are counted together, in versions."""


class RunLog:
    """Log of a run, one per rank. Every method but `fail` is collective; rank 0 writes.

    Args:
        engine: the engine whose checkpoints are saved.
        run_dir: the run directory.
        config: schedule and retention of checkpoints and batches.
        evaluations: run before the first step, every `evaluate_every` steps and after the last.
        evaluate_every: steps between evaluations; 0: none between the first step and the last.
        counters: returns the metrics of the asynchronous side, for example `RolloutRuntime.stats`, or None.
        tokenizer_path: directory whose tokenizer is copied into each checkpoint.
        renamed: names in `metrics.jsonl` of statistics that the loss names differently.
        epochs: returns the number of completed passes over the data; needed for `checkpoint.every_epochs`.
        outcomes: returns the outcomes of prompts since its last call, for example `RolloutRuntime.outcomes`, or None.
            They are written to `groups.jsonl`.
        write_learned: called with each step and its batch after training on it, for example
            `RolloutWriter.write_learned`, or None.
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
        self.counters, self.outcomes, self.write_learned = counters, outcomes, write_learned
        self.renamed = RENAMED if renamed is None else renamed
        self.step = 0
        self.trace = Trace(f"trainer-{engine.parallel.rank}")
        self._metrics = Metrics()
        self._clashes: set[str] = set()
        self._evaluated = -1
        self._seconds: dict[str, float] = defaultdict(float)
        self._step_begin = time.perf_counter()
        self._writer: MetricsWriter | None = None
        self._groups: LineFile | None = None
        self._stage_file: StageFile | None = None
        self._in_first_step = True
        if engine.parallel.is_main:
            self._stage_file = StageFile(self.run_dir, engine.parallel.dp_size)
            self._writer = MetricsWriter(self.run_dir / "metrics.jsonl")
            self._groups = LineFile(self.run_dir / GROUPS_FILE)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the block's seconds to `time/<stage>` of this step, and a span to the run's trace.

        Metrics that the block records (`rl_contracts.runtime.metrics.record`), for example in a loss, are added to the
        step's record.
        """
        begin = time.perf_counter()
        try:
            with self._showing(stage), self.trace.span(stage, "step", step=self.step + 1), collect(self._metrics):
                yield
        finally:
            self._seconds[stage] += time.perf_counter() - begin

    def _showing(self, stage: str) -> AbstractContextManager[None]:
        """Return a context that shows a stage during the first step and evaluations, which may take long."""
        is_long = self._in_first_step or stage == "evaluate"
        return self._stage_file.show(stage) if self._stage_file is not None and is_long else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the last step, the step of the last evaluation, and the state of the checkpoints.

        Raises:
            OSError: records of finished steps cannot be written, so no run may resume after these steps.
        """
        self._flush()
        return {"step": self.step, "evaluated": self._evaluated, "checkpoints": self.checkpoints.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved step."""
        self.step, self._evaluated = int(state["step"]), int(state["evaluated"])
        if "checkpoints" in state:  # missing in recovery checkpoints of earlier releases
            self.checkpoints.load_state_dict(state["checkpoints"])

    def start(self, version: int) -> None:
        """Evaluate before the first step, and write the record of step 0; skipped in a resumed run."""
        metrics = self._evaluate() if self.step == 0 else {}
        if metrics:
            self._write({"step": self.step, "version": version, "evaluation": True, **metrics})
        self._start_step()

    def update_counters(self) -> None:
        """Read the counters of the asynchronous side into the step's record.

        Call it before the step ends on that side: later counts belong to the next record.
        """
        if self.counters is not None:
            self._metrics.merge(self.counters())

    def finish_step(
        self, step: int, batch: TensorDict, stats: dict[str, float | None], version_before: int, version: int
    ) -> None:
        """Write a step's record, and its batch, checkpoint and evaluation if they are due.

        Raises:
            RLError: the evaluation failed; everything else is done.
        """
        self.step = step
        metrics = batch_metrics(batch, version_before).over_replicas(self.engine.parallel).results()
        record: dict[str, float | None] = {"step": step, "version": version, **metrics}
        record["reward/std"] = reward_std(record["reward/mean"], record.pop("reward/square"), record["sequences"])
        if record["staleness/mean"] is None and not record["reward/mean"]:  # supervised: nothing was generated
            record |= dict.fromkeys(("reward/mean", "reward/std", "truncated/fraction"))
        record |= {self.renamed.get(name, name): value for name, value in stats.items()}
        if self.config.save_batches:
            self._save_batch(batch, version_before)
        if self.write_learned is not None and self.engine.parallel.is_dp_leader:
            self.write_learned(step, batch)
        with collect(self._metrics):
            is_due = self.checkpoints.is_due(step)
        if is_due:
            with self.time("save"):
                self.checkpoints.start_write(step)
        seconds = time.perf_counter() - self._step_begin
        record |= {f"time/{stage}": elapsed for stage, elapsed in self._seconds.items()}
        record |= {"time/step": seconds, "throughput/trained_tokens_per_s": _rate(record["tokens/trained"], seconds)}
        record |= self.engine.stats()
        recorded = self._metrics.drain().over_replicas(self.engine.parallel).results()
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
        self._write_new_outcomes(step)
        self._write(record)
        self._in_first_step = False
        self._start_step()
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Run the last evaluation and save the last checkpoint, unless the last step did; write the trace of rank 0.

        A run without a step saves no checkpoint.
        """
        self._write_new_outcomes(self.step + 1)  # a run resumed after the last step reports these outcomes again
        if self._evaluated != self.step:
            metrics = self._evaluate()
            if metrics:
                self.checkpoints.rate(self.step, metrics)
                self._write({"step": self.step, "version": self.engine.version, "evaluation": True, **metrics})
        if self.step:
            self.checkpoints.finish(self.step)
        if self.engine.parallel.is_main:
            self._flush()
            self.trace.save(self.run_dir / "trace.json")

    def fail(self) -> None:
        """Write the outcomes of rank 0's prompts that failed or were rejected since the last step.

        Called when an error ends the run, because these prompts may be the cause. Not collective, since other ranks may
        be gone. The outcomes belong to an unfinished step, so a resumed run removes them.
        """
        if self.outcomes is not None and self.engine.parallel.is_main:
            with suppress(RLError, OSError):  # these would hide the error that ends the run
                self._write_outcomes(
                    self.step + 1, [outcome for outcome in self.outcomes() if outcome["outcome"] != "trained"]
                )

    def _write_new_outcomes(self, step: int) -> None:
        """Write the outcomes of all ranks' prompts since the last call, one line each."""
        if self.outcomes is not None:
            by_rank = self.engine.parallel.gather_json(self.outcomes())
            self._write_outcomes(step, [outcome for outcomes in by_rank for outcome in outcomes])

    def _write_outcomes(self, step: int, outcomes: list[dict[str, Any]]) -> None:
        if self._groups is not None:
            lines = (to_json({"step": step, **outcome}) + "\n" for outcome in outcomes)
            self._groups.write("".join(lines))

    def _flush(self) -> None:
        for file in (self._writer, self._groups):
            if file is not None:
                file.flush()

    def _evaluate(self) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        with self.time("evaluate"), collect() as collected:
            for evaluation in self.evaluations:
                metrics |= evaluation(self.step)
        self._evaluated = self.step
        recorded = collected.over_replicas(self.engine.parallel).results()
        self._add(metrics, {f"eval/{name}": value for name, value in recorded.items()})
        return metrics

    def _add(self, record: dict[str, float | None], recorded: dict[str, float | None]) -> None:
        """Add recorded metrics to a record. The record's own metrics win, because their names have a fixed meaning."""
        clashes = record.keys() & recorded.keys()
        if new := clashes - self._clashes:
            self._clashes |= new
            log.warning(
                "metric names %s are reserved for the run log; recorded values are dropped. Choose other names.",
                sorted(new),
            )
        record |= {name: value for name, value in recorded.items() if name not in clashes}

    def _save_batch(self, batch: TensorDict, version: int) -> None:
        """Save the full batch on rank 0, as it left the runtime, without the entries that learners computed."""
        from rl_contracts.batch.trajectory import batch_from_tensors, batch_to_tensors, concatenate, save_batch

        shards = self.engine.parallel.gather_tensors(batch_to_tensors(batch.exclude(*COMPUTED)))
        if not self.engine.parallel.is_main:
            return
        combined = concatenate([batch_from_tensors(shard) for shard in shards])
        directory = self.run_dir / "batches"
        directory.mkdir(exist_ok=True)
        save_batch(combined, directory / f"step_{self.step}-version_{version}.safetensors")

    def _start_step(self) -> None:
        self._seconds.clear()
        self._step_begin = time.perf_counter()

    def _write(self, record: dict[str, float | None]) -> None:
        """Write a record with its `timestamp`."""
        if self._writer is not None:
            self._writer.write({**record, "timestamp": time.time()})


def batch_metrics(batch: TensorDict, version: int) -> Metrics:
    """Return the metrics of this rank's shard of a training batch.

    Args:
        batch: this rank's sequences.
        version: the trainer's version when the batch left the runtime.

    Returns:
        `sequences`, `tokens/trained`, `reward/mean`, `reward/square` (see `reward_std`), `truncated/fraction`.
        `staleness/mean` and `staleness/max`: `version` minus the version of a sequence's oldest token.
        `staleness/fraction_0` to `staleness/fraction_3` and `staleness/fraction_4_and_more`: trained tokens by age.
    """
    metrics = Metrics()
    trained, versions, rewards = batch["loss_mask"], batch["versions"], batch["rewards"].double()
    generated = versions >= 0
    # the largest int marks sequences without a generated token, which do not count
    oldest = versions.masked_fill(~generated, 2**31 - 1).amin(-1)
    age, has_generated = version - oldest, generated.any(-1)
    metrics.add("sequences", rewards.new_ones(len(rewards)), kind="sum")
    metrics.add("tokens/trained", trained, kind="sum")
    metrics.add("reward/mean", rewards)
    metrics.add("reward/square", rewards.square())
    metrics.add("truncated/fraction", batch["truncated"])
    metrics.add("staleness/mean", age, has_generated)
    metrics.add("staleness/max", age, has_generated, kind="max")
    token_age = (version - versions).clamp(0, MAX_AGE_BUCKET)
    for bucket in range(MAX_AGE_BUCKET + 1):
        name = (
            f"staleness/fraction_{bucket}"
            if bucket < MAX_AGE_BUCKET
            else f"staleness/fraction_{MAX_AGE_BUCKET}_and_more"
        )
        metrics.add(name, token_age == bucket, trained & generated)
    return metrics


def reward_std(mean: float | None, square: float | None, count: float | None) -> float | None:
    """Return the sample standard deviation of rewards from their mean, the mean of their squares, and their number.

    None for fewer than two rewards.
    """
    if mean is None or square is None or count is None or count < 2:
        return None
    return max((square - mean**2) * count / (count - 1), 0.0) ** 0.5


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or not seconds else amount / seconds
