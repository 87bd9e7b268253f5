"""Contract of an experiment tracker, such as TensorBoard or Weights & Biases, which receives the metrics of a run."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.errors import ConfigError

__all__ = ["TrackedRun", "Tracker"]


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for a tracker."""

    name: str
    """Display name of the run."""
    project: str
    """Project that the run belongs to."""
    directory: Path
    """Existing directory for the tracker's files."""
    config: dict[str, Any] = field(default_factory=dict)
    """Nested settings of the run, of JSON types."""
    id: str = ""
    """Id that `open` returned at the start of the run; empty for a new run."""
    step: int = -1
    """Last step with valid metrics, or -1. Later steps were lost with a trainer and will be logged again."""


class Tracker(ABC):
    """Sends the metrics of one run to a dashboard. Its methods run in a separate thread, so they may block.

    Settings are keyword-only arguments of the constructor, which opens nothing and imports no library.
    """

    library: ClassVar[str] = ""
    """Module that must be installed; empty for none."""
    install: ClassVar[str] = ""
    """Name of the package that provides the library, for `pip install`; empty if equal to `library`."""
    can_rewind: ClassVar[bool] = False
    """True if `open` discards the metrics logged after `TrackedRun.step`. If False, each step is logged only once, with
    the metrics of its first execution."""

    @abstractmethod
    def open(self, run: TrackedRun) -> str:
        """Start or resume the tracking of a run. Also called after `close`, when the trainers of the run restart.

        Returns:
            the id for resuming the run: `run.id` if that is not empty.
        """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Send the metrics of one step.

        Args:
            metrics: measured values by name.
            step: step of the run. It never decreases; it repeats if an evaluation follows the last step.
            time: time of the measurement, in seconds since 1970 (UTC).
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Send the remaining metrics. The default does nothing."""

    def check(self) -> None:
        """Check that the library is installed, without importing it.

        Raises:
            ConfigError: the library is missing; the message names the package to install.
        """
        spec = importlib.util.find_spec(self.library) if self.library else None
        if self.library and (spec is None or spec.origin is None):  # no origin: a user's folder of that name
            raise ConfigError(
                f"trackers.kind: {type(self).__name__} requires the library {self.library}, which is not installed; "
                f"install {self.install or self.library}, or remove the tracker."
            )
