import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # modules shared by tests and the processes they start
sys.path.append(str(Path(__file__).parents[1] / "infra" / "release"))  # modules shared with releases
sys.path.append(str(Path(__file__).parents[1] / "packages" / "rl-inference" / "tests"))  # module `publishing`
collect_ignore = ["plugin"]  # separate package; test_plugin.py runs its tests where it is installed


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of the pretrained model SmolLM2-135M-Instruct. Skips the test if it cannot be downloaded."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache") / "rl" / "models" / "smollm2"
    script = Path(__file__).parents[1] / "infra" / "models" / "smollm2.py"
    done = subprocess.run([sys.executable, script, cache], capture_output=True, text=True, timeout=600)
    if "failed to download" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return cache


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
