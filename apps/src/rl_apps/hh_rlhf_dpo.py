"""`hh-rlhf-dpo`: a policy from preference pairs, by DPO or IPO."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rl_apps import driver, parts, preference
from rl_apps.layout import Layout
from rl_apps.model import make_model
from rl_apps.preference import DPOConfig
from rl_apps.progress import PREFERENCE_COLUMNS


def train(config: DPOConfig, layout: Layout, run_dir: Path, addresses: list[str]) -> None:
    """The work of one trainer process."""
    from rl_trainers import PolicyPreferenceLoss

    with parts.Closing() as stack:
        engine = stack.add(preference.make_engine(config, layout))
        reference = stack.add(preference.make_engine(config, layout, frozen=True))
        preference.run(config, run_dir, engine, PolicyPreferenceLoss(config.preference), reference)


APP = driver.App(
    name="hh-rlhf-dpo",
    title=__doc__,
    schema=DPOConfig,
    layout=preference.layout,
    check=preference.check,
    make_model=partial(make_model, warm_up=True, form="pairs"),
    servers=preference.servers,
    train=train,
    columns=PREFERENCE_COLUMNS,
    closing=preference.closing,
)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main(APP))
