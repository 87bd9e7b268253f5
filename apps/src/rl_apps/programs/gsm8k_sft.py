"""`gsm8k-sft`: `rl sft` on worked solutions of math word problems."""

from __future__ import annotations

from dataclasses import replace

from rl_apps.programs import sft
from rl_apps.run import summary
from rl_apps.settings.compose import CONF

APP = replace(
    sft.APP,
    name="gsm8k-sft",
    title="supervised fine-tuning on worked solutions",
    example="total_steps=60 actor.optimizer.lr=1e-3",
    defaults=CONF / "gsm8k_sft.yaml",
    required={},
    summary=summary.after_sft,
)
