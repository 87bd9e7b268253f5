"""Rollout workflows and the asynchronous runtime that executes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_workflows.agents.agent import AgentEpisodeWorkflow
    from rl_workflows.agents.command import AgentCommand, AgentContainer
    from rl_workflows.agents.verifiers import VerifiersAgent
    from rl_workflows.rollout.config import RolloutConfig
    from rl_workflows.rollout.groups import dynamic_sampling
    from rl_workflows.rollout.runtime import DistRollout, tune_garbage_collection
    from rl_workflows.rollout.scheduler import RolloutScheduler
    from rl_workflows.rollout.staleness import StalenessManager, Ticket
    from rl_workflows.workflows.environments import EnvironmentWorkflow, TextGame
    from rl_workflows.workflows.multi_turn import MultiTurnWorkflow, ToolWorkflow
    from rl_workflows.workflows.rlvr import RLVRWorkflow, VisionRLVRWorkflow

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "AgentCommand": "agents.command",
            "AgentContainer": "agents.command",
            "AgentEpisodeWorkflow": "agents.agent",
            "DistRollout": "rollout.runtime",
            "EnvironmentWorkflow": "workflows.environments",
            "MultiTurnWorkflow": "workflows.multi_turn",
            "RLVRWorkflow": "workflows.rlvr",
            "RolloutConfig": "rollout.config",
            "RolloutScheduler": "rollout.scheduler",
            "StalenessManager": "rollout.staleness",
            "TextGame": "workflows.environments",
            "Ticket": "rollout.staleness",
            "ToolWorkflow": "workflows.multi_turn",
            "VerifiersAgent": "agents.verifiers",
            "VisionRLVRWorkflow": "workflows.rlvr",
            "dynamic_sampling": "rollout.groups",
            "tune_garbage_collection": "rollout.runtime",
        },
    )


__all__ = [
    "AgentCommand",
    "AgentContainer",
    "AgentEpisodeWorkflow",
    "DistRollout",
    "EnvironmentWorkflow",
    "MultiTurnWorkflow",
    "RLVRWorkflow",
    "RolloutConfig",
    "RolloutScheduler",
    "StalenessManager",
    "TextGame",
    "Ticket",
    "ToolWorkflow",
    "VerifiersAgent",
    "VisionRLVRWorkflow",
    "dynamic_sampling",
    "tune_garbage_collection",
]
