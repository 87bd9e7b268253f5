"""`multi-turn-math`: solve a problem, get feedback, try again. `math-agent`: train an agent to use a calculator.

Both are `gsm8k-grpo` with another workflow and an embedded model that is warmed up on turns or tool calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rl_apps.programs import gsm8k_grpo
from rl_apps.run import summary
from rl_apps.settings.compose import CONF

MULTI_TURN_MATH = replace(
    gsm8k_grpo.APP,
    name="multi-turn-math",
    title="multi-turn RL: a solution, feedback, a second attempt",
    defaults=CONF / "multi_turn_math.yaml",
    lessons="turns",
    summary=partial(summary.after_grpo, command="multi-turn-math"),
)

MATH_AGENT = replace(
    gsm8k_grpo.APP,
    name="math-agent",
    title="RL of an agent with a calculator tool",
    defaults=CONF / "math_agent.yaml",
    lessons="tools",
    summary=partial(summary.after_grpo, command="math-agent"),
)
