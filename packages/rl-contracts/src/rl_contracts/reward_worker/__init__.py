"""Plain reward functions in processes of their own, which can be killed.

`AsyncRewardWrapper` is what a workflow uses; `python -m rl_contracts.reward_worker` is the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_contracts.reward_worker.wrapper import AsyncRewardWrapper

__all__ = ["AsyncRewardWrapper"]


def __getattr__(name: str) -> Any:
    if name != "AsyncRewardWrapper":  # kept out of the worker process, which imports this package too
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_contracts.reward_worker.wrapper import AsyncRewardWrapper

    return AsyncRewardWrapper
