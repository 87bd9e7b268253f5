"""What an app is: the few things that make a command out of a training program, wherever it lives.

`rl run my_package.my_app:APP` runs one, `rl run NAME` one that is installed in the entry-point group `rl.apps`. The
driver gives it its whole life: composing and checking the config, the dry run, servers and trainers under any
scheduler, the progress, going on after a stop, and the last lines.
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
    """One run: what its checks, its launcher and its trainers know of it."""

    config: C
    """Its settings."""
    layout: Layout
    """Its trainers and servers."""
    directory: Path
    """Where it keeps its files."""
    device: str
    """Where it computes: `cpu` or `cuda`."""
    servers: tuple[str, ...] = ()
    """Addresses of the inference servers; known to trainers."""

    @property
    def tokenizer(self) -> str:
        """Directory of its tokenizer: the model's, or one of the run where a chat template is given."""
        model = self.config.model
        return str(self.directory / "tokenizer") if model.chat_template else model.directory()


@dataclass(frozen=True)
class App:
    """One command. Checks run before any process starts; `train` runs in every trainer process."""

    name: str
    """Of the command, for messages."""
    title: str
    """One line for `--help`."""
    schema: type[RunConfig]
    """Its settings."""
    train: Callable[[Run[Any]], None]
    """The work of one trainer process."""
    check: Callable[[Run[Any]], list[str]]
    """Raises what is wrong with the data, the algorithm or the batch; returns the arithmetic of a step in sentences."""
    defaults: Path | None = None
    """YAML file laid over the schema; presets may lie in folders beside it."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Settings without a sensible default, empty unless the user says them, each with what it may be."""
    rejected: tuple[str, ...] = ()
    """Settings that `check` always refuses; `--help` leaves them out."""
    servers: str = "required"
    """Whether inference servers are `required`, `optional` or `refused`."""
    measure: Callable[[Run[Any]], list[str]] = lambda run: []
    """Looks at the rows with the tokenizer of the run's model, once that is there and before a process starts. Raises
    what cannot be used; returns what to tell. See `rl_apps.run.sequence_lengths.measure_rows`."""
    form: str = "rl"
    """In which its data is read, see `rl_apps.settings.data.load_rows`; a model that is made on the spot is made for
    it."""
    warm_up: bool = True
    """Whether the embedded model of the generated data is warmed up before the first step."""
    lessons: str = "answers"
    """What that warm-up shows: worked `answers`, conversations of several `turns`, or calls of `tools`; see
    `rl_apps.embedded.curriculum`."""
    columns: dict[str, tuple[str, str]] = field(default_factory=lambda: GRPO_COLUMNS)
    """What a step's line shows: label to (name in metrics.jsonl, format)."""
    summary: Callable[[Any, Path], list[str]] = closing.after_any
    """`(config, run directory) -> lines`: what was learned, and what to try next."""

    def config(self, overrides: Sequence[str] = (), file: Path | None = None) -> Any:
        """A config of this app: its defaults, then a file, then `key=value`. See `rl_apps.settings.compose.compose`."""
        return compose(self.schema, [path for path in (self.defaults, file) if path is not None], overrides)

    def require_settings(self, config: Any) -> None:
        """Ask for what has no sensible default. (Data sets other than `chat` know where their rows are.)

        Raises:
            ConfigError: names all that was not said.
        """
        left = {key: what for key, what in self.required.items() if not attrgetter(key)(config)}
        if config.data.name != CHAT:
            left.pop("data.path", None)
        if left:
            asked = "; ".join(f"{key}=... ({what})" for key, what in left.items())
            raise ConfigError(f"{self.name} needs {asked}. `{self.name} --help` lists what else there is.")
