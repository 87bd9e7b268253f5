"""Definition of an app: a training program that runs as a command.

`rl run my_package.my_app:APP` runs an app by its dotted path. `rl run NAME` runs an app in the entry-point
group `rl.apps`. The driver provides everything else: composing and checking the config, the dry run,
servers and trainers under any scheduler, progress output, resuming after a stop, and the final summary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl_apps.run import summary as closing
from rl_apps.settings.compose import compose
from rl_apps.settings.config import RunConfig
from rl_apps.settings.data import CHAT
from rl_apps.settings.device_layout import Layout
from rl_contracts.errors import ConfigError
from rl_monitor.progress import GRPO_COLUMNS

__all__ = ["App", "Run"]


@dataclass(frozen=True)
class Run[C: RunConfig]:
    """Context of one run: config, devices and directory. The checks, the launcher and the trainers receive it."""

    config: C
    """Settings of the run."""
    layout: Layout
    """Backends and devices of the trainer and the servers."""
    directory: Path
    """Run directory."""
    device: str
    """Device of the models: `cpu` or `cuda`."""
    servers: tuple[str, ...] = ()
    """Addresses of the inference servers; only set in trainer processes."""

    @property
    def tokenizer(self) -> str:
        """Directory of the tokenizer: the model's, or `tokenizer` in the run directory if a chat template is set."""
        model = self.config.model
        return str(self.directory / "tokenizer") if model.chat_template else model.directory()


@dataclass(frozen=True)
class App:
    """One command. Checks run before any process starts; `train` runs in every trainer process."""

    name: str
    """Name of the command, for messages."""
    title: str
    """One line for `--help`."""
    example: str = field(default="total_steps=20", kw_only=True)
    """Settings of the example in `--help`, which works without other files."""
    schema: type[RunConfig]
    """Config class with the settings of the command."""
    train: Callable[[Run[Any]], None]
    """Function that does the work of one trainer process."""
    check: Callable[[Run[Any]], list[str]]
    """Function that checks data, algorithm and batch: raises an error, or returns sentences about a step's batch."""
    defaults: Path | None = None
    """YAML file merged over the schema. Presets may be in folders beside it."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Settings without a sensible default, which the user must set, each with its possible values."""
    rejected: tuple[str, ...] = ()
    """Settings that `check` always rejects; `--help` omits them."""
    servers: str = "required"
    """Use of inference servers: `required`, `optional` or `rejected`."""
    measure: Callable[[Run[Any]], list[str]] = lambda run: []
    """Function that checks the examples with the tokenizer of the model, before any process starts. It raises errors,
    or returns messages for the user. See `rl_apps.run.sequence_lengths.measure_rows`."""
    form: str = "rl"
    """Form in which the data is read, see `rl_apps.settings.data.load_rows`."""
    warm_up: bool = True
    """True if the embedded model of the generated data is warmed up before the first step."""
    lessons: str = "answers"
    """Content of the warm-up: worked `answers`, conversations of several `turns`, or calls of `tools`. See
    `rl_apps.embedded.curriculum`."""
    starts_from: str = ""
    """Name of the app whose newest checkpoint below `runs/` is the embedded model; empty: none."""
    columns: dict[str, tuple[str, str]] = field(default_factory=lambda: GRPO_COLUMNS)
    """Columns of a step's progress line: label to (name in metrics.jsonl, format)."""
    summary: Callable[[Any, Path], list[str]] = closing.after_any
    """Function `(config, run directory) -> lines` that returns the final summary and a suggested next command."""

    def config(self, overrides: Sequence[str] = (), file: Path | None = None) -> Any:
        """Return a config of this app from its defaults, a file and `key=value`. See `rl_apps.settings.compose`."""
        return compose(self.schema, [path for path in (self.defaults, file) if path is not None], overrides)

    def require_settings(self, config: Any) -> None:
        """Require the settings that have no sensible default. Only the data set `chat` needs `data.path`.

        Raises:
            ConfigError: with all missing settings.
        """
        missing = {key: values for key, values in self.required.items() if not attrgetter(key)(config)}
        if config.data.name != CHAT:
            missing.pop("data.path", None)
        if missing:
            settings = "; ".join(f"{key}=... ({values})" for key, values in missing.items())
            raise ConfigError(f"{self.name} needs {settings}. `{self.name} --help` shows an example.")
