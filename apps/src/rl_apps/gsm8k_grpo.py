"""`gsm8k-grpo`: `rl grpo` of word problems with verifiable answers."""

from __future__ import annotations

from dataclasses import replace

from rl_apps import closing, grpo
from rl_apps.compose import CONF

APP = replace(
    grpo.APP,
    name="gsm8k-grpo",
    title="train a model on math word problems with asynchronous GRPO",
    defaults=CONF / "gsm8k_grpo.yaml",
    required={},
    closing=closing.after_grpo,
)
