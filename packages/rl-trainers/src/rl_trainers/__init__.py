"""Algorithms, actors, the training loop and the books of a run.

Public names load on first use, so that reading a config does not import torch.
"""

from __future__ import annotations

from rl_contracts.runtime.lazy_imports import on_demand

__version__ = "0.1.0"

_HOMES = {
    "AlgorithmConfig": "algorithms.config",
    "AnswerEvaluation": "run_log.evaluation",
    "Books": "run_log.run_log",
    "CheckpointConfig": "run_log.checkpoints",
    "Critic": "learners.critic",
    "DataSource": "learners.supervised",
    "EvaluationConfig": "run_log.evaluation",
    "GapConfig": "weight_sync.gap.gate",
    "GapGate": "weight_sync.gap.gate",
    "LossEvaluation": "learners.supervised",
    "LossLearner": "learners.supervised",
    "MemorySharing": "weight_sync.memory_sharing",
    "PolicyActor": "learners.actor",
    "PolicyPreferenceLoss": "learners.preference",
    "PreferenceConfig": "learners.preference",
    "PublishConfig": "weight_sync.publisher",
    "RecoverConfig": "recovery.lookup",
    "RecoverPoints": "recovery.checkpoints",
    "RolloutWriter": "run_log.rollouts",
    "TrackersConfig": "run_log.tracking",
    "Tracking": "run_log.tracking",
    "WeightPublisher": "weight_sync.publisher",
    "replay_batch": "learners.actor",
    "reward_model_loss": "learners.preference",
    "train": "loop",
    "try_loss": "algorithms.objective",
}

__all__ = sorted(_HOMES)

__getattr__ = on_demand(__name__, _HOMES)
