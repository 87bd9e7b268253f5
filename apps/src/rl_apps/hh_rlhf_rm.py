"""`hh-rlhf-rm`: a reward model from preference pairs (Bradley-Terry)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rl_apps import driver, parts, preference
from rl_apps.layout import Layout
from rl_apps.preference import PairsConfig


def train(config: PairsConfig, layout: Layout, run_dir: Path, addresses: list[str]) -> None:
    """The work of one trainer process."""
    from rl_trainers import reward_model_loss

    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(config, layout, replace(config.finetune_spec(), head="score")))
        preference.run(config, run_dir, engine, reward_model_loss)


APP = preference.app("hh-rlhf-rm", __doc__, PairsConfig, train)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main(APP))
