"""From the command line to a checked config: Hydra composes, unknown keys are refused with the nearest valid name.

Commands take Hydra overrides with dotted keys (`total_steps=20 actor.optimizer.lr=1e-4`, `algorithm=<preset>`) and the
flags `--dry-run`, `--help` and `--cfg job`.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from rl_contracts.errors import ConfigError

CONF = Path(__file__).parent / "conf"


@dataclass(frozen=True)
class CommandLine:
    """What was asked for."""

    overrides: list[str]
    """Hydra overrides."""
    dry_run: bool = False
    """Show what would happen, and start nothing."""
    show_config: bool = False
    """Print the composed config."""
    show_help: bool = False
    """Print the settings with their meanings."""


def parse(argv: list[str]) -> CommandLine:
    """Split a command line into flags and overrides.

    Raises:
        ConfigError: an argument is neither a flag of ours nor `key=value`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--help", "-h", action="store_true")
    known, rest = parser.parse_known_args(argv)
    for argument in rest:
        if "=" not in argument:
            raise ConfigError(f"argument {argument!r}: expected key=value, --dry-run, --cfg job or --help.")
    return CommandLine(rest, known.dry_run, known.cfg is not None, known.help)


def compose[T](name: str, schema: type[T], overrides: list[str]) -> T:
    """Compose `conf/<name>.yaml` over `schema` with overrides, into objects whose own checks have passed.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or one that its config refuses.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra.compose(name, overrides=_opened(overrides, schema))
        result = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, schema, overrides)) from error
    assert isinstance(result, schema)
    return result


def _opened(overrides: list[str], schema: type) -> list[str]:
    """Overrides of keys below an open mapping (`data.options.level=2`) in the form in which Hydra adds them."""
    mappings = tuple(f"{key}." for key, value in flatten(schema).items() if isinstance(value, dict))
    return [f"++{text}" if text.startswith(mappings) else text for text in overrides]


def explain(error: Exception, schema: type, overrides: list[str]) -> str:
    """One sentence about a composition error: the key, what was wrong, and the nearest valid key."""
    keys = list(flatten(schema))
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        groups = {p.name for p in CONF.iterdir() if p.is_dir()}
        if key in groups and "." not in key:
            value = override.split("=", 1)[1]
            presets = sorted(p.stem for p in (CONF / key).glob("*.yaml"))
            if value not in presets:
                return f"{key}={value}: unknown preset; there are {', '.join(presets)}."
        elif key not in keys and not any(k.startswith(key + ".") for k in keys):
            close = get_close_matches(key, keys, n=1, cutoff=0.5)
            same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
            nearest = next(iter([*same_leaf, *close]), None)
            hint = f" Did you mean {nearest!r}?" if nearest else ""
            return f"unknown setting {key!r}.{hint} `--help` lists all settings."
    first = str(error.__cause__ or error).strip()
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    key_line = next((re.sub(r"full_key:\s*", "", line) for line in lines if line.startswith("full_key")), "")
    return f"{key_line}: {lines[0]}" if key_line else " ".join(lines[:2])


def flatten(schema: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf setting of a dataclass by dotted key, with its default (of an instance: its value)."""
    instance = schema() if isinstance(schema, type) else schema
    result: dict[str, Any] = {}
    for item in fields(instance):
        value = getattr(instance, item.name)
        if is_dataclass(value) and not isinstance(value, type):
            result |= flatten(value, f"{prefix}{item.name}.")
        else:
            result[prefix + item.name] = value
    return result


def override[T](config: T, overrides: list[str]) -> T:
    """A config object with dotted `key=value` overrides applied, checked again.

    Raises:
        ConfigError: an unknown key, or a value that is refused.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(overrides))
        return cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, type(config), overrides)) from error


def to_yaml(config: Any) -> str:
    """A config object as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml[T](path: Path, schema: type[T]) -> T:
    """Read back what `to_yaml` wrote.

    Raises:
        ConfigError: the file is missing, or is not a config of this schema.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not path.is_file():
        raise ConfigError(f"{path}: expected the resolved config of a run, found no such file.")
    try:
        result = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(path)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: not a config of this kind of run: {error}") from error
    assert isinstance(result, schema)
    return result
