"""An app: GRPO with these parts, and a setting of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_apps.programs import grpo
from rl_apps.run.app import App, Run
from rl_apps.settings.config import GRPOConfig
from rl_contracts.config import require


@dataclass
class TheirConfig(GRPOConfig):
    """The settings of GRPO, and one more."""

    motto: str = "less is more"
    """Written into the run directory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.motto), "motto", "words", self.motto)


def check(run: Run[TheirConfig]) -> list[str]:
    """What GRPO checks, and a line of one's own."""
    return [*grpo.check(run), f"motto: {run.config.motto}"]


def train(run: Run[TheirConfig]) -> None:
    """The work of one trainer process."""
    (run.directory / "motto.txt").write_text(run.config.motto)
    grpo.train(run)


APP = App(
    name="their-app",
    title="Somebody else's app.",
    schema=TheirConfig,
    train=train,
    check=check,
    defaults=Path(__file__).with_name("defaults.yaml"),
)
