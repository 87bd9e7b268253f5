"""Trackers, some of which fail or hang, and the libraries, read back by their own readers."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_contracts.errors import ConfigError
from rl_contracts.testing.waiting import wait_until
from rl_trainers import TrackersConfig, Tracking
from rl_trainers.run_log.tracking import load_trackers

SPY = '''
import json, time
from rl_contracts.tracker import Tracker


class Spy(Tracker):
    """Writes down what it is told, and fails or hangs where it is asked to."""

    def __init__(self, *, fail="", hang=""):
        self.fail, self.hang = fail, hang

    def say(self, what, **told):
        with open("said.jsonl", "a") as file:
            file.write(json.dumps({"what": what, **told}) + "\\n")
        if self.fail == what:
            raise RuntimeError(f"no {what} today")
        if self.hang == what:
            time.sleep(1000)

    def open(self, run):
        self.say("open", id=run.id, name=run.name, project=run.project, config=run.config, step=run.step)
        assert run.directory.is_dir()
        return run.id or "the-id"

    def log(self, figures, step, time):
        self.say("log", step=step, figures=figures, time=time)

    def close(self):
        self.say("close")


class Rewinding(Spy):
    can_rewind = True


class Lacking(Spy):
    library, install = "no_such_library", "the-package"
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current directory with `spy.py` and the directory `run`."""
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("spy", None)


def record(step, **figures):
    return {"step": step, "version": step, "timestamp": 1.7e9 + step, **figures}


STEPS = [record(0, evaluation=True, **{"eval/reward": 0.5}), record(1, lr=0.1, gap=None), record(2, lr=0.2)]
LATER = [record(2, lr=0.25), record(3, lr=0.3), record(3, evaluation=True, **{"eval/reward": 0.75})]


def write(place, records, how="a"):
    with (place / "run" / "metrics.jsonl").open(how) as file:
        file.write("".join(json.dumps(each) + "\n" for each in records))


def go_on(place, records):
    """Cut off what was lost, as a run does that goes on."""
    scratch = place / "run" / "metrics.partial"
    scratch.write_text("".join(json.dumps(each) + "\n" for each in records))
    os.replace(scratch, place / "run" / "metrics.jsonl")


def said(place, *what):
    file = place / "said.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [line for line in lines if line["what"] in what or not what]


def tracking(place, kind="spy:Spy", warnings=None, close_seconds=60.0, **options):
    config = TrackersConfig(kind=kind, options=options, close_seconds=close_seconds)
    load_trackers(config)
    return Tracking(config, place / "run", "sums", {"a": {"b": 1}}, ([] if warnings is None else warnings).append)


def test_tracker_is_given_every_figure_that_was_measured_with_its_step_and_time(place):
    warnings = []
    with tracking(place, warnings=warnings):
        write(place, STEPS)
        wait_until(lambda: len(said(place, "log")) == 3)  # during the run
        write(place, LATER[1:])
    opened = {"id": "", "name": "run", "project": "sums", "config": {"a": {"b": 1}}, "step": -1}
    assert said(place, "open") == [{"what": "open", **opened}]
    logged = [(line["step"], line["figures"], line["time"]) for line in said(place, "log")]
    assert logged == [
        (0, {"version": 0, "eval/reward": 0.5}, 1.7e9),
        (1, {"version": 1, "lr": 0.1}, 1.7e9 + 1),
        (2, {"version": 2, "lr": 0.2}, 1.7e9 + 2),
        (3, {"version": 3, "lr": 0.3}, 1.7e9 + 3),
        (3, {"version": 3, "eval/reward": 0.75}, 1.7e9 + 3),
    ]
    assert said(place)[-1]["what"] == "close"
    assert warnings == []


def test_tracker_is_given_the_project_and_name_of_the_settings(place):
    config = TrackersConfig(kind="spy:Spy", project="mine", name="best")
    with Tracking(config, place / "run", "sums", {}, print):
        write(place, STEPS)
    assert [(line["project"], line["name"]) for line in said(place, "open")] == [("mine", "best")]


@pytest.mark.parametrize(("kind", "steps"), [("spy:Spy", [0, 1, 2, 3, 3]), ("spy:Rewinding", [0, 1, 2, 2, 3, 3])])
def test_tracker_after_a_resume_keeps_its_id_and_does_not_go_back(place, kind, steps):
    with tracking(place, kind):
        write(place, STEPS)
    go_on(place, STEPS[:2])  # step 2 was lost, and is taken again
    with tracking(place, kind):
        write(place, LATER)
    assert [(line["id"], line["step"]) for line in said(place, "open")] == [("", -1), ("the-id", 1)]
    assert [line["step"] for line in said(place, "log")] == steps


def test_tracker_of_a_command_whose_trainers_are_started_anew_goes_on(place):
    with tracking(place):
        write(place, STEPS)
        wait_until(lambda: len(said(place, "log")) == 3)
        go_on(place, STEPS[:2])
        wait_until(lambda: len(said(place, "open")) == 2)
        write(place, LATER)
    assert [line["step"] for line in said(place, "log")] == [0, 1, 2, 3, 3]
    assert [line["what"] for line in said(place)].count("close") == 2


@pytest.mark.parametrize("what", ["open", "log", "close"])
def test_tracker_that_raises_warns_once_and_the_next_command_sends_the_rest(place, what):
    warnings = []
    write(place, STEPS)
    with tracking(place, "spy:Spy", warnings, fail=what):
        if what != "close":
            wait_until(lambda: warnings)
    (warning,) = warnings
    assert f"RuntimeError: no {what} today" in warning
    assert "tracker spy-Spy failed" in warning
    with tracking(place, "spy:Spy", warnings):
        pass
    assert sorted({line["step"] for line in said(place, "log")}) == [0, 1, 2]
    assert len(warnings) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["open", "log", "close"])
def test_tracker_that_hangs_is_left_after_close_seconds_with_a_warning(place, what):
    warnings = []
    with tracking(place, "spy:Spy", warnings, close_seconds=1.0, hang=what):
        write(place, STEPS)
        wait_until(lambda: said(place, what if what != "close" else "log"))
        begin = time.monotonic()
    assert time.monotonic() - begin < 30
    (warning,) = warnings
    assert "trackers.close_seconds=1 s" in warning


def test_tracker_that_fails_leaves_the_others_alone(place):
    (place / "other.py").write_text(SPY.replace("said.jsonl", "other.jsonl").replace("self.fail == what", "False"))
    warnings = []
    with tracking(place, "spy:Spy+other:Spy", warnings, fail="log"):
        write(place, STEPS)
    sys.modules.pop("other", None)
    assert len(warnings) == 1
    assert (place / "other.jsonl").read_text().count('"log"') == 3


def test_tracker_whose_library_is_missing_is_refused_with_what_to_install(place):
    with pytest.raises(ConfigError, match=r"requires the library no_such_library, .*; install the-package"):
        load_trackers(TrackersConfig(kind="spy:Lacking"))
    (place / "no_such_library").mkdir()  # a folder of its output is no library
    with pytest.raises(ConfigError, match="requires the library"):
        load_trackers(TrackersConfig(kind="spy:Lacking"))
    with pytest.raises(ConfigError, match=r"trackers.options: expected options of .*, found mood\."):
        load_trackers(TrackersConfig(kind="spy:Spy", options={"mood": 1}))


# ---- the libraries


EXPECTED = [(0, "eval/reward", 0.5), (1, "lr", 0.1), (2, "lr", 0.25), (3, "eval/reward", 0.75), (3, "lr", 0.3)]
"""Of a run that lost step 2 and took it again, as a tracker that rewinds shows it."""
FIRST = [(2, "lr", 0.2) if point == (2, "lr", 0.25) else point for point in EXPECTED]
"""As one shows it that cannot."""


def tracked(place, kind, **options):
    """Two commands, the second of which goes on after step 1. Skips where the library is missing."""
    library = load_library(kind)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    warnings = []
    with tracking(place, kind, warnings, **options):
        write(place, STEPS)
    go_on(place, STEPS[:2])
    with tracking(place, kind, warnings, **options):
        write(place, LATER)
    assert warnings == []
    return place / "run" / "trackers" / kind


def load_library(kind):
    from rl_contracts import registry

    return registry.load("rl.trackers", kind).library


@pytest.mark.slow
def test_tensorboard_reads_what_the_run_wrote(place):
    directory = tracked(place, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory)).Reload()
    points = [(e.step, name, e.value, e.wall_time) for name in ("lr", "eval/reward") for e in found.Scalars(name)]
    assert [(s, n, pytest.approx(v)) for s, n, v, _ in sorted(points)] == EXPECTED
    assert all(when == 1.7e9 + step for step, _, _, when in points)


def log_records(data, block=32768):
    """The records of a file in LevelDB's log format, behind a header of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for a header
            place += block - place % block
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_offline_reads_what_the_run_wrote(place, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")  # the option wins
    directory = tracked(place, "wandb", mode="offline")
    from wandb.proto.wandb_internal_pb2 import Record

    def records():
        files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
        return [Record.FromString(data) for file in files for data in log_records(file.read_bytes())]

    wait_until(lambda: sum(record.HasField("exit") for record in records()) == 2)  # written after `finish` returns
    points, ids, times = [], set(), {}
    for found in records():
        if found.HasField("run"):
            ids.add(found.run.run_id)
        row = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in found.history.item}
        if row:
            times[row["_step"]] = row["_timestamp"]
            points += [(row["_step"], name, row[name]) for name in ("lr", "eval/reward") if name in row]
    assert sorted(points) == FIRST
    assert len(ids) == 1
    assert times == {step: 1.7e9 + step for step in range(4)}


@pytest.mark.slow
def test_mlflow_reads_what_the_run_wrote(place, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = tracked(place, "mlflow")
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
    assert [(s, n, v) for s, n, v, _ in sorted(history)] == FIRST
    assert all(when == 1000 * (1.7e9 + step) for step, _, _, when in history)
    assert run.data.params == {"a.b": "1"}
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_trackio_reads_what_the_run_wrote(place, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(place / "trackio"))
    tracked(place, "trackio")
    storage = "from trackio.sqlite_storage import SQLiteStorage"
    read = f"import json; {storage}; print(json.dumps(SQLiteStorage.get_logs('sums', 'run')))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    points = [(row["step"], name, row[name]) for row in rows for name in ("lr", "eval/reward") if name in row]
    assert sorted(points) == FIRST


@pytest.mark.slow
def test_swanlab_offline_keeps_what_the_run_wrote(place):
    directory = tracked(place, "swanlab", mode="offline")
    kept = b"".join(file.read_bytes() for file in Path(directory).rglob("*") if file.is_file())
    assert b"eval/reward" in kept
    assert len({run.name.rpartition("-")[2] for run in Path(directory).glob("run-*")}) == 1
