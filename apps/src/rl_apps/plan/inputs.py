"""Inputs of a plan: the app and its settings, and the devices and rates that the user gives. Imports nothing heavy."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_apps.plan.rates import DEVICES, Sourced, read_rates
from rl_apps.run.app import App, Run
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.device_layout import layout_of, run_directory
from rl_apps.settings.dtypes import resolve_dtypes
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.runtime.machine import visible_gpus


@dataclass(frozen=True)
class Inputs:
    """Inputs of a plan, as on the command line."""

    reference: str
    """Name or dotted path of the app."""
    app: App
    settings: tuple[str, ...]
    """Settings of the app. `cluster.nodes` and `cluster.devices` describe the cluster whose splits are tried."""
    gpu: str
    """Name of a GPU, whose data sheet gives the rates that are not measured; empty: none."""
    memory: float
    """Memory of a device in bytes; 0 if unknown."""
    rates: dict[str, Sourced]
    """Rates of a file, which override measured and assumed ones."""
    run_of: Path | None
    """Directory of a run to measure rates from. Its settings are the defaults."""
    file: Path | None
    """File of settings: of the user, or of the run."""

    @property
    def has_allocation(self) -> bool:
        """Whether the user chose an allocation."""
        in_file = self.file is not None and re.search("^allocation:", self.file.read_text(), re.MULTILINE)
        return bool(in_file) or any(text.startswith("allocation=") for text in self.settings)

    def with_settings(self, *changes: str) -> Inputs:
        """Return these inputs with other settings, which replace earlier ones of the same name."""
        values = dict(text.partition("=")[::2] for text in (*self.settings, *changes))
        return replace(self, settings=tuple(f"{name}={value}" for name, value in values.items()))

    def command(self) -> str:
        """Return the command line of the run."""
        run = ["rl"] if self.reference in registry.available("rl.apps") else ["rl", "run"]
        config = [] if self.file is None else ["--config", str(self.file)]
        return shlex.join([*run, self.reference, *config, *self.settings])

    def config(self, *changes: str) -> GRPOConfig:
        """Return the settings with `changes`, before their dtypes are resolved.

        Raises:
            ConfigError: the settings or changes are invalid.
        """
        config: GRPOConfig = self.app.config((*self.settings, *changes), self.file)
        return config

    def run(self, config: GRPOConfig) -> Run[GRPOConfig]:
        """Return the run with these settings, and resolve their dtypes; start and load nothing.

        Raises:
            ConfigError: the allocation is invalid.
        """
        layout = layout_of(config.allocation, self.app.servers)
        device = "cuda" if self.gpu or config.cluster.devices else config.cluster.device
        if device == "auto":
            device = "cuda" if visible_gpus(os.environ) else "cpu"
        resolve_dtypes(config, device == "cuda")
        return Run(config, layout, run_directory(config.run_dir, config.experiment, config.trial), device)


def read_inputs(
    reference: str,
    settings: Sequence[str],
    gpu: str = "",
    memory: float = 0.0,
    rates: Path | None = None,
    run_of: Path | None = None,
    file: Path | None = None,
) -> Inputs:
    """Check and return the inputs of a plan.

    Args:
        reference: name or dotted path of the app.
        settings: see `Inputs`.
        gpu: see `Inputs`.
        memory: memory of a device in bytes; 0 for the value of the data sheet.
        rates: file of rates.
        run_of: see `Inputs`.
        file: file of settings; by default that of the run.

    Raises:
        ConfigError: an input is missing or invalid.
    """
    if not (gpu or rates or run_of):
        raise ConfigError(
            f"rl plan {reference}: expected --gpu NAME, --run RUN or --rates FILE, from which the speed is planned; "
            f"for example `rl plan {reference} --gpu H100`."
        )
    known = f"one of {', '.join(DEVICES)}; for another GPU, use --rates and --memory"
    require(not gpu or gpu in DEVICES, "--gpu", known, gpu)
    app: App = registry.load("rl.apps", reference)
    require(app.servers == "required", "rl plan", "an app that trains on completions, such as gsm8k-grpo", app.name)
    if run_of is not None:
        stored = run_of / "config.yaml"
        require(stored.is_file(), "--run", "a run directory with a config.yaml file", str(run_of))
        file = file or stored
    memory = memory or (DEVICES[gpu].memory if gpu else 0.0)
    given = {} if rates is None else read_rates(rates)
    inputs = Inputs(reference, app, tuple(settings), gpu, memory, given, run_of, file)
    if not inputs.config().model.path:
        raise ConfigError(
            f"rl plan {reference}: expected model.path=... (a Hugging Face directory or hub id), found none; for "
            f"example `rl plan {reference} model.path=Qwen/Qwen2.5-1.5B-Instruct --gpu {gpu or 'H100'}`."
        )
    return inputs
