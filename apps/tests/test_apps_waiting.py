"""Messages of a command while a run starts."""

import io
import json
import re
import time
from pathlib import Path

from rich.console import Console

from rl_apps.cli.driver import WaitingDisplay
from rl_contracts.scheduler import Worker, WorkerStatus
from rl_monitor.progress import RunProgress


def _append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_waiting_display_reports_workers_until_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_apps.cli.driver.MESSAGE_SECONDS", 0.0)
    metrics, console = tmp_path / "metrics.jsonl", Console(record=True, width=200)
    log = tmp_path / "r.log"
    workers = [Worker("rollout", 0, "here", 1, log), Worker("actor", 0, "here", None, Path("a.log"))]
    workers[1].status = WorkerStatus.RUNNING
    log.write_text("2026-11-26 20:00:00.000 INFO [server/0] rl.inference: an earlier start\n")

    with RunProgress(metrics, 9, {}, console) as progress:
        waiting = WaitingDisplay(progress, metrics)
        waiting.tick(workers)
        _append(
            log,
            "2026-11-26 21:16:48.105 INFO [server/0] rl.inference: before\n"
            "\x1b[36m(EngineCore pid=7)\x1b[0;0m INFO 11-26 21:16:49 [core.py:114] init of [red] engine\n\n",
        )
        waiting.tick(workers)
        _append(
            log,
            "Loading:  0%\rLoading: 50%\n2026-11-26 21:16:48.105 INFO [server/0] rl.inference: to serve\n"
            "/site/torch/a.py:64: FutureWarning: a is deprecated\n  warnings.warn(a)\n"
            "W1126 21:16:48.910000 93 torch/utils/_pytree.py:630] <enum 'A'> is an Enum subclass\n",
        )
        waiting.tick(workers)
        log.unlink()
        workers[0].status = WorkerStatus.RUNNING
        waiting.tick(workers)
        stage = {"stage": "evaluate", "since": time.time() - 3, "progress": [40, 512]}
        (tmp_path / "stage.json").write_text(json.dumps(stage))
        waiting.tick(workers)
        metrics.write_text('{"step": 0, "evaluation": true}\n')
        waiting.tick(workers)
        (tmp_path / "stage.json").write_text(json.dumps({"stage": "train", "since": time.time(), "progress": []}))
        waiting.tick(workers)
        with metrics.open("a") as file:
            file.write('{"step": 1}\n')
        waiting.tick(workers)
        (tmp_path / "stage.json").unlink()
        waiting.tick(workers)

    assert re.sub(r"\b\d+ s\b", "0 s", console.export_text()).splitlines() == [
        "0 s, waiting for rollout-0 to start (see logs/)",
        "0 s, waiting for rollout-0 to start (logs/r.log: init of [red] engine)",
        "0 s, waiting for rollout-0 to start (logs/r.log: rl.inference: to serve)",
        "rollout-0 ready after 0 s",
        "0 s, waiting for the first step (see logs/)",
        "evaluating, 40 of 512, 0 s",
        "step 0/9",
        "training, 0 s",
        "step 1/9",
    ]


def test_waiting_display_after_library_warning_omits_earlier_start(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_apps.cli.driver.MESSAGE_SECONDS", 0.0)
    console, log = Console(record=True, width=200), tmp_path / "a.log"
    log.write_text("2026-11-26 20:00:00.000 INFO [trainer/0] rl.trainers: stopped after step 2\n")
    with RunProgress(tmp_path / "metrics.jsonl", 9, {}, console) as progress:
        waiting = WaitingDisplay(progress, tmp_path / "metrics.jsonl")
        waiting.tick([Worker("actor", 0, "here", None, log)])
        _append(log, "W1126 21:16:48.910000 93 torch/utils/_pytree.py:630] <enum 'A'> is an Enum subclass\n")
        waiting.tick([Worker("actor", 0, "here", None, log)])

    assert "stopped" not in console.export_text()


def test_waiting_display_does_not_report_failed_server_as_ready(tmp_path):
    console = Console(record=True, width=200)
    worker = Worker("rollout", 0, "here", 1, tmp_path / "r.log")
    with RunProgress(tmp_path / "metrics.jsonl", 9, {}, console) as progress:
        waiting = WaitingDisplay(progress, tmp_path / "metrics.jsonl")
        waiting.tick([worker])
        worker.status = WorkerStatus.FAILED
        waiting.tick([worker])

    assert "ready" not in console.export_text()


def test_waiting_display_in_resumed_run_shows_start_in_terminal(tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 4}\n')
    with RunProgress(metrics, 9, {}, Console(file=terminal, force_terminal=True)) as progress:
        waiting = WaitingDisplay(progress, metrics)
        waiting.show("starting servers and trainers")
        waiting.tick([Worker("rollout", 0, "here", 1, tmp_path / "r.log")])
        assert progress._screen.view.stage == "starting servers and trainers"
