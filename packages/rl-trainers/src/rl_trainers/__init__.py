"""Algorithms, actors, the training loop and the books of a run.

Public names load on first use, so that reading a config does not import torch.
"""

from __future__ import annotations

from rl_contracts.lazy import on_demand

__version__ = "0.1.0"

_HOMES = {
    "AlgorithmConfig": "algorithm",
    "AnswerEvaluation": "evaluation",
    "Books": "books",
    "CheckpointConfig": "checkpoints",
    "Critic": "critic",
    "DataSource": "supervised",
    "EvaluationConfig": "evaluation",
    "GapConfig": "gap.gate",
    "GapGate": "gap.gate",
    "LossEvaluation": "supervised",
    "LossLearner": "supervised",
    "MemorySharing": "sharing",
    "PolicyActor": "actor",
    "PolicyPreferenceLoss": "preference",
    "PreferenceConfig": "preference",
    "PublishConfig": "publish",
    "RecoverConfig": "points",
    "RecoverPoints": "recover",
    "RolloutWriter": "rollouts",
    "TrackersConfig": "tracking",
    "Tracking": "tracking",
    "WeightPublisher": "publish",
    "replay_batch": "actor",
    "reward_model_loss": "preference",
    "train": "loop",
    "try_loss": "objective",
}

__all__ = sorted(_HOMES)

__getattr__ = on_demand(__name__, _HOMES)
