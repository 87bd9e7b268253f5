"""megatron-core's process groups, which a process has once: engines of one layout share them."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.errors import ConfigError
from rl_engines_megatron.cpu import without_cuda
from rl_engines_megatron.model.mixture import expert_tensor

ORDER = "tp-cp-ep-pp-dp"
"""Ranks of a replica lie side by side, tensor ranks fastest: the order of `rl_contracts.batch.parallel`."""

_users = 0
"""Engines of this process that use the groups."""
_layout: tuple[ParallelStrategy, int] = (ParallelStrategy(), 1)
"""Their layout, and parts of the model on each pipeline rank."""


def make_groups(
    strategy: ParallelStrategy,
    interleaved: int,
    seed: int,
    device: torch.device,
    timeout: float,
    undo: ExitStack,
) -> None:
    """Make megatron-core's groups, or share those that are there (collective).

    Args:
        interleaved: parts of the model on each pipeline rank.
        undo: leaves them when it is closed.

    Raises:
        ConfigError: another engine of this process has another layout.
    """
    global _users, _layout
    layout = (strategy, interleaved)
    if _users and _layout != layout:
        raise ConfigError(
            f"allocation megatron:{strategy}, interleaved={interleaved}: expected the layout of the engine that this "
            f"process has already, megatron:{_layout[0]}, interleaved={_layout[1]}; megatron-core has one per process. "
            "Give models that share devices the same layout, or devices of their own."
        )
    if not _users:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=strategy.tensor,
            pipeline_model_parallel_size=strategy.pipeline,
            virtual_pipeline_model_parallel_size=interleaved if interleaved > 1 else None,
            context_parallel_size=strategy.context,
            expert_model_parallel_size=strategy.expert,
            expert_tensor_parallel_size=_ranks_of_an_expert(strategy),
            distributed_timeout_minutes=math.ceil(timeout / 60),
            order=ORDER,
            create_gloo_process_groups=False,
        )
        with without_cuda(device):
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        _layout = layout
    _users += 1
    undo.callback(_leave)


def _ranks_of_an_expert(strategy: ParallelStrategy) -> int:
    """Those over which each matrix of an expert is split, in the groups that models with and without experts share.

    With several stages the experts lie over all ranks of one (`check_experts`): megatron-core wants it for this order.
    """
    if strategy.pipeline > 1:
        return strategy.tensor * strategy.context // strategy.expert
    return expert_tensor(strategy)


def _leave() -> None:
    global _users
    _users -= 1
    if _users == 0:
        made = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # of 0.19, which keeps this one
        for group in made:  # megatron-core only forgets them, and each has threads and connections of its own
            if group is not None:
                dist.destroy_process_group(group)
