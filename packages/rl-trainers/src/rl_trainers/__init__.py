"""Algorithms, learners, the training loop and the run log.

Public names load on first use, so that importing a config does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_trainers.algorithms.config import AlgorithmConfig
    from rl_trainers.algorithms.objective import try_loss
    from rl_trainers.learners.actor import PolicyActor, replay_batch
    from rl_trainers.learners.critic import Critic
    from rl_trainers.learners.preference import PolicyPreferenceLoss, PreferenceConfig, reward_model_loss
    from rl_trainers.learners.supervised import DataSource, LossEvaluation, LossLearner
    from rl_trainers.loop import train
    from rl_trainers.recovery.checkpoints import RecoveryCheckpoints
    from rl_trainers.recovery.lookup import RecoverConfig
    from rl_trainers.run_log.checkpoints import CheckpointConfig
    from rl_trainers.run_log.evaluation import CompletionEvaluation, EvaluationConfig
    from rl_trainers.run_log.rollouts import RolloutWriter
    from rl_trainers.run_log.run_log import RunLog
    from rl_trainers.run_log.tracking import TrackersConfig, Tracking
    from rl_trainers.weight_sync.gap.config import GapConfig
    from rl_trainers.weight_sync.gap.gate import GapGate
    from rl_trainers.weight_sync.memory_sharing import MemorySharing
    from rl_trainers.weight_sync.publisher import PublishConfig, WeightPublisher
    from rl_trainers.weight_sync.servers import ServerSync

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "AlgorithmConfig": "algorithms.config",
            "CompletionEvaluation": "run_log.evaluation",
            "RunLog": "run_log.run_log",
            "CheckpointConfig": "run_log.checkpoints",
            "Critic": "learners.critic",
            "DataSource": "learners.supervised",
            "EvaluationConfig": "run_log.evaluation",
            "GapConfig": "weight_sync.gap.config",
            "GapGate": "weight_sync.gap.gate",
            "LossEvaluation": "learners.supervised",
            "LossLearner": "learners.supervised",
            "MemorySharing": "weight_sync.memory_sharing",
            "PolicyActor": "learners.actor",
            "PolicyPreferenceLoss": "learners.preference",
            "PreferenceConfig": "learners.preference",
            "PublishConfig": "weight_sync.publisher",
            "RecoverConfig": "recovery.lookup",
            "RecoveryCheckpoints": "recovery.checkpoints",
            "RolloutWriter": "run_log.rollouts",
            "ServerSync": "weight_sync.servers",
            "TrackersConfig": "run_log.tracking",
            "Tracking": "run_log.tracking",
            "WeightPublisher": "weight_sync.publisher",
            "replay_batch": "learners.actor",
            "reward_model_loss": "learners.preference",
            "train": "loop",
            "try_loss": "algorithms.objective",
        },
    )


__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CompletionEvaluation",
    "Critic",
    "DataSource",
    "EvaluationConfig",
    "GapConfig",
    "GapGate",
    "LossEvaluation",
    "LossLearner",
    "MemorySharing",
    "PolicyActor",
    "PolicyPreferenceLoss",
    "PreferenceConfig",
    "PublishConfig",
    "RecoverConfig",
    "RecoveryCheckpoints",
    "RolloutWriter",
    "RunLog",
    "ServerSync",
    "TrackersConfig",
    "Tracking",
    "WeightPublisher",
    "replay_batch",
    "reward_model_loss",
    "train",
    "try_loss",
]
