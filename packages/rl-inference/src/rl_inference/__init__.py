"""Inference servers and their clients.

`EmbeddedEngine` speaks to servers started with `python -m rl_inference.server`; `EmbeddedEngine.server_spec`
says how to start them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.client import EmbeddedEngine
    from rl_inference.config import EmbeddedEngineConfig

__all__ = ["EmbeddedEngine", "EmbeddedEngineConfig"]

_HOMES = {"EmbeddedEngine": "rl_inference.client", "EmbeddedEngineConfig": "rl_inference.config"}


def __getattr__(name: str) -> Any:
    """Load public names where they are used: a client does not import torch's model stack, nor a config the
    client's HTTP."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
