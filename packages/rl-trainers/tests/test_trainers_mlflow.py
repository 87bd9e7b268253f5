"""The MLflow tracker with a fake client that has MLflow's name rules and file store."""

from __future__ import annotations

import posixpath
import re
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_contracts.runtime.metric_docs import MEANINGS
from rl_contracts.tracker import TrackedRun
from rl_trainers.run_log.trackers import MlflowTracker

Metric = namedtuple("Metric", ["key", "value", "timestamp", "step"])


class FakeClient:
    """Stores each metric in a file, as `mlflow.MlflowClient` does by default."""

    root = Path()

    def __init__(self, tracking_uri: str) -> None:
        pass

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="the-run"))

    def update_run(self, run_id: str, status: str) -> None:
        pass

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics=self.stored_values()))

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Any] = ()) -> None:
        for metric in metrics:
            name = metric.key
            assert re.fullmatch(r"[/\w.\- :]+", name), name
            assert posixpath.normpath(name) == name, name
            assert not name.startswith((".", "/")), name
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            with (self.root / name).open("a") as file:
                file.write(f"{metric.value}\n")

    @classmethod
    def stored_values(cls) -> dict[str, list[float]]:
        """Return the values of each metric."""
        files = (path for path in cls.root.rglob("*") if path.is_file())
        return {str(path.relative_to(cls.root)): [*map(float, path.read_text().split())] for path in files}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    for name, module in (("mlflow", ModuleType("mlflow")), ("mlflow.entities", ModuleType("mlflow.entities"))):
        vars(module).update(MlflowClient=FakeClient, Metric=Metric, Param=tuple)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeClient, "root", tmp_path)
    return FakeClient


def open_tracker(directory: Path, run_id: str = "") -> MlflowTracker:
    tracker = MlflowTracker(uri="file:there")
    tracker.open(TrackedRun("run", "project", directory, id=run_id))
    return tracker


def test_mlflow_metric_that_becomes_prefix_of_another_keeps_name(store: type[FakeClient], tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log({"tokens": 1, "groups/rejected": 1, "a": 1, "b/x": 1}, 0, 0.0)
    later = {"tokens": 2, "tokens/trained": 2, "groups/rejected": 2, "groups/rejected/stale": 2, "a": 2}
    tracker.log({**later, "a/x": 2, "b": 2, "b/x": 2}, 1, 0.0)
    open_tracker(tmp_path, "the-run").log({"tokens": 3, "a": 3, "a/x": 3, "b": 3, "groups/rejected": 3}, 2, 0.0)
    assert store.stored_values() == {
        "tokens/all": [1, 2, 3],
        "tokens/trained": [2],
        "groups/rejected/all": [1, 2, 3],
        "groups/rejected/stale": [2],
        "a": [1, 2, 3],
        "a.x": [2, 3],
        "b/x": [1, 2],
        "b/all": [2, 3],
    }


def test_mlflow_accepts_all_project_metrics_in_any_order(store: type[FakeClient], tmp_path: Path) -> None:
    names = [re.sub(r"<(\w+)>", r"a \1", name) for name in MEANINGS]
    tracker = open_tracker(tmp_path)
    for name in names:
        tracker.log({name: 1.0}, 0, 0.0)
    tracker.log(dict.fromkeys(reversed(names), 2.0), 1, 0.0)
    assert list(store.stored_values().values()) == [[1.0, 2.0]] * len(names)


def test_mlflow_metrics_with_invalid_names_are_stored(store: type[FakeClient], tmp_path: Path) -> None:
    names, tracker = ["reward/my (fn)", "agent/../x", "/a//b", "c/.", "..", "a=b;c"], open_tracker(tmp_path)
    for value, name in enumerate(names):
        tracker.log({name: value}, 0, 0.0)
    assert sorted(store.stored_values().values()) == [[value] for value in range(len(names))]
