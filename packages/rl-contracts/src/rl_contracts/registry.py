"""How parts find each other: by entry point or dotted path, never by a table in our code."""

from __future__ import annotations

import importlib
import importlib.metadata
from difflib import get_close_matches
from typing import Any

from rl_contracts.errors import ConfigError

KNOWN_PACKAGES: dict[str, str] = {
    "rl.train_engines": "rl-engines-fsdp or rl-engines-megatron",
    "rl.inference_engines": "rl-inference",
    "rl.workflows": "rl-workflows",
    "rl.rewards": "rl-rewards",
    "rl.datasets": "rl-datasets",
    "rl.schedulers": "rl-launchers",
    "rl.policy_losses": "rl-trainers",
}
"""The entry-point groups and the package of this project that fills each; a third party may fill any."""


def available(group: str) -> dict[str, str]:
    """Names installed in an entry-point group, each with the `module:attribute` that it stands for."""
    return {e.name: e.value for e in importlib.metadata.entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """The object that `name` stands for in an entry-point group.

    Args:
        group: entry-point group, for example `"rl.rewards"`.
        name: a name installed in the group, or a dotted path `package.module:attribute`.

    Raises:
        ConfigError: nothing of that name is installed, or it cannot be imported.
    """
    target = name if ":" in name else available(group).get(name)
    if target is None:
        raise ConfigError(_unknown(group, name))
    module_name, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{group}: {name!r} stands for {target!r}, which cannot be imported: {error}") from error
    return value


def _unknown(group: str, name: str) -> str:
    installed = sorted(available(group))
    close = get_close_matches(name, installed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    listing = ", ".join(installed) if installed else "nothing"
    package = KNOWN_PACKAGES.get(group, "a package that registers it")
    return (
        f"{group}: nothing is called {name!r}{hint} Installed: {listing}. "
        f"Install {package}, or give a dotted path such as 'my_package.module:name'."
    )
