"""`hh-rlhf-dpo`: a policy from preference pairs, by DPO or IPO."""

from __future__ import annotations

import sys
from dataclasses import replace

from rl_apps import driver, parts, preference
from rl_apps.app import Run
from rl_apps.preference import DPOConfig


def train(run: Run[DPOConfig]) -> None:
    """The work of one trainer process."""
    from rl_trainers import PolicyPreferenceLoss

    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(run))
        frozen = replace(run.config.finetune_spec(), optimizer=None)
        reference = stack.add(parts.make_engine(run, spec=frozen))
        preference.learn(run, engine, PolicyPreferenceLoss(run.config.preference), reference)


APP = preference.app("hh-rlhf-dpo", __doc__, DPOConfig, train)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main("rl_apps.hh_rlhf_dpo:APP"))
