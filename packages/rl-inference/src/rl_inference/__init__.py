"""Inference servers and their clients.

`EmbeddedEngine` speaks to servers started with `python -m rl_inference.server`; `EmbeddedEngine.server_spec`
says how to start them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.lazy import on_demand

if TYPE_CHECKING:
    from rl_inference.client import EmbeddedEngine
    from rl_inference.config import EmbeddedEngineConfig

__all__ = ["EmbeddedEngine", "EmbeddedEngineConfig"]


__getattr__ = on_demand(__name__, {"EmbeddedEngine": "client", "EmbeddedEngineConfig": "config"})
