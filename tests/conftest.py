import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # helpers of several tests and their processes
sys.path.append(str(Path(__file__).parents[1] / "infra" / "release"))  # helpers of tests and releases
sys.path.append(str(Path(__file__).parents[1] / "packages" / "rl-inference" / "tests"))  # `publishing`
collect_ignore = ["plugin"]  # a separate package; test_plugin.py installs it and runs its tests


@pytest.fixture
def start_command(tmp_path):
    """Start commands (`commands.Command`) in directories of the test, and kill them at its end."""
    from commands import Command

    started = []

    def begin(name, settings, run="run"):
        started.append(Command(name, tmp_path / run, settings))
        return started[-1]

    yield begin
    for command in started:
        command.kill()
