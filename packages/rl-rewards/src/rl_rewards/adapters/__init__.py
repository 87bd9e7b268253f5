"""Rewards of this project in TRL and verifiers, and their rewards in this project. Needs neither library."""

from __future__ import annotations

from rl_rewards.adapters.trl import for_trl, from_trl
from rl_rewards.adapters.verifiers import for_verifiers, from_verifiers

__all__ = ["for_trl", "for_verifiers", "from_trl", "from_verifiers"]
