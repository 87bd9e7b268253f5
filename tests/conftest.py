import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # what tests share, and with processes of their own
sys.path.append(str(Path(__file__).parents[1] / "infra" / "release"))  # what they share with releases
sys.path.append(str(Path(__file__).parents[1] / "packages" / "rl-inference" / "tests"))  # `publishing`
collect_ignore = ["plugin"]  # a package of its own, whose tests run where it is installed: see test_plugin.py


@pytest.fixture
def start_command(tmp_path):
    """Starts commands (`commands.Command`) in directories of the test, and ends those that a failed test left."""
    from commands import Command

    started = []

    def begin(name, settings, run="run"):
        started.append(Command(name, tmp_path / run, settings))
        return started[-1]

    yield begin
    for command in started:
        command.kill()
