"""Rollout workflows and the asynchronous runtime that executes them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_workflows.config import RolloutConfig
    from rl_workflows.groups import dynamic_sampling
    from rl_workflows.head import RolloutHead
    from rl_workflows.rlvr import RLVRWorkflow
    from rl_workflows.runtime import DistRollout, tune_garbage_collection
    from rl_workflows.staleness import StalenessManager, Ticket

_HOME = {
    "DistRollout": "runtime",
    "RLVRWorkflow": "rlvr",
    "RolloutConfig": "config",
    "RolloutHead": "head",
    "StalenessManager": "staleness",
    "Ticket": "staleness",
    "dynamic_sampling": "groups",
    "tune_garbage_collection": "runtime",
}

__all__ = [
    "DistRollout",
    "RLVRWorkflow",
    "RolloutConfig",
    "RolloutHead",
    "StalenessManager",
    "Ticket",
    "dynamic_sampling",
    "tune_garbage_collection",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
