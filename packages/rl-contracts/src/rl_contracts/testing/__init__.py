"""Components for tests without other packages: a simulated clock, an inference engine without a server, a reference
train engine, and tiny models that are built on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_contracts.testing.batches import make_batch
    from rl_contracts.testing.clock import SimulatedClock
    from rl_contracts.testing.models import make_tiny_model, make_tiny_tokenizer
    from rl_contracts.testing.null_inference import Faults, NullInferenceEngine, NullInferenceEngineConfig
    from rl_contracts.testing.reference_engine import ReferenceTrainEngine, ReferenceTrainEngineConfig
    from rl_contracts.testing.weights import put_weights
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "Faults": "null_inference",
            "NullInferenceEngineConfig": "null_inference",
            "NullInferenceEngine": "null_inference",
            "ReferenceTrainEngine": "reference_engine",
            "ReferenceTrainEngineConfig": "reference_engine",
            "SimulatedClock": "clock",
            "make_batch": "batches",
            "make_tiny_model": "models",
            "make_tiny_tokenizer": "models",
            "put_weights": "weights",
        },
    )


__all__ = [
    "Faults",
    "NullInferenceEngine",
    "NullInferenceEngineConfig",
    "ReferenceTrainEngine",
    "ReferenceTrainEngineConfig",
    "SimulatedClock",
    "make_batch",
    "make_tiny_model",
    "make_tiny_tokenizer",
    "put_weights",
]
