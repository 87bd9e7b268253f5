"""Parts that let every package test alone: a simulated clock and an inference engine without a server."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_contracts.testing.clock import SimulatedClock
    from rl_contracts.testing.null_inference import Faults, NullInferenceConfig, NullInferenceEngine

_HOME = {
    "Faults": "null_inference",
    "NullInferenceConfig": "null_inference",
    "NullInferenceEngine": "null_inference",
    "SimulatedClock": "clock",
}

__all__ = [
    "Faults",
    "NullInferenceConfig",
    "NullInferenceEngine",
    "SimulatedClock",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
