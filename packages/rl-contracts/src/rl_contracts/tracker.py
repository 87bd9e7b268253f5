"""Where the figures of a run go besides its own files: TensorBoard, Weights & Biases, anybody's dashboard."""

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
    """What a tracker is told of a run."""

    name: str
    """How people call it."""
    project: str
    """What it belongs to."""
    directory: Path
    """Where the tracker may keep files of its own; it is there."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings, nested, of JSON's types."""
    id: str = ""
    """What `open` returned when the run began; empty: it begins now."""
    step: int = -1
    """Last step whose figures count; those after it were lost with a trainer, and come again. -1: none."""


class Tracker(ABC):
    """Shows the figures of one run somewhere. It is called in a thread of its own, so it may block.

    Settings are keyword-only arguments of the constructor, which opens nothing and imports no library.
    """

    library: ClassVar[str] = ""
    """Module that must be installed; empty: none."""
    install: ClassVar[str] = ""
    """What to install for it."""
    can_rewind: ClassVar[bool] = False
    """Whether `open` takes back what was logged after `TrackedRun.step`. One that cannot is given each step once, as it
    was when it was taken first."""

    @abstractmethod
    def open(self, run: TrackedRun) -> str:
        """Begin to show a run, or go on with it. Also called after `close`, where the run's trainers are started anew.

        Returns:
            the id by which the run goes on: `run.id`, where that is not empty.
        """

    @abstractmethod
    def log(self, figures: Mapping[str, float], step: int, time: float) -> None:
        """Show figures.

        Args:
            figures: by name; those that could not be measured are left out.
            step: of the run; never less than before, and the same twice where an evaluation follows the last step.
            time: when they were written, in seconds since 1970 (UTC).
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Send what is left. By default there is nothing to do."""

    def check(self) -> None:
        """Refuse to be used where the library is missing, without importing it.

        Raises:
            ConfigError: names what to install.
        """
        found = importlib.util.find_spec(self.library) if self.library else None
        if self.library and (found is None or found.origin is None):  # without: a folder of the user's of that name
            raise ConfigError(
                f"trackers.kind: {type(self).__name__} needs the library {self.library}, found none here; install "
                f"{self.install or self.library}, or leave the tracker out."
            )
