"""`clevr-count-sft`, `clevr-count-grpo` and `geometry3k-grpo`: `rl sft` and `rl grpo` on questions about images.

By default they use generated images, and a tiny vision-language model that `clevr-count-sft` trains first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rl_apps.programs import gsm8k_grpo, gsm8k_sft
from rl_apps.run import summary
from rl_apps.settings.compose import CONF

CLEVR_COUNT_SFT = replace(
    gsm8k_sft.APP,
    name="clevr-count-sft",
    title="supervised fine-tuning of a vision-language model on counts of objects",
    defaults=CONF / "clevr_count_sft.yaml",
    summary=partial(summary.after_sft, command="clevr-count-grpo"),
)

CLEVR_COUNT_GRPO = replace(
    gsm8k_grpo.APP,
    name="clevr-count-grpo",
    title="GRPO of a vision-language model that counts objects in images",
    defaults=CONF / "clevr_count_grpo.yaml",
    starts_from="clevr-count-sft",
    summary=partial(summary.after_grpo, command="clevr-count-grpo"),
)

GEOMETRY3K_GRPO = replace(
    CLEVR_COUNT_GRPO,
    name="geometry3k-grpo",
    title="GRPO of a vision-language model on geometry problems with diagrams",
    defaults=CONF / "geometry3k_grpo.yaml",
    summary=partial(summary.after_grpo, command="geometry3k-grpo"),
)
