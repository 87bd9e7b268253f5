"""What `hh-rlhf-rm` and `hh-rlhf-dpo` share: pairs in, a model that tells chosen from rejected out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_apps import parts
from rl_apps.app import App, Run
from rl_apps.closing import after_any, read_metrics
from rl_apps.compose import CONF
from rl_apps.config import RunConfig
from rl_apps.data import head, load_rows
from rl_apps.progress import PREFERENCE_COLUMNS
from rl_apps.supervised import check_rows
from rl_trainers.preference import PreferenceConfig

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.engine import LossFn, TrainEngine


@dataclass
class DPOConfig(RunConfig):
    """A policy that learns from preference pairs."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """The loss and its constants."""


def check(run: Run[Any]) -> list[str]:
    """Everything of these commands that can be known before a process starts."""
    return check_rows(run, "pairs")


def learn(run: Run[Any], engine: TrainEngine, loss: LossFn, reference: TrainEngine | None = None) -> None:
    """The steps of one trainer process: from the data set's pairs to the updated weights."""
    from rl_datasets import BatchLoader
    from rl_trainers import Books, DataSource, LossLearner, PreferenceEvaluation, RecoverPoints
    from rl_trainers import train as run_loop
    from rl_trainers.preference import pairs, pairs_to_share, preference_rows
    from rl_trainers.supervised import add_reference

    config = run.config
    renderer = parts.make_renderer(config)
    rows = load_rows(config.data, "train", "pairs", config.seed)
    batches = BatchLoader(rows, config.data.batch_size, seed=config.seed, epochs=config.epochs)

    def batch_of(rows: list[dict[str, Any]]) -> TensorDict:
        return pairs_to_share(preference_rows(rows, renderer, config.data.max_length), engine.parallel)

    source = DataSource(batches, batch_of)
    held_out = head(load_rows(config.data, "test", "pairs", config.seed), config.evaluation.rows)
    evaluations = []
    if held_out:
        batch = batch_of(held_out)
        add_reference(batch, reference)
        evaluations.append(PreferenceEvaluation(engine, loss, batch))
    books = Books(
        engine,
        run.directory,
        config.checkpoint,
        evaluations=evaluations,
        evaluate_every=config.evaluation.every,
        tokenizer_path=config.model.path,
        renamed={"loss": "loss/train"},
    )
    recover = RecoverPoints(run.directory, config.recover, {"actor": engine}, {"source": source, "books": books})
    run_loop(source, LossLearner(engine, loss, pairs, reference), books, config.total_steps, recover=recover)


def app(name: str, title: str, schema: type[RunConfig], train: Callable[[Run[Any]], None]) -> App:
    """A command that learns from pairs."""
    return App(
        name=name,
        title=title,
        schema=schema,
        train=train,
        check=check,
        defaults=CONF / f"{name.replace('-', '_')}.yaml",
        servers="refused",
        form="pairs",
        columns=PREFERENCE_COLUMNS,
        closing=closing,
    )


def closing(config: RunConfig, run_dir: Path) -> list[str]:
    """Held-out figures before and after, and where the files are."""
    records = read_metrics(run_dir)
    lines = [""]
    for name, label in (
        ("eval/accuracy", "Held-out pairs whose chosen answer is preferred"),
        ("loss/eval", "Held-out loss"),
    ):
        values = [r[name] for r in records if r.get(name) is not None]
        if len(values) >= 2:
            lines.append(f"{label}: {values[0]:.3f} before, {values[-1]:.3f} after.")
    return [*lines, *after_any(config, run_dir)]
