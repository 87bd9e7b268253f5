"""The overview that `rl --help` prints: all apps and commands, in groups."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

APPS = {
    "gsm8k-grpo": "train a model on math word problems with asynchronous GRPO",
    "grpo": "asynchronous RL with your own data and reward",
    "multi-turn-math": "multi-turn RL: a solution, feedback, a second attempt",
    "math-agent": "RL of an agent with a calculator tool",
    "clevr-count-grpo": "GRPO of a vision-language model that counts objects in images",
    "geometry3k-grpo": "GRPO of a vision-language model on geometry problems with diagrams",
    "clevr-count-sft": "supervised fine-tuning of a vision-language model on counts of objects",
    "gsm8k-sft": "supervised fine-tuning on worked solutions",
    "sft": "supervised fine-tuning on conversations",
    "hh-rlhf-dpo": "train a policy on preference pairs with DPO or IPO",
    "hh-rlhf-rm": "train a reward model on preference pairs (Bradley-Terry)",
}
"""Titles of the apps of this package. They are copies, because importing an app may import torch."""
GROUPS = {
    "commands for a run": (
        *("watch", "status", "logs", "show", "plot", "report", "metrics"),
        *("stop", "scale", "replay", "evaluate", "generate", "serve"),
    ),
    "commands for setup": ("doctor", "plan", "demo"),
}
"""Commands by heading; `run` is listed with the apps."""


def overview(apps: Mapping[str, str], commands: Mapping[str, str]) -> str:
    """Return the overview.

    Args:
        apps: `module:attribute` of each installed app, by name.
        commands: Help text of each command, by name.
    """
    titles = {name: title for name, title in APPS.items() if name in apps}
    third_party = {name: f"app of {apps[name].partition(':')[0]}" for name in sorted(apps) if name not in APPS}
    groups = {"apps, which start or resume a training run": {**titles, **third_party, "run": commands["run"]}}
    for heading, names in GROUPS.items():
        groups[heading] = {name: commands[name] for name in names if name in commands}
    column = 4 + max(len(name) for lines in groups.values() for name in lines)
    width = shutil.get_terminal_size().columns - 2
    parts = [
        "Train language models with reinforcement learning, and inspect the runs.",
        "Example, without a GPU, a model or data:\n  rl gsm8k-grpo",
    ]
    for heading, lines in groups.items():
        filled = (
            textwrap.fill(text, width, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column)
            for name, text in lines.items()
        )
        parts.append("\n".join([f"{heading}:", *filled]))
    return "\n\n".join(parts)
