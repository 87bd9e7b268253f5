"""`hh-rlhf-dpo`: a policy from preference pairs, by DPO or IPO."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rl_apps import driver, parts, preference
from rl_apps.layout import Layout
from rl_apps.preference import DPOConfig


def train(config: DPOConfig, layout: Layout, run_dir: Path, addresses: list[str]) -> None:
    """The work of one trainer process."""
    from rl_trainers import PolicyPreferenceLoss

    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(config, layout))
        frozen = replace(config.finetune_spec(), optimizer=None)
        reference = stack.add(parts.make_engine(config, layout, frozen))
        preference.run(config, run_dir, engine, PolicyPreferenceLoss(config.preference), reference)


APP = preference.app("hh-rlhf-dpo", __doc__, DPOConfig, train)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main(APP))
