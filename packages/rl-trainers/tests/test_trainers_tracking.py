"""Trackers that work, fail or hang; and the tracker libraries, whose own readers read the metrics back."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rl_trainers.run_log.tracking
from rl_contracts.errors import ConfigError
from rl_contracts.testing.waiting import wait_until
from rl_trainers import TrackersConfig, Tracking
from rl_trainers.run_log.tracking import load_trackers

SPY = '''
import json, time
from rl_contracts.tracker import Tracker


class Spy(Tracker):
    """Records its calls, and fails or hangs in one of them."""

    def __init__(self, *, fail="", hang=""):
        self.fail, self.hang = fail, hang

    def record(self, method, **arguments):
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps({"method": method, **arguments}) + "\\n")
        if self.fail == method:
            raise RuntimeError(f"{method} failed")
        if self.hang == method:
            time.sleep(1000)

    def open(self, run):
        self.record("open", id=run.id, name=run.name, project=run.project, config=run.config, step=run.step)
        assert run.directory.is_dir()
        return run.id or "the-id"

    def log(self, metrics, step, time):
        self.record("log", step=step, metrics=metrics, time=time)

    def close(self):
        self.record("close")


class RewindingSpy(Spy):
    can_rewind = True


class NoLibrary(Spy):
    library, install = "no_such_library", "the-package"
'''


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """Return a current directory with `spy.py` and the directory `run`."""
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("spy", None)


def record(step, **metrics):
    return {"step": step, "version": step, "timestamp": 1.7e9 + step, **metrics}


STEPS = [record(0, evaluation=True, **{"eval/reward": 0.5}), record(1, lr=0.1, gap=None), record(2, lr=0.2)]
LATER = [record(2, lr=0.25), record(3, lr=0.3), record(3, evaluation=True, **{"eval/reward": 0.75})]


def write(workdir, records, mode="a"):
    with (workdir / "run" / "metrics.jsonl").open(mode) as file:
        file.write("".join(json.dumps(entry) + "\n" for entry in records))


def truncate(workdir, records):
    """Remove lost records, as a resumed run does."""
    scratch = workdir / "run" / "metrics.partial"
    scratch.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    os.replace(scratch, workdir / "run" / "metrics.jsonl")


def calls(workdir, *methods):
    """Return the recorded calls of some methods, or of all."""
    file = workdir / "calls.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [line for line in lines if line["method"] in methods or not methods]


def tracking(workdir, kind="spy:Spy", warnings=None, **options):
    config = TrackersConfig(kind=kind, options=options)
    load_trackers(config)
    return Tracking(config, workdir / "run", "sums", {"a": {"b": 1}}, ([] if warnings is None else warnings).append)


def test_tracker_receives_every_metric_with_step_and_time(workdir):
    warnings = []
    with tracking(workdir, warnings=warnings):
        write(workdir, STEPS)
        wait_until(lambda: len(calls(workdir, "log")) == 3)  # during the run
        write(workdir, LATER[1:])
    opened = {"id": "", "name": "run", "project": "sums", "config": {"a": {"b": 1}}, "step": -1}
    assert calls(workdir, "open") == [{"method": "open", **opened}]
    logged = [(line["step"], line["metrics"], line["time"]) for line in calls(workdir, "log")]
    assert logged == [
        (0, {"version": 0, "eval/reward": 0.5}, 1.7e9),
        (1, {"version": 1, "lr": 0.1}, 1.7e9 + 1),
        (2, {"version": 2, "lr": 0.2}, 1.7e9 + 2),
        (3, {"version": 3, "lr": 0.3}, 1.7e9 + 3),
        (3, {"version": 3, "eval/reward": 0.75}, 1.7e9 + 3),
    ]
    assert calls(workdir)[-1]["method"] == "close"
    assert warnings == []


@pytest.mark.parametrize(("kind", "steps"), [("spy:Spy", [0, 1, 2, 3, 3]), ("spy:RewindingSpy", [0, 1, 2, 2, 3, 3])])
def test_tracker_after_resume_keeps_id_and_rewinds_if_it_can(workdir, kind, steps):
    with tracking(workdir, kind):
        write(workdir, STEPS)
    truncate(workdir, STEPS[:2])  # step 2 is lost and will be taken again
    with tracking(workdir, kind):
        write(workdir, LATER)
    assert [(line["id"], line["step"]) for line in calls(workdir, "open")] == [("", -1), ("the-id", 1)]
    assert [line["step"] for line in calls(workdir, "log")] == steps


def test_tracker_continues_after_trainers_restart(workdir):
    with tracking(workdir):
        write(workdir, STEPS)
        wait_until(lambda: len(calls(workdir, "log")) == 3)
        truncate(workdir, STEPS[:2])
        wait_until(lambda: len(calls(workdir, "open")) == 2)
        write(workdir, LATER)
    assert [line["step"] for line in calls(workdir, "log")] == [0, 1, 2, 3, 3]
    assert [line["method"] for line in calls(workdir)].count("close") == 2


@pytest.mark.parametrize("method", ["open", "log", "close"])
def test_tracker_error_warns_once_and_next_command_sends_the_rest(workdir, method):
    warnings = []
    write(workdir, STEPS)
    with tracking(workdir, "spy:Spy", warnings, fail=method):
        if method != "close":
            wait_until(lambda: warnings)
    (warning,) = warnings
    assert f"RuntimeError: {method} failed" in warning
    assert "tracker spy-Spy failed" in warning
    with tracking(workdir, "spy:Spy", warnings):
        pass
    assert sorted({line["step"] for line in calls(workdir, "log")}) == [0, 1, 2]
    assert len(warnings) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["log", "close"])
def test_tracker_hang_is_abandoned_after_close_seconds_with_warning(workdir, method, monkeypatch):
    monkeypatch.setattr(rl_trainers.run_log.tracking, "CLOSE_SECONDS", 1.0)
    warnings = []
    with tracking(workdir, "spy:Spy", warnings, hang=method):
        write(workdir, STEPS)
        wait_until(lambda: calls(workdir, method if method != "close" else "log"))
        begin = time.monotonic()
    assert time.monotonic() - begin < 30
    (warning,) = warnings
    assert "within 1 s" in warning


def test_tracker_error_does_not_affect_other_trackers(workdir):
    (workdir / "other.py").write_text(SPY.replace("calls.jsonl", "other.jsonl").replace("self.fail == method", "False"))
    warnings = []
    with tracking(workdir, "spy:Spy+other:Spy", warnings, fail="log"):
        write(workdir, STEPS)
    sys.modules.pop("other", None)
    assert len(warnings) == 1
    assert (workdir / "other.jsonl").read_text().count('"log"') == 3


def test_load_trackers_without_library_names_package_to_install(workdir):
    with pytest.raises(ConfigError, match=r"no_such_library.*the-package"):
        load_trackers(TrackersConfig(kind="spy:NoLibrary"))
    (workdir / "no_such_library").mkdir()  # a directory of the user is not the library
    with pytest.raises(ConfigError, match="no_such_library"):
        load_trackers(TrackersConfig(kind="spy:NoLibrary"))
    with pytest.raises(ConfigError, match=r"trackers\.options: .*mood"):
        load_trackers(TrackersConfig(kind="spy:Spy", options={"mood": 1}))


# ---- the libraries


REWOUND = [(0, "eval/reward", 0.5), (1, "lr", 0.1), (2, "lr", 0.25), (3, "eval/reward", 0.75), (3, "lr", 0.3)]
"""Metrics of a run that lost step 2 and took it again, as a tracker that rewinds shows them."""
NOT_REWOUND = [(2, "lr", 0.2) if value == (2, "lr", 0.25) else value for value in REWOUND]
"""Metrics of the same run, as a tracker that cannot rewind shows them."""


def tracked(workdir, kind, **options):
    """Run two commands, of which the second resumes after step 1. Skip the test if the library is missing."""
    library = load_library(kind)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    warnings = []
    with tracking(workdir, kind, warnings, **options):
        write(workdir, STEPS)
    truncate(workdir, STEPS[:2])
    with tracking(workdir, kind, warnings, **options):
        write(workdir, LATER)
    assert warnings == []
    return workdir / "run" / "trackers" / kind


def load_library(kind):
    from rl_contracts import registry

    return registry.load("rl.trackers", kind).library


@pytest.mark.slow
def test_tensorboard_reader_returns_logged_metrics(workdir):
    directory = tracked(workdir, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    values = [(e.step, name, e.value, e.wall_time) for name in ("lr", "eval/reward") for e in events.Scalars(name)]
    assert [(s, n, pytest.approx(v)) for s, n, v, _ in sorted(values)] == REWOUND
    assert all(timestamp == 1.7e9 + step for step, _, _, timestamp in values)


def log_records(data, block=32768):
    """Yield the records of a file in LevelDB's log format, after a header of 7 bytes."""
    offset, buffer = 7, b""
    while offset + 7 <= len(data):
        if block - offset % block < 7:  # padding: too short for a header
            offset += block - offset % block
            continue
        size, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        buffer += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a full record, or the last fragment of one
            yield buffer
            buffer = b""


@pytest.mark.slow
def test_wandb_offline_file_has_logged_metrics(workdir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")  # the option wins
    directory = tracked(workdir, "wandb", mode="offline")
    from wandb.proto.wandb_internal_pb2 import Record

    def records():
        files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
        return [Record.FromString(data) for file in files for data in log_records(file.read_bytes())]

    wait_until(lambda: sum(record.HasField("exit") for record in records()) == 2)  # written after `finish` returns
    values, ids, times = [], set(), {}
    for record in records():
        if record.HasField("run"):
            ids.add(record.run.run_id)
        metrics = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        if metrics:
            times[metrics["_step"]] = metrics["_timestamp"]
            values += [(metrics["_step"], name, metrics[name]) for name in ("lr", "eval/reward") if name in metrics]
    assert sorted(values) == NOT_REWOUND
    assert len(ids) == 1
    assert times == {step: 1.7e9 + step for step in range(4)}


@pytest.mark.slow
def test_mlflow_client_returns_logged_metrics(workdir, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = tracked(workdir, "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=directory.as_uri())
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    history = [
        (m.step, name, m.value, m.timestamp)
        for name in ("lr", "eval/reward")
        for m in client.get_metric_history(run.info.run_id, name)
    ]
    assert [(s, n, v) for s, n, v, _ in sorted(history)] == NOT_REWOUND
    assert all(timestamp == 1000 * (1.7e9 + step) for step, _, _, timestamp in history)
    assert run.data.params == {"a.b": "1"}
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_trackio_storage_has_logged_metrics(workdir, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(workdir / "trackio"))
    tracked(workdir, "trackio")
    storage = "from trackio.sqlite_storage import SQLiteStorage"
    read = f"import json; {storage}; print(json.dumps(SQLiteStorage.get_logs('sums', 'run')))"
    process = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    logs = json.loads(process.stdout.splitlines()[-1])
    values = [(log["step"], name, log[name]) for log in logs for name in ("lr", "eval/reward") if name in log]
    assert sorted(values) == NOT_REWOUND


@pytest.mark.slow
def test_swanlab_offline_files_have_logged_metrics(workdir):
    directory = tracked(workdir, "swanlab", mode="offline")
    content = b"".join(file.read_bytes() for file in Path(directory).rglob("*") if file.is_file())
    assert b"eval/reward" in content
    assert len({run.name.rpartition("-")[2] for run in Path(directory).glob("run-*")}) == 1
