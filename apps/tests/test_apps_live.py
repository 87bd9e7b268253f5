"""The live view of a run: what it draws, in a real terminal that changes its size and is left by Ctrl-C; and lines
where there is no terminal."""

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_apps.cli import main
from rl_contracts.testing.waiting import wait_until
from rl_launchers import RunControl
from rl_monitor.live import RunView, sparkline
from rl_monitor.progress import FIGURES, GRPO_COLUMNS, RunProgress
from rl_monitor.run_directory import names_of

TIMES = {"time/step": 2.0, "time/rollout_wait": 0.5, "time/train": 1.0, "time/publish": 0.1}
STEP = {
    "reward/mean": 0.25,
    "length/mean": 19.0,
    "truncated/fraction": 0.5,
    "staleness/mean": 1.0,
    "gap/mean_abs": 1e-6,
}
MORE = {"entropy/mean": 0.125, "throughput/generated_tokens_per_s": 1234.0, **TIMES}
ANSWER = {"prompt_id": 3, "episode_id": 2, "reward": 1.0, "rejected": None, "truncated": False, "prompt": "1 + 1?"}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, **STEP, **MORE, "reward/mean": step / 4, **more}


def drawn(view: RunView, width: int = 100, height: int = 40) -> str:
    file = io.StringIO()
    Console(file=file, width=width, height=height, force_terminal=True, color_system=None, _environ={}).print(view)
    return file.getvalue()


def test_view_draws_figures_with_their_course_time_left_stages_and_warnings() -> None:
    view = RunView("runs/one", 9, FIGURES)
    for step in (1, 2, 3):
        view.add(record(step))
    view.warn("cut", "step 2: half of it")
    view.warn("cut", "step 3: half of it")

    text = drawn(view)

    assert re.search(r"3/9 +0:00:12 left", text)
    assert re.search(r"reward +0\.750 +▁▅█", text)
    for label, value in (("length", "19.0"), ("truncated", "50.0%"), ("stale", "1.00"), ("gap", "1.0e-06")):
        assert re.search(rf"{label} +{re.escape(value)} ", text)
    assert re.search(r"entropy +0\.125.*\n", text)
    assert re.search(r"gen tok/s +1234", text)
    assert "step 2.00 s: wait 25%  train 50%  publish 5%  other 20%" in text
    assert "█" * 45 in text
    assert "accuracy" not in text
    assert text.count("warning: ") == 1
    assert "warning: step 3: half of it" in text


def test_view_shows_accuracy_where_rewards_are_0_or_1_and_held_out_rewards_elsewhere() -> None:
    view = RunView("runs/one", 9, FIGURES)
    view.add({"step": 0, "eval/accuracy": 0.0, "eval/reward": 0.0})
    assert "accuracy" in drawn(view)
    assert "held-out" not in drawn(view)
    view.add({"step": 1, "eval/reward": 0.5})  # it was by chance
    assert "accuracy" not in drawn(view)
    assert "held-out reward 0.500" in drawn(view)


def test_view_of_a_run_that_went_back_to_a_recover_point_forgets_the_steps_behind_it() -> None:
    view = RunView("run", 9, FIGURES)
    for step in (1, 2, 3, 2):
        view.add(record(step))
    assert [found["step"] for found in view.records] == [1, 2, 2]


@pytest.mark.parametrize(("width", "height"), [(100, 40), (60, 20), (20, 5), (9, 3)])
def test_view_fits_terminals_of_any_size(width: int, height: int) -> None:
    view = RunView("a/run/whose/name/is/long", 9, FIGURES, stage="waiting for the servers to start")
    view.add(record(1))
    assert max(map(len, drawn(view, width, height).splitlines())) == width - 2  # ^C behind them moves no line


def test_sparkline_of_the_last_values_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([9.0, 0.0, 3.5, 7.0], 3) == "▁▅█"
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""


def at_the_terminal() -> None:
    """A process's own: its standard input is the terminal that controls it, and Ctrl-C there ends it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


class Terminal:
    """A process that has a terminal, and what it wrote there."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        self.wrote = b""
        size = ("COLUMNS", "LINES")  # in which pytest-xdist tells its workers another one
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rl_apps.cli.main", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={name: os.environ[name] for name in os.environ if name not in size} | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=at_the_terminal,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self.master, 65536):
                self.wrote += piece
        except OSError:  # the process has ended
            return

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, 120, what=lambda: self.wrote.decode())

    def code(self) -> int:
        code = self.process.wait(120)
        self._reader.join(10)
        return code


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run that goes on, with a step and its answers."""
    (tmp_path / "rollouts").mkdir()
    answer = {**ANSWER, "completion": "#### 2\x1b[31m", "version_first": 0, "version_last": 0}
    (tmp_path / "rollouts" / "step_1-0.jsonl").write_text(json.dumps(answer) + "\n")
    (tmp_path / "config.yaml").write_text("total_steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    with RunControl(names_of(tmp_path), beat=0.4):
        yield tmp_path


@pytest.mark.slow
def test_watch_in_a_terminal_draws_follows_resizes_and_leaves_it_clean(run: Path) -> None:
    terminal = Terminal("watch", str(run))
    terminal.wait_for(lambda: b"1/9" in terminal.wrote and b"== step 1, prompt 3" in terminal.wrote)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(record(2, **{"groups/failed": 1})) + "\n")
    terminal.wait_for(lambda: b"2/9" in terminal.wrote and b"1 group(s) failed" in terminal.wrote)

    terminal.resize(24, 60)
    terminal.wait_for(lambda: b"\x1b[2J\x1b[H" in terminal.wrote)
    os.write(terminal.master, b"\x03")

    assert terminal.code() == 130
    wrote = terminal.wrote.decode()
    assert "Traceback" not in wrote
    assert "#### 2\x1b[31m" not in wrote  # what a model says moves no cursor
    assert "#### 2\\x1b[31m" in wrote
    assert wrote.rindex("\x1b[?25h") > wrote.rindex("\x1b[?25l")  # the cursor is there again
    assert "\x1b[?1049h" not in wrote
    after = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", wrote.rpartition("\x1b[2J")[2]).replace("^C", "")
    assert max(map(len, re.split(r"[\r\n]+", after))) == 58


def test_watch_elsewhere_prints_a_line_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("total_steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2)))

    assert main.main(["watch", str(tmp_path)]) == 0

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/9", "2/9"]
    assert "entropy 0.125" in lines[0]
    assert "\x1b" not in "".join(lines)


def test_watch_of_a_run_that_has_not_begun_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names_of(tmp_path).add("one", "1")

    assert main.main(["watch", str(tmp_path)]) == 2

    assert "this run has not begun; `rl status` says what it waits for" in capsys.readouterr().err


def test_progress_without_a_terminal_has_no_view_even_where_colours_are_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    (tmp_path / "metrics.jsonl").touch()
    with RunProgress(tmp_path / "metrics.jsonl", 9, GRPO_COLUMNS, Console(file=file, highlight=False)) as progress:
        progress.say("starting")
        progress.say("starting")
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")

    assert file.getvalue().startswith("starting\nstep 1/9  reward 0.250")
    assert "╭" not in file.getvalue()
