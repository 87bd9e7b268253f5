"""Settings of named evaluation sets, and the run that each of them stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rl_apps.settings.data import DataConfig
from rl_contracts.config import require
from rl_contracts.errors import ConfigError, DataError, ModelError
from rl_trainers.run_log.evaluation import EvaluationConfig

_NAME = re.compile(r"[\w-]+")


@dataclass
class EvaluationDataConfig:
    """The data of an evaluation set. Without `name`, values that are not set are those of `data`."""

    name: str = ""
    """Data set, as `data.name`. Empty: the one of the run, with its path, columns and options."""
    path: str = ""
    """Hub id, directory or file, as `data.path`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column names that differ from the expected names, as `data.columns`."""
    test_split: str = ""
    """Name of the split, by default `data.test_split`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the data set, by name."""

    def over(self, data: DataConfig) -> DataConfig:
        """Return the settings of the data of a run, with the values of this set."""
        plain = DataConfig()
        defaults: dict[str, Any] = {"path": plain.path, "columns": {}, "test_split": plain.test_split, "options": {}}
        base = replace(data, **(defaults if self.name else {}))
        return replace(
            base,
            name=self.name or base.name,
            path=self.path or base.path,
            columns=self.columns or base.columns,
            test_split=self.test_split or base.test_split,
            options=self.options or base.options,
        )


@dataclass
class EvaluationSetConfig:
    """A named data set to evaluate on. Values that are not set are those of the run."""

    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    """The examples."""
    reward: str = ""
    """Installed reward function, or a dotted path. Empty: `rollout.reward`."""
    examples: int | None = None
    """Number of examples: a random sample that is the same in every run. null: `evaluation.examples`."""
    n: int | None = None
    """Completions per example. null: `evaluation.n`."""
    k: list[int] | None = None
    """Values of k for `pass@k` and `maj@k`. null: `evaluation.k`, or 1 and `n` if the set has its own `n`."""
    temperature: float | None = None
    """Sampling temperature. null: `evaluation.temperature`."""
    max_new_tokens: int | None = None
    """Maximum number of tokens to generate per completion. null: `evaluation.max_new_tokens`."""


@dataclass
class EvaluationSettings(EvaluationConfig):
    """Evaluation of completions for held-out examples, of `data.test_split` and of named sets."""

    sets: dict[str, EvaluationSetConfig] = field(default_factory=dict)
    """Further data sets to evaluate on, by name: `evaluation.sets.NAME.n=8`. Their metrics are `eval/NAME/...`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.sets:
            expected = "names of letters, digits, _ and -, because metrics and files have these names"
            require(_NAME.fullmatch(name) is not None, "evaluation.sets", expected, name)
            self.of(name)

    def of(self, name: str) -> EvaluationConfig:
        """Return the settings of a named set.

        Raises:
            ConfigError: a value of the set is invalid.
        """
        chosen, section = self.sets[name], f"evaluation.sets.{name}."
        expected = "a number, because evaluation.examples=0"
        require(chosen.examples is not None or self.examples > 0, f"{section}examples", expected, chosen.examples)
        try:
            return EvaluationConfig(
                self.every,
                _first(chosen.examples, self.examples),
                _first(chosen.n, self.n),
                _first(chosen.k, self.k if chosen.n is None else []),
                _first(chosen.temperature, self.temperature),
                _first(chosen.max_new_tokens, self.max_new_tokens),
            )
        except ConfigError as error:
            raise ConfigError(str(error).replace("evaluation.", section)) from error


def _first[T](value: T | None, default: T) -> T:
    return default if value is None else value


def config_of(config: Any, name: str) -> Any:
    """Return the config of a run as it applies to a named evaluation set: its data, sampling and reward."""
    chosen = config.evaluation.sets[name]
    sampling = vars(config.evaluation.of(name))
    return replace(
        config,
        data=chosen.data.over(config.data),
        evaluation=replace(config.evaluation, **sampling, sets={}),
        rollout=replace(config.rollout, reward=chosen.reward or config.rollout.reward),
    )


def configs_of_sets(config: Any) -> dict[str, Any]:
    """Return the config of each named evaluation set that has examples, by name."""
    names = getattr(config.evaluation, "sets", {})
    configs = {name: config_of(config, name) for name in names}
    return {name: of_set for name, of_set in configs.items() if of_set.evaluation.examples}


def evaluated_configs(config: Any) -> dict[str, Any]:
    """Return the configs of all evaluation sets by name: the held-out examples of the run (""), and the named sets."""
    own = {"": config} if config.evaluation.examples and config.data.name else {}
    return own | configs_of_sets(config)


@contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Add the name of the evaluation set to the errors of a block; "" adds nothing."""
    try:
        yield
    except (ConfigError, DataError, ModelError) as error:
        if not name:
            raise
        raise type(error)(f"evaluation.sets.{name}: {error}") from error
