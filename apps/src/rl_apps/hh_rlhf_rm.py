"""`hh-rlhf-rm`: a reward model from preference pairs (Bradley-Terry)."""

from __future__ import annotations

import sys
from dataclasses import replace

from rl_apps import driver, parts, preference
from rl_apps.app import Run
from rl_apps.config import RunConfig


def train(run: Run[RunConfig]) -> None:
    """The work of one trainer process."""
    from rl_trainers import reward_model_loss

    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(run, spec=replace(run.config.finetune_spec(), head="score")))
        preference.learn(run, engine, reward_model_loss)


APP = preference.app("hh-rlhf-rm", __doc__, RunConfig, train)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main("rl_apps.hh_rlhf_rm:APP"))
