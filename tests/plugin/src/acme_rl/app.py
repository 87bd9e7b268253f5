"""An app: GRPO with the components of this package and one more setting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_apps.programs import grpo
from rl_apps.run.app import App, Run
from rl_apps.settings.config import GRPOConfig
from rl_contracts.config import require


@dataclass
class AcmeConfig(GRPOConfig):
    """Settings of GRPO and a motto."""

    motto: str = "less is more"
    """Text to write to `motto.txt` in the run directory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.motto), "motto", "a non-empty text", self.motto)


def check(run: Run[AcmeConfig]) -> list[str]:
    """Run the checks of GRPO, and add a line to the report."""
    return [*grpo.check(run), f"motto: {run.config.motto}"]


def train(run: Run[AcmeConfig]) -> None:
    """Write the motto and train, in each trainer process."""
    (run.directory / "motto.txt").write_text(run.config.motto)
    grpo.train(run)


APP = App(
    name="acme-grpo",
    title="Third-party app.",
    schema=AcmeConfig,
    train=train,
    check=check,
    defaults=Path(__file__).with_name("defaults.yaml"),
)
