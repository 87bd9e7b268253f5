"""The process of `rl evaluate`: it evaluates the model that the servers of its run serve.

`result.json` in the run directory has the scores. `metrics.jsonl` and `rollouts/` are as in a training run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rl_apps.preflight.checks import check_models, check_rollout
from rl_apps.preflight.trial_episode import check_golds, run_trial_episode
from rl_apps.run.app import App, Run
from rl_apps.run.chat_template import load_tokenizer
from rl_apps.run.components import Components
from rl_apps.run.sequence_lengths import measure_sets
from rl_apps.settings.config import EvaluateConfig
from rl_apps.settings.data import first_rows, load_rows
from rl_apps.settings.evaluation_sets import evaluated_configs, naming_set
from rl_contracts.config import require
from rl_contracts.runtime.json_lines import to_json
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import MetricsWriter, collect
from rl_contracts.runtime.run_files import StageFile

if TYPE_CHECKING:
    from rl_trainers import CompletionEvaluation
    from rl_trainers.run_log.evaluation_scores import ExampleOutcome

__all__ = ["check", "evaluate"]

log = get_logger("apps.evaluate")

HELD_OUT = "held-out"
"""Name, in results, of the examples of `data`."""
RESULT = "result.json"
"""File of the scores in the run directory."""


def check(run: Run[EvaluateConfig]) -> list[str]:
    """Check model, servers, data, reward and template before any process starts; return the lines to print."""
    configs = evaluated_configs(run.config)
    missing = [f"evaluation.sets.{name}.data.name" for name, config in configs.items() if not config.data.name]
    require(
        bool(configs) and not missing,
        missing[0] if missing else "data.name",
        f"the data to evaluate {run.config.model.path} on, such as data.name=gsm8k for all sets",
        "",
    )
    check_models(run)
    check_rollout(run)
    for name, config in configs.items():
        with naming_set(name):
            load_rows(config.data, "set", "rl", config.seed)
    _check_columns(run.config.by, configs)
    return measure_sets(run, configs, load_tokenizer(run.config.model))


def try_episodes(run: Run[EvaluateConfig]) -> list[str]:
    """Run a trial episode, and score the gold answers, for each evaluation set; return the lines to print."""
    messages = []
    for name, config in evaluated_configs(run.config).items():
        of_set = replace(run, config=config)
        with naming_set(name):
            if config.rollout.trial_episode:
                run_trial_episode(of_set, "rl", "set")
            messages += [f"{name or HELD_OUT}: {sentence}" for sentence in check_golds(of_set, "rl", "set")]
    return messages


def _check_columns(columns: Sequence[str], configs: Mapping[str, Any]) -> None:
    """Reject a column that the examples of no set have."""
    rows = [first_rows(load_rows(config.data, "set", "rl", config.seed), 1)[0] for config in configs.values()]
    available = sorted({key for row in rows for key in row} - {"messages", "prompt_id"})
    for column in columns:
        require(column in available, "--by", f"a column of the data ({', '.join(available)})", column)


def evaluate(run: Run[EvaluateConfig]) -> None:
    """Evaluate on every set, and write the scores."""
    from rl_contracts.batch.parallel import ParallelContext

    engine: Any = SimpleNamespace(parallel=ParallelContext(), version=0)  # what client and runtime read of an engine
    with Components(run) as components:
        client = components.client(engine)
        runtime = components.runtime(client, components.workflow(components.reward()), engine)
        results: dict[str, Any] = {}
        stage_file = StageFile(run.directory)
        record: dict[str, Any] = {"step": 0, "version": 0, "evaluation": True}
        for evaluation in components.completion_evaluations(engine, runtime):
            name = evaluation.name or HELD_OUT
            log.info("evaluating %d examples of %s", len(evaluation.rows), name)
            begin = time.perf_counter()
            with stage_file.show(f"evaluating {name}"), collect() as recorded:
                outcomes = evaluation.outcomes(0)
            seconds = time.perf_counter() - begin
            scores = evaluation.scores(outcomes)
            prefix = f"eval/{evaluation.name}/" if evaluation.name else "eval/"
            record |= {f"{prefix}{score}": value for score, value in (recorded.results() | scores).items()}
            results[name] = {
                "scores": scores,
                "recorded": recorded.results(),
                "seconds": seconds,
                "tokens": sum(sum(outcome.lengths) for outcome in outcomes),
                "by": {column: _scores_by(column, evaluation, outcomes) for column in run.config.by},
            }
        MetricsWriter(run.directory / "metrics.jsonl").write(record | {"timestamp": time.time()})
        (run.directory / RESULT).write_text(to_json(results), encoding="utf-8")


def _scores_by(column: str, evaluation: CompletionEvaluation, outcomes: Sequence[ExampleOutcome]) -> dict[str, Any]:
    """Return the scores of the examples with each value of a column. A list counts for each of its values."""
    groups: dict[str, list[ExampleOutcome]] = {}
    for row, outcome in zip(evaluation.rows, outcomes, strict=True):
        value = row.get(column)
        for each in dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]):
            groups.setdefault(str(each), []).append(outcome)
    return {value: evaluation.scores(groups[value]) for value in sorted(groups)}


APP = App("rl evaluate", __doc__, EvaluateConfig, evaluate, check, servers="alone")
