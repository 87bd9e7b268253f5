"""Live view of a run: its drawing, a real terminal with a resize and Ctrl-C, and plain lines without a terminal."""

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
from rl_monitor.live import RunView, Screen, sparkline
from rl_monitor.progress import GRPO_COLUMNS, METRICS, RunProgress
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
COMPLETION = {"prompt_id": 3, "episode_id": 2, "reward": 1.0, "rejected": None, "truncated": False, "prompt": "1 + 1?"}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, **STEP, **MORE, "reward/mean": step / 4, **more}


def draw(view: RunView, width: int = 100, height: int = 40) -> str:
    file = io.StringIO()
    Console(file=file, width=width, height=height, force_terminal=True, color_system=None, _environ={}).print(view)
    return file.getvalue()


def test_view_draws_metrics_sparklines_stages_and_warnings() -> None:
    view = RunView("runs/one", 9, METRICS)
    for step in (1, 2, 3):
        view.add(record(step))
    view.warn("cut", "step 2: half of them")
    view.warn("cut", "step 3: half of them")

    text = draw(view)

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
    assert "warning: step 3: half of them" in text


def test_view_shows_either_accuracy_or_held_out_reward() -> None:
    view = RunView("runs/one", 9, METRICS)
    view.add({"step": 0, "eval/accuracy": 0.0, "eval/reward": 0.0})
    assert "accuracy" in draw(view)
    assert "held-out" not in draw(view)
    view.add({"step": 1, "eval/reward": 0.5})  # not 0 or 1, so earlier rewards were no accuracy
    assert "accuracy" not in draw(view)
    assert "held-out reward 0.500" in draw(view)


def test_view_after_resume_removes_later_steps() -> None:
    view = RunView("run", 9, METRICS)
    for step in (1, 2, 3, 2):
        view.add(record(step))
    assert [each["step"] for each in view.records] == [1, 2, 2]


@pytest.mark.parametrize(("width", "height"), [(100, 40), (9, 3)])
def test_view_fits_terminals_of_any_size(width: int, height: int) -> None:
    view = RunView("a/run/whose/name/is/long", 9, METRICS, stage="waiting for the servers to start")
    view.add(record(1))
    # two columns remain for the ^C that a terminal prints
    assert max(map(len, draw(view, width, height).splitlines())) == width - 2


def test_view_in_80_columns_shows_seconds_of_stage_and_curves() -> None:
    stage = "comparing log-probs of servers and trainer, 12 of 32, 100 s"
    view = RunView("runs/one", 9, METRICS, stage=stage)
    assert stage in draw(view, width=80)
    for step in range(1, 9):
        view.add(record(step, **{"throughput/trained_tokens_per_s": 123456.0 * step}))
    lines = draw(view, width=80).splitlines()
    assert any(re.search(r"reward +2\.000 +[▁-█]{8}.*[▁-█]{8}", line) for line in lines)
    assert len({len(line) for line in lines}) == 1, "no line wraps or is wider than the frame"


@pytest.mark.parametrize("height", [40, 18])
def test_view_shows_completion_of_long_prompt(tmp_path: Path, height: int) -> None:
    prompt = f"<|im_start|>system\n{'rule\n' * 50}<|im_end|>\n<|im_start|>user\nOne {'long ' * 99}?<|im_end|>\n"
    (tmp_path / "rollouts").mkdir()
    completion = COMPLETION | {"prompt": prompt, "completion": "Think.\n" * 20}
    (tmp_path / "rollouts" / "step_1-0.jsonl").write_text(json.dumps(completion) + "\n")
    view = RunView("runs/one", 9, METRICS)
    view.add(record(1))
    Screen(view, tmp_path, Console()).update_completion()

    text = draw(view, height=height)

    assert "user: One long" in text
    assert "completion: Think." in text
    assert "rule" not in text
    omitted = re.search(r"\[\.\.\. (\d+) more lines; see rl show\]", text)
    assert omitted
    assert text.count("Think.") + int(omitted[1]) == 20
    assert len(text.splitlines()) < height


def test_progress_in_terminal_shows_stage_of_trainer(tmp_path: Path) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    with RunProgress(tmp_path / "metrics.jsonl", 9, GRPO_COLUMNS, console, from_the_start=True) as progress:
        (tmp_path / "stage.json").write_text('{"stage": "evaluate", "since": 0, "progress": [3, 8]}')
        progress.tick()
        assert progress._screen is not None
        assert progress._screen.view.stage.startswith("evaluating, 3 of 8, ")
        (tmp_path / "stage.json").unlink()
        progress.tick()
        assert progress._screen.view.stage == "training"


def test_progress_in_a_notebook_cell_has_no_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # Jupyter sets it for kernels, whose cells run `!` in a pseudo-terminal
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    console = Console(file=terminal, force_terminal=True)
    with RunProgress(tmp_path / "metrics.jsonl", 9, GRPO_COLUMNS, console) as progress:
        assert progress._screen is None


def test_progress_of_resumed_run_shows_its_steps_before_training(tmp_path: Path) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(5)) + "\n")
    progress = RunProgress(tmp_path / "metrics.jsonl", 9, GRPO_COLUMNS, Console(file=terminal, force_terminal=True))
    progress.rewind()
    progress.print_message("starting servers and trainers")
    assert progress._screen is not None
    assert "5/9" in draw(progress._screen.view)


def test_sparkline_scales_last_values_from_minimum_to_maximum() -> None:
    assert sparkline([9.0, 0.0, 3.5, 7.0], 3) == "▁▅█"
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""


def attach_terminal() -> None:
    """Make the terminal on standard input the controlling one, and let Ctrl-C end the process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore SIGINT


class Terminal:
    """Process in a pseudoterminal, with its output."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        self.output = b""
        size_variables = ("COLUMNS", "LINES")  # pytest-xdist sets another size for its workers
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rl_apps.cli.main", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={name: os.environ[name] for name in os.environ if name not in size_variables}
            | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=attach_terminal,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self.master, 65536):
                self.output += piece
        except OSError:  # the process has ended
            return

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, 120, what=lambda: self.output.decode())

    def code(self) -> int:
        code = self.process.wait(120)
        self._reader.join(10)
        return code


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a running run with one step and its completions."""
    (tmp_path / "rollouts").mkdir()
    completion = {**COMPLETION, "completion": "#### 2\x1b[31m", "version_first": 0, "version_last": 0}
    (tmp_path / "rollouts" / "step_1-0.jsonl").write_text(json.dumps(completion) + "\n")
    (tmp_path / "config.yaml").write_text("total_steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    with RunControl(names_of(tmp_path), beat=0.4):
        yield tmp_path


@pytest.mark.slow
def test_watch_in_terminal_follows_resizes_and_restores_it(run: Path) -> None:
    terminal = Terminal("watch", str(run))
    terminal.wait_for(lambda: b"1/9" in terminal.output and b"== step 1, prompt 3" in terminal.output)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(record(2, **{"groups/failed": 1})) + "\n")
    terminal.wait_for(lambda: b"2/9" in terminal.output and b"1 group(s) failed" in terminal.output)

    terminal.resize(24, 60)
    terminal.wait_for(lambda: b"\x1b[2J\x1b[H" in terminal.output)
    os.write(terminal.master, b"\x03")

    assert terminal.code() == 130
    output = terminal.output.decode()
    assert "Traceback" not in output
    assert "#### 2\x1b[31m" not in output  # model output must not move the cursor
    assert "#### 2\\x1b[31m" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is visible again
    assert "\x1b[?1049h" not in output
    last_drawing = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", output.rpartition("\x1b[2J")[2]).replace("^C", "")
    assert max(map(len, re.split(r"[\r\n]+", last_drawing))) == 58


def test_watch_without_terminal_prints_one_line_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("total_steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2)))

    assert main.main(["watch", str(tmp_path)]) == 0

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/9", "2/9"]
    assert "entropy 0.125" in lines[0]
    assert "\x1b" not in "".join(lines)


def test_watch_of_run_that_has_not_begun_reports_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names_of(tmp_path).add("one", "1")

    assert main.main(["watch", str(tmp_path)]) == 2

    assert "this run has not begun; `rl status` shows the reason" in capsys.readouterr().err


def test_progress_without_terminal_has_no_view_with_forced_colors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    (tmp_path / "metrics.jsonl").touch()
    with RunProgress(tmp_path / "metrics.jsonl", 9, GRPO_COLUMNS, Console(file=file, highlight=False)) as progress:
        progress.print_message("starting")
        progress.print_message("starting")
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")

    assert file.getvalue().startswith("starting\nstep 1/9  reward 0.250")
    assert "╭" not in file.getvalue()
