"""`gsm8k-grpo`: `rl grpo` on math word problems with verifiable answers."""

from __future__ import annotations

from dataclasses import replace

from rl_apps.programs import grpo
from rl_apps.run import summary
from rl_apps.settings.compose import CONF

APP = replace(
    grpo.APP,
    name="gsm8k-grpo",
    title="train a model on math word problems with asynchronous GRPO",
    example="total_steps=60 actor.optimizer.lr=2e-4 rollout.max_staleness=2",
    defaults=CONF / "gsm8k_grpo.yaml",
    required={},
    summary=summary.after_grpo,
)
