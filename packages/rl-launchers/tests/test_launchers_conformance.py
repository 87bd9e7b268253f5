"""Conformance tests of the local scheduler."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_contracts.conformance.scheduler import SchedulerConformance
from rl_launchers import LocalScheduler


@pytest.mark.slow
class TestLocalScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self, tmp_path: Path) -> Iterator[LocalScheduler]:
        with LocalScheduler(tmp_path / "logs") as scheduler:
            yield scheduler
