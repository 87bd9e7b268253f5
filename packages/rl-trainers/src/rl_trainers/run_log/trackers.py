"""Trackers included in the project; each imports its library when it is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_contracts.runtime.metric_docs import MEANINGS
from rl_contracts.tracker import TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Event files in `trackers/tensorboard` of the run directory; `tensorboard --logdir runs` shows them."""

    library, install, can_rewind = "tensorboard", "rl-apps[tensorboard]", True

    def open(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.directory))
        # readers drop the values of this and later steps in earlier files
        self._writer.add_event(Event(step=run.step + 1, session_log=SessionLog(status=SessionLog.START)))
        return run.id or run.name

    def log(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Weights & Biases. Its files are in `trackers/wandb` of the run directory.

    Args:
        mode: `online`, `offline` (`wandb sync` uploads the run later) or `disabled`; None: WANDB_MODE, or `online`.
        entity: user or team; None: the logged-in user.
        group, tags: group and tags of the run.
    """

    library, install = "wandb", "rl-apps[wandb]"

    def __init__(
        self, *, mode: str | None = None, entity: str | None = None, group: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        self._options: dict[str, Any] = {"mode": mode, "entity": entity, "group": group, "tags": list(tags) or None}

    def open(self, run: TrackedRun) -> str:
        import wandb

        # silent: otherwise wandb prompts for a missing API key in the terminal of the run
        wandb.setup(wandb.Settings(console="off", silent=True))
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id or None,
            resume="allow",
            dir=run.directory,
            config=run.config,
            **self._options,
        )
        return self._run.id

    def log(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        self._run.log({**metrics, "_timestamp": time}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """MLflow run in a tracking server or a directory.

    Args:
        uri: URI of the tracking server or store; None: MLFLOW_TRACKING_URI, or files in `trackers/mlflow` of the run
            directory, which `mlflow ui --backend-store-uri` shows.
    """

    library, install = "mlflow", "mlflow-skinny"

    def __init__(self, *, uri: str | None = None) -> None:
        self._uri = uri

    def open(self, run: TrackedRun) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = run.directory.resolve().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self._id, self._names = run.id, MetricNames(self._client.get_run(run.id).data.metrics)
            return run.id
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        self._id, self._names = self._client.create_run(experiment, run_name=run.name).info.run_id, MetricNames()
        params = [Param(name, str(value)[:MLFLOW_CHARACTERS]) for name, value in _leaves(run.config)]
        for first in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS])
        return self._id

    def log(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        from mlflow.entities import Metric

        names = self._names.of(metrics)
        entries = [Metric(names[name], value, round(1000 * time), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entries)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class MetricNames:
    """Names of metrics in MLflow's store.

    MLflow accepts letters, digits and `_-. :/` in a normalized path. Its file store has one file per metric, so no name
    may be a folder of another one. `tokens` becomes `tokens/all`, because `tokens/trained` exists; `a/b` becomes `a.b`
    if the store already has `a`.

    Args:
        stored: names that are in the store.
    """

    def __init__(self, stored: Iterable[str] = ()) -> None:
        self._stored = set(stored)
        self._names: dict[str, str] = {}

    def of(self, metrics: Iterable[str]) -> dict[str, str]:
        """Return the stored name of each metric; it never changes."""
        new = {metric: _normalized(metric) for metric in metrics if metric not in self._names}
        folders = (
            {folder for name in (*MEANINGS, *self._stored, *new.values()) for folder in _folders(name)} if new else ()
        )
        for metric, name in new.items():
            if name not in self._stored and name in folders:
                name = f"{name}/all"
            elif not self._stored.isdisjoint(_folders(name)):
                name = name.replace("/", ".")
            self._names[metric] = name
            self._stored.add(name)
        return self._names


def _normalized(metric: str) -> str:
    segments = [segment for segment in re.sub(r"[^\w.\- :/]", "_", metric).split("/") if segment not in ("", ".", "..")]
    return "/".join(segments) or "_"


def _folders(name: str) -> list[str]:
    return [name[:index] for index, letter in enumerate(name) if letter == "/"]


MLFLOW_PARAMS, MLFLOW_CHARACTERS = 100, 500
"""Parameters that MLflow accepts per call, and characters per value that all its versions and stores accept."""


class TrackioTracker(Tracker):
    """trackio, which stores all runs in one directory (TRACKIO_DIR); `trackio show` shows them.

    Args:
        space_id: Hugging Face Space that shows the run; None: this machine.
        group: group of the run.
    """

    library, install = "trackio", "trackio"

    def __init__(self, *, space_id: str | None = None, group: str | None = None) -> None:
        self._options = {"space_id": space_id, "group": group}

    def open(self, run: TrackedRun) -> str:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.id or run.name,
            resume="allow" if run.id else "never",
            config=run.config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **self._options,
        )
        return str(self._run.name)

    def log(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker(Tracker):
    """SwanLab. Its files are in `trackers/swanlab` of the run directory.

    Args:
        mode: `online`, `offline` (`swanlab sync` uploads the run later), `local` or `disabled`; None: the default of
            SwanLab.
        workspace: user or team; None: the logged-in user.
        group, tags: group and tags of the run.
    """

    library, install = "swanlab", "swanlab"

    def __init__(
        self,
        *,
        mode: str | None = None,
        workspace: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._options: dict[str, Any] = {
            "mode": mode,
            "workspace": workspace,
            "group": group,
            "tags": list(tags) or None,
        }

    def open(self, run: TrackedRun) -> str:
        import swanlab

        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id or None,
            resume="allow",
            log_dir=str(run.directory),
            config=run.config,
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
            **self._options,
        )
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the dotted names and values of nested settings."""
    leaves: list[tuple[str, Any]] = []
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping) and value
        leaves += _leaves(value, f"{prefix}{name}.") if is_nested else [(prefix + name, value)]
    return leaves
