"""The trackers that come with the project; each imports its library when it is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_contracts.runtime.metric_docs import MEANINGS
from rl_contracts.tracker import TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Event files in `trackers/tensorboard` of the run directory: `tensorboard --logdir runs` shows them."""

    library, install, can_rewind = "tensorboard", "rl-apps[tensorboard]", True

    def open(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.directory))
        # whoever reads the files drops what earlier ones say of this step and later ones
        self._writer.add_event(Event(step=run.step + 1, session_log=SessionLog(status=SessionLog.START)))
        return run.id or run.name

    def log(self, figures: Mapping[str, float], step: int, time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Weights & Biases. Files of the run are in its `trackers/wandb`.

    Args:
        mode: `online`, `offline` (`wandb sync` sends it later) or `disabled`; None: as WANDB_MODE says, or online.
        entity: user or team; None: the one who is logged in.
        group, tags: of the run.
    """

    library, install = "wandb", "rl-apps[wandb]"

    def __init__(
        self, *, mode: str | None = None, entity: str | None = None, group: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        self._options: dict[str, Any] = {"mode": mode, "entity": entity, "group": group, "tags": list(tags) or None}

    def open(self, run: TrackedRun) -> str:
        import wandb

        # silent: wandb would ask for a missing API key in the terminal of the run
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

    def log(self, figures: Mapping[str, float], step: int, time: float) -> None:
        self._run.log({**figures, "_timestamp": time}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """MLflow.

    Args:
        uri: of the tracking server or store; None: as MLFLOW_TRACKING_URI says, or files in `trackers/mlflow` of the
            run directory, which `mlflow ui --backend-store-uri` shows.
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
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        self._id, self._names = self._client.create_run(experiment, run_name=run.name).info.run_id, MetricNames()
        params = [Param(name, str(value)[:MLFLOW_CHARACTERS]) for name, value in _leaves(run.config)]
        for first in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS])
        return self._id

    def log(self, figures: Mapping[str, float], step: int, time: float) -> None:
        from mlflow.entities import Metric

        names = self._names.of(figures)
        found = [Metric(names[name], value, round(1000 * time), step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class MetricNames:
    """The names under which MLflow keeps metrics.

    MLflow takes letters, digits and `_-. :/` in a normalized path. Its file store keeps each metric in a file, so that
    no name may be a folder of another one: `tokens` is `tokens/all`, because there is `tokens/trained`, and `mine/part`
    is `mine.part` where `mine` is kept already.

    Args:
        kept: names that are in the store.
    """

    def __init__(self, kept: Iterable[str] = ()) -> None:
        self._kept = set(kept)
        self._names: dict[str, str] = {}

    def of(self, metrics: Iterable[str]) -> dict[str, str]:
        """Return the name of each metric, the same whenever it is asked for."""
        new = {metric: _normalized(metric) for metric in metrics if metric not in self._names}
        folders = (
            {folder for name in (*MEANINGS, *self._kept, *new.values()) for folder in _folders(name)} if new else ()
        )
        for metric, name in new.items():
            if name not in self._kept and name in folders:
                name = f"{name}/all"
            elif not self._kept.isdisjoint(_folders(name)):
                name = name.replace("/", ".")
            self._names[metric] = name
            self._kept.add(name)
        return self._names


def _normalized(metric: str) -> str:
    parts = [part for part in re.sub(r"[^\w.\- :/]", "_", metric).split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "_"


def _folders(name: str) -> list[str]:
    return [name[:at] for at, letter in enumerate(name) if letter == "/"]


MLFLOW_PARAMS, MLFLOW_CHARACTERS = 100, 500
"""Parameters that MLflow takes at once, and characters of each that every version and store of it takes."""


class TrackioTracker(Tracker):
    """trackio, in the place that it keeps all runs in (TRACKIO_DIR): `trackio show` shows them.

    Args:
        space_id: the Hugging Face Space to show the run in; None: this machine.
        group: of the run.
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

    def log(self, figures: Mapping[str, float], step: int, time: float) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker(Tracker):
    """SwanLab. Files of the run are in its `trackers/swanlab`.

    Args:
        mode: `online`, `offline` (`swanlab sync` sends it later), `local` or `disabled`; None: as its own settings say.
        workspace: user or team; None: the one who is logged in.
        group, tags: of the run.
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

    def log(self, figures: Mapping[str, float], step: int, time: float) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values of nested settings."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        inner = isinstance(value, Mapping) and value
        found += _leaves(value, f"{prefix}{name}.") if inner else [(prefix + name, value)]
    return found
