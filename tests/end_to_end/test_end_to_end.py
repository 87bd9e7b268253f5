"""Complete commands with real servers, real trainers and tiny models."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from rl_apps.run.components import weights_directory
from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.metric_docs import meaning
from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.testing.waiting import wait_until

BIN = Path(sys.executable).parent
SMALL = (
    "recipe=embedded",
    "data.batch_size=4",
    "rollout.group_size=4",
    "rollout.generation.max_new_tokens=12",
    "evaluation.examples=8",
)
ENDLESS = ("total_steps=100000", "evaluation.examples=0", "launcher.max_restarts=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Directory with a small data set in the format of GSM8K."""
    directory = tmp_path_factory.mktemp("gsm8k")
    for split, first, count in (("train", 0, 120), ("test", 500, 24)):
        rows = (
            {
                "question": f"Tom has {n} nuts and eats {n % 7}. How many are left?",
                "answer": f"{n}-{n % 7}=<<{n}-{n % 7}={n - n % 7}>>{n - n % 7}\n#### {n - n % 7}",
            }
            for n in range(first, first + count)
        )
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def _command(name, *arguments):
    return [str(BIN / name), *map(str, arguments)]


def _run(name, *arguments, timeout=280):
    return subprocess.run(_command(name, *arguments), capture_output=True, text=True, timeout=timeout)


def _records(run_dir):
    return list(json_lines(run_dir / "metrics.jsonl"))


def _processes_of(run_dir):
    """Return the processes with the run directory or its weights in their command line."""
    names = (str(run_dir), str(weights_directory(run_dir)))
    processes = (p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    return [p for p in processes if any(name in " ".join(p.info["cmdline"] or ()) for name in names)]


def _server_of(run_dir):
    return next(p for p in _processes_of(run_dir) if "rl_inference.embedded_server" in " ".join(p.cmdline()))


@pytest.fixture(scope="module")
def finished_run(model, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "grpo"
    result = _run(
        "gsm8k-grpo",
        f"run_dir={run_dir}",
        f"model.path={model}",
        "total_steps=4",
        "checkpoint.save_batches=true",
        "trackers=tensorboard",
        *SMALL,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return run_dir, result


def test_grpo_asynchronous_run_writes_documented_files(finished_run, model):
    from transformers import AutoModelForCausalLM

    run_dir, result = finished_run
    assert "Try next:" in result.stdout
    assert str(run_dir) in result.stdout
    records = _records(run_dir)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 4]
    steps = [r for r in records if "reward/mean" in r]
    assert max(r["staleness/max"] for r in steps) == 1
    assert all(r["version"] == r["step"] for r in records)
    gaps = [r["gap/max_abs"] for r in records if "gap/max_abs" in r]
    assert len(gaps) == 4
    assert max(gaps) < 1e-5
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step_4")
    assert (run_dir / "config.yaml").exists()
    completions, trained = (
        list(json_lines(run_dir / "rollouts" / f"{name}_1-0.jsonl")) for name in ("step", "learned_step")
    )
    assert len(completions) == 16
    ids = [{(record["group_id"], record["episode_id"]) for record in group} for group in (completions, trained)]
    assert ids[0] == ids[1]
    assert f"Report: {run_dir / 'report.html'}" in result.stdout
    page = json.loads((run_dir / "report.html").read_text().partition('id="data">')[2].partition("</script")[0])
    (shown,) = page["runs"]
    assert (shown["state"], shown["step"], shown["curves"]["reward/mean"][0]) == ("finished", 4, [1, 2, 3, 4])
    assert {"advantage", "tokens"} <= {name for completion in shown["completions"] for name in completion}
    assert shown["commands"][0]["command"][1:3] == [f"run_dir={run_dir}", f"model.path={model}"]


def test_grpo_metrics_are_documented_and_sent_to_the_tracker(finished_run):
    names = {name for record in _records(finished_run[0]) for name in record}
    assert len(names) > 60
    assert [name for name in sorted(names) if meaning(name) is None] == [], (
        "document them in rl_contracts.runtime.metric_docs"
    )

    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_dir, result = finished_run
    assert "warning: tracker" not in result.stdout
    events = accumulators.EventAccumulator(str(run_dir / "trackers" / "tensorboard")).Reload()
    shown = {(event.step, name): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}
    labels = ("step", "timestamp", "evaluation")
    measured = {
        (record["step"], name): value
        for record in _records(run_dir)
        for name, value in record.items()
        if name not in labels and value is not None
    }
    assert shown == pytest.approx(measured, rel=1e-6)


def test_grpo_finished_run_leaves_no_process_or_shared_memory(finished_run):
    assert _processes_of(finished_run[0]) == []
    assert not weights_directory(finished_run[0]).exists()


@pytest.mark.nightly
def test_plan_predicts_step_times_within_25_percent(model, tmp_path, capsys):
    """The mean is over 38 steps, so that a delay by another process has little influence."""
    from rl_apps.cli.main import main

    run_dir = tmp_path / "run"
    result = _run("gsm8k-grpo", f"run_dir={run_dir}", f"model.path={model}", *SMALL, "total_steps=40")
    assert result.returncode == 0, result.stderr + result.stdout

    assert main(["plan", "gsm8k-grpo", "--run", str(run_dir), "--no-splits", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)["simulated"]
    steps = [record for record in _records(run_dir) if "sequences" in record][2:]
    for predicted, name in (("step_seconds", "time/step"), ("train_seconds", "time/train")):
        measured = sum(step[name] for step in steps) / len(steps)
        assert simulated[predicted] == pytest.approx(measured, rel=0.25), predicted


@pytest.mark.nightly
def test_sft_on_gsm8k_format_lowers_loss_and_grpo_continues(questions, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = ("data.name=gsm8k", f"data.path={questions}")
    result = _run("gsm8k-sft", *data, "total_steps=12", "data.batch_size=8", f"run_dir={tmp_path / 'sft'}")
    assert result.returncode == 0, result.stderr
    assert all(meaning(name) for record in _records(tmp_path / "sft") for name in record)
    losses = [r["loss/train"] for r in _records(tmp_path / "sft") if "loss/train" in r]
    assert losses[-1] < 0.8 * losses[0]
    checkpoint = tmp_path / "sft" / "checkpoints" / "step_12"
    result = _run(
        "gsm8k-grpo", *data, f"model.path={checkpoint}", "total_steps=1", f"run_dir={tmp_path / 'grpo'}", *SMALL
    )
    assert result.returncode == 0, result.stderr


CUSTOM_COMPONENTS = """
import time
from rl_workflows import RLVRWorkflow

def slow(prompt, completions, prompt_ids, completion_ids, **data):
    print("scored")
    time.sleep(0.05)
    return len(completion_ids) % 2

class CustomWorkflow(RLVRWorkflow):
    pass
"""


@pytest.mark.nightly
def test_grpo_loads_workflow_and_reward_from_current_directory(model, tmp_path):
    (tmp_path / "custom.py").write_text(CUSTOM_COMPONENTS)
    settings = (
        *("rollout.workflow=custom:CustomWorkflow", "rollout.reward=custom:slow"),
        *("rollout.max_staleness=0", "evaluation.examples=0"),
    )
    command = _command("gsm8k-grpo", *settings, f"model.path={model}", "total_steps=2", "run_dir=run", *SMALL[:-1])

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)

    assert result.returncode == 0, result.stderr
    log = (tmp_path / "run" / "logs" / "reward-0.log").read_text().splitlines()
    assert set(log) == {"scored"}
    assert len(log) >= 2 * 16 + 1  # the trial episode, and completions after the last step
    for record in _records(tmp_path / "run"):
        assert 16 * 0.05 <= record["time/reward"] < record["time/step"] + 1
    lines = [line for line in result.stdout.splitlines() if "step " not in line]
    assert "starting servers and trainers" in lines
    assert any(re.fullmatch(r"rollout-0 ready after \d+ s", line) for line in lines)


@pytest.fixture
def endless_run(model, tmp_path):
    """Process and directory of a run that is still in progress after two steps."""
    run_dir = tmp_path / "run"
    command = _command("gsm8k-grpo", f"run_dir={run_dir}", f"model.path={model}", *SMALL, *ENDLESS)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: _steps(run_dir) >= 2 or process.poll() is not None, 150, "two steps")
        assert process.poll() is None, process.communicate()
        yield process, run_dir
    finally:
        for running in [process, *_processes_of(run_dir)]:
            running.kill()


def _steps(run_dir):
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.nightly
def test_grpo_dead_server_without_restarts_ends_the_run(endless_run):
    process, run_dir = endless_run
    server = _server_of(run_dir)
    begin = time.monotonic()
    server.kill()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 30
    assert process.returncode == 1
    assert "rollout-0" in err
    assert "SIGKILL" in err
    assert "serving version" in err, "the error must contain the last lines of the log"
    wait_until(lambda: not _processes_of(run_dir), 10, "no process left")


def _server_counts(run_dir):
    return [r["server/servers"] for r in _records(run_dir)]


def _is_ready(address):
    try:
        with urllib.request.urlopen(address + "/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.mark.nightly
def test_grpo_killed_server_is_restarted_and_run_completes(model, tmp_path):
    run_dir = tmp_path / "run"
    command = _command(
        "gsm8k-grpo",
        f"run_dir={run_dir}",
        f"model.path={model}",
        "total_steps=100",
        "launcher.health_timeout=0",  # the test suspends the trainer for a while
        "evaluation.examples=0",
        "allocation=embedded:d2+fsdp:d1",
        *SMALL[:-1],
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: _steps(run_dir) >= 2 or process.poll() is not None, 150, "two steps")
        assert process.poll() is None, process.communicate()
        server = _server_of(run_dir)
        address = "http://{}:{}".format(
            *(server.cmdline()[server.cmdline().index(n) + 1] for n in ("--host", "--port"))
        )
        trainer = next(p for p in _processes_of(run_dir) if "rl_apps.run.worker" in " ".join(p.cmdline()))
        server.kill()
        server.wait(10)
        wait_until(lambda: 1.0 in _server_counts(run_dir), 30, "a step with one server")
        trainer.suspend()  # otherwise the run would end before the server is ready again
        wait_until(lambda: _is_ready(address), 120, "the server is ready again")
        trainer.resume()
        _, err = process.communicate(timeout=120)
    finally:
        for running in [process, *_processes_of(run_dir)]:
            running.kill()

    assert process.returncode == 0, err
    assert re.search(r"rollout-\d was killed by SIGKILL .*restart 1 of 3", err)
    logs = [path.read_text() for path in (run_dir / "logs").glob("rollout-*.log")]
    assert sum("restored version" in text and "restart 1 of 3" in text for text in logs) == 1
    records = _records(run_dir)
    assert [r["step"] for r in records] == list(range(1, 101))
    assert all(r["version"] == r["step"] for r in records)
    assert max(r["staleness/max"] for r in records) == 1
    gaps = [r["gap/max_abs"] for r in records if r["gap/max_abs"] is not None]  # None if the killed server was checked
    assert len(gaps) > 50
    assert max(gaps) < 1e-5
    servers = _server_counts(run_dir)
    assert servers[0] == servers[-1] == 2
    assert records[-1]["server/rejoins"] == 1
    assert not weights_directory(run_dir).exists()


@pytest.mark.nightly
def test_grpo_frozen_single_server_is_restarted_without_failures(model, tmp_path):
    run_dir = tmp_path / "run"
    limits = ("launcher.health_timeout=10", "rollout.client.progress_timeout=14")
    command = _command(
        "gsm8k-grpo", f"run_dir={run_dir}", f"model.path={model}", "total_steps=60", *limits, *SMALL[:-1]
    )
    process = subprocess.Popen(
        [*command, "evaluation.examples=0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: _steps(run_dir) >= 2 or process.poll() is not None, 150, "two steps")
        _server_of(run_dir).suspend()
        _, err = process.communicate(timeout=200)
    finally:
        for running in [process, *_processes_of(run_dir)]:
            running.kill()

    assert process.returncode == 0, err
    assert "rollout-0 failed its readiness checks for 10 s" in err
    assert [r["groups/failed"] for r in _records(run_dir)] == [0] * 60, err


@pytest.mark.slow
def test_grpo_ctrl_c_saves_recovery_checkpoint_and_stops_processes(endless_run):
    process, run_dir = endless_run
    server = _server_of(run_dir)
    port = int(server.cmdline()[server.cmdline().index("--port") + 1])
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    step = last_recovery_checkpoint(run_dir / "recover")
    assert f"The same command resumes after step {step}." in out
    assert _records(run_dir)[-1]["step"] == step, "a finished step is lost"
    assert not [r for r in _records(run_dir) if r["groups/failed"]], "a group failed during shutdown"
    wait_until(lambda: not _processes_of(run_dir), 10, "no process left")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
