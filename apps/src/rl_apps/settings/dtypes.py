"""Dtypes of a run: `model.dtype`, and the dtypes of trainer and servers, which follow it unless they are set."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from rl_apps.settings.config import RunConfig
from rl_contracts.data import DTYPES

BFLOAT16_CAPABILITY = 8.0
"""Lowest compute capability of an NVIDIA GPU that computes in bfloat16."""


def resolve_dtypes(config: RunConfig, has_bfloat16: bool, stored: Mapping[str, Any] | None = None) -> None:
    """Replace `model.dtype=auto` and empty dtypes of trainer and servers by the dtypes that the run uses.

    If the servers have another dtype than the trainer, the trainer publishes weights in theirs.

    Args:
        config: settings of the run, changed in place.
        has_bfloat16: whether the devices of the run compute in bfloat16, see `gpus_have_bfloat16`.
        stored: settings of the run to resume, by dotted name. With `model.dtype=auto`, the run keeps their dtypes.
    """
    model, kept = config.model, {name: value for name, value in (stored or {}).items() if value != "auto"}
    if model.dtype == "auto":
        chosen = "bfloat16" if has_bfloat16 and not config.deterministic else "float32"
        model.dtype = kept.get("model.dtype") or kept.get("actor.dtype") or chosen
    else:
        kept = {}
    config.actor.dtype = config.actor.dtype or kept.get("actor.dtype") or model.dtype
    if _served(config) == "":
        config.rollout.server.dtype = kept.get("rollout.server.dtype") or model.dtype  # type: ignore[attr-defined]
    engine, served = config.actor.engine, _served(config)
    if served in DTYPES and served != config.actor.dtype and getattr(engine, "serve_dtype", None) == "":
        engine.serve_dtype = served  # type: ignore[attr-defined]


def describe_dtypes(config: RunConfig) -> str:
    """Return the resolved dtypes as text, for example `trainer bfloat16, servers bfloat16`."""
    servers = f", servers {served}" if (served := _served(config)) else ""
    return f"trainer {config.actor.dtype}{servers}"


def warn_float32(config: RunConfig, has_bfloat16: bool) -> list[str]:
    """Return a warning if a run on devices with bfloat16 computes in float32 and is not deterministic."""
    dtypes = {"actor.dtype": config.actor.dtype, "rollout.server.dtype": _served(config)}
    slow = [f"{name}={dtype}" for name, dtype in dtypes.items() if dtype == "float32"]
    if not slow or not has_bfloat16 or config.deterministic:
        return []
    return [
        f"{' and '.join(slow)} on GPUs with bfloat16, which is several times faster and halves the memory of "
        "weights and activations; set model.dtype=bfloat16"
    ]


@cache
def gpus_have_bfloat16() -> bool:
    """Return whether the GPUs of this machine compute in bfloat16. True if nvidia-smi finds none: they may be in other
    machines."""
    command = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return all(float(capability) >= BFLOAT16_CAPABILITY for capability in output.split())
    return True


def _served(config: RunConfig) -> str | None:
    """Return the dtype setting of the servers, or None if the run has no servers or their kind has no such setting."""
    rollout = getattr(config, "rollout", None)
    return getattr(getattr(rollout, "server", None), "dtype", None)
