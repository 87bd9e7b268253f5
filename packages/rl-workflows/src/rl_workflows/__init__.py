"""Rollout workflows and the asynchronous runtime that executes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.lazy import on_demand

if TYPE_CHECKING:
    from rl_workflows.agents import AgentEpisodes
    from rl_workflows.commands import AgentCommand, AgentContainer
    from rl_workflows.config import RolloutConfig
    from rl_workflows.environments import EnvironmentWorkflow, TextGame
    from rl_workflows.groups import dynamic_sampling
    from rl_workflows.head import RolloutHead
    from rl_workflows.rlvr import RLVRWorkflow
    from rl_workflows.runtime import DistRollout, tune_garbage_collection
    from rl_workflows.staleness import StalenessManager, Ticket
    from rl_workflows.turns import MultiTurnWorkflow, ToolWorkflow
    from rl_workflows.verifiers import VerifiersAgent


__all__ = [
    "AgentCommand",
    "AgentContainer",
    "AgentEpisodes",
    "DistRollout",
    "EnvironmentWorkflow",
    "MultiTurnWorkflow",
    "RLVRWorkflow",
    "RolloutConfig",
    "RolloutHead",
    "StalenessManager",
    "TextGame",
    "Ticket",
    "ToolWorkflow",
    "VerifiersAgent",
    "dynamic_sampling",
    "tune_garbage_collection",
]

__getattr__ = on_demand(
    __name__,
    {
        "AgentCommand": "commands",
        "AgentContainer": "commands",
        "AgentEpisodes": "agents",
        "DistRollout": "runtime",
        "EnvironmentWorkflow": "environments",
        "MultiTurnWorkflow": "turns",
        "RLVRWorkflow": "rlvr",
        "RolloutConfig": "config",
        "RolloutHead": "head",
        "StalenessManager": "staleness",
        "TextGame": "environments",
        "Ticket": "staleness",
        "ToolWorkflow": "turns",
        "VerifiersAgent": "verifiers",
        "dynamic_sampling": "groups",
        "tune_garbage_collection": "runtime",
    },
)
