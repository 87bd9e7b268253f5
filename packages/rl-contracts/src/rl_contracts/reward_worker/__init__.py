"""Plain reward functions in processes of their own, which can be killed.

`AsyncRewardWrapper` is what a workflow uses; `python -m rl_contracts.reward_worker` is the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_contracts.reward_worker.wrapper import AsyncRewardWrapper
else:  # kept out of the worker process, which imports this package too
    __getattr__ = lazy_getattr(__name__, {"AsyncRewardWrapper": "wrapper"})

__all__ = ["AsyncRewardWrapper"]
