"""Run plain reward functions in worker processes, which can be killed.

Workflows use `AsyncRewardWrapper`. `python -m rl_contracts.reward_worker` is the worker process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_contracts.reward_worker.wrapper import AsyncRewardWrapper
else:  # lazy, because the worker process imports this package and does not need the wrapper
    __getattr__ = lazy_getattr(__name__, {"AsyncRewardWrapper": "wrapper"})

__all__ = ["AsyncRewardWrapper"]
