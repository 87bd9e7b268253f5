"""megatron-core's process groups, which exist once per process: all engines of a process share them."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.errors import ConfigError
from rl_engines_megatron.cpu import without_cuda
from rl_engines_megatron.model.moe import expert_tensor

ORDER = "tp-cp-ep-pp-dp"
"""Order of the dimensions, fastest first, as in `rl_contracts.batch.parallel`. Ranks of a replica are consecutive."""

_users = 0
"""Number of engines in this process that use the groups."""
_layout: tuple[ParallelStrategy, int] = (ParallelStrategy(), 1)
"""Layout of the groups, and model chunks on each pipeline rank."""


def make_groups(
    strategy: ParallelStrategy,
    interleaved: int,
    seed: int,
    device: torch.device,
    timeout: float,
    undo: ExitStack,
) -> None:
    """Create megatron-core's groups, or share the existing ones (collective).

    Args:
        strategy: parallel layout.
        interleaved: model chunks on each pipeline rank.
        seed: seed of megatron-core's random states.
        device: device of this rank.
        timeout: timeout of collectives in seconds.
        undo: releases the groups when it is closed.

    Raises:
        ConfigError: another engine of this process has another layout.
    """
    global _users, _layout
    layout = (strategy, interleaved)
    if _users and _layout != layout:
        raise ConfigError(
            f"allocation megatron:{strategy}, interleaved={interleaved}: another engine of this process has the layout "
            f"megatron:{_layout[0]}, interleaved={_layout[1]}, and megatron-core supports one layout per process. "
            "Use the same layout for models that share devices, or give each its own devices."
        )
    if not _users:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=strategy.tensor,
            pipeline_model_parallel_size=strategy.pipeline,
            virtual_pipeline_model_parallel_size=interleaved if interleaved > 1 else None,
            context_parallel_size=strategy.context,
            expert_model_parallel_size=strategy.expert,
            expert_tensor_parallel_size=_expert_tensor_ranks(strategy),
            distributed_timeout_minutes=math.ceil(timeout / 60),
            order=ORDER,
            create_gloo_process_groups=False,
        )
        with without_cuda(device):
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        _layout = layout
    _users += 1
    undo.callback(_release_groups)


def _expert_tensor_ranks(strategy: ParallelStrategy) -> int:
    """Return the number of ranks over which each expert matrix is split, in groups that dense and MoE models share.

    With several stages the experts occupy all ranks of a stage (`check_experts`). megatron-core requires this for
    `ORDER`.
    """
    if strategy.pipeline > 1:
        return strategy.tensor * strategy.context // strategy.expert
    return expert_tensor(strategy)


def _release_groups() -> None:
    global _users
    _users -= 1
    if _users == 0:
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # megatron-core 0.19 does not reset it
        for group in groups:  # megatron-core only drops the references; each group has threads and connections
            if group is not None:
                dist.destroy_process_group(group)
