"""Warnings about failed comparisons, and the end of the run if they repeat."""

from __future__ import annotations

import math

from rl_contracts.errors import WeightUpdateError
from rl_contracts.runtime.logging import get_logger

log = get_logger("trainers.gap")

PATIENCE = 5
"""Consecutive failures at which an alarm stops the run: a single gap may be chance, and a real fault repeats in each
comparison."""


class Alarm:
    """Counter of the consecutive failures of one comparison, such as of the scores of one server.

    The alarm reports the 1st, 2nd, 4th, 8th, ... consecutive failure. It stops the run if a gap is too large, or after
    `PATIENCE` consecutive failures.

    Args:
        stops: whether repeated failures stop the run.
    """

    def __init__(self, stops: bool = True) -> None:
        self.patience, self.in_row = PATIENCE if stops else math.inf, 0
        self._too_much = self._excused = False

    def count(self, off: bool, too_much: bool = False, certain: bool = False) -> bool:
        """Count a comparison and return whether to report it.

        Args:
            off: whether the comparison failed.
            too_much: whether the gap is too large to continue the run.
            certain: whether the failure proves a fault. After an excused failure, it sets the count to 1.
        """
        if not off or (certain and self._excused):
            self.in_row, self._excused = 0, False
        self.in_row, self._too_much = self.in_row + off, too_much
        return (off and self.in_row & (self.in_row - 1) == 0) or self._stops

    @property
    def _stops(self) -> bool:
        return self._too_much or (self.in_row >= self.patience and not self._excused)

    def warn(self, message: str, excused: bool = False) -> None:
        """Log a warning, or stop the run.

        Args:
            message: the text of the warning or error.
            excused: whether the cause, such as rounding, is not a fault. `PATIENCE` does not apply to excused
                failures, and the first failure after them sets the count to 1.

        Raises:
            WeightUpdateError: the gap is too large, or `PATIENCE` consecutive comparisons failed.
        """
        if self._excused and not excused:
            self.in_row = 1
        self._excused = excused
        if self._stops:
            raise WeightUpdateError(message)
        log.warning(message)
