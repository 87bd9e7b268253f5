import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # modules shared by tests and the processes they start
sys.path.append(str(Path(__file__).parents[1] / "infra" / "release"))  # modules shared with releases
sys.path.append(str(Path(__file__).parents[1] / "packages" / "rl-inference" / "tests"))  # module `publishing`
collect_ignore = ["plugin"]  # separate package; test_plugin.py runs its tests where it is installed


@pytest.fixture
def start_command(tmp_path):
    """Function that starts a `commands.Command` in `tmp_path`. Running commands are killed after the test."""
    from commands import Command

    commands = []

    def start(name, settings, run="run"):
        commands.append(Command(name, tmp_path / run, settings))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()
