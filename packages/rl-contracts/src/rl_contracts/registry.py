"""How parts find each other: by entry point or dotted path, never by a table in our code.

A part that has settings brings them: the dataclass of a class `Engine` is called `EngineConfig` and stands beside it,
in the module that the entry point names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import signal
import sys
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import ConfigError, raised_at

if TYPE_CHECKING:
    from rl_contracts.config import ComponentConfig

__all__ = ["available", "load", "load_component", "load_components", "settings"]

KNOWN_PACKAGES: dict[str, str] = {
    "rl.train_engines": "rl-engines-fsdp rl-engines-megatron",
    "rl.optimizers": "rl-engines-fsdp",
    "rl.inference_engines": "rl-inference",
    "rl.workflows": "rl-workflows",
    "rl.tools": "rl-workflows",
    "rl.rewards": "rl-rewards",
    "rl.datasets": "rl-datasets",
    "rl.schedulers": "rl-launchers",
    "rl.advantages": "rl-trainers",
    "rl.corrections": "rl-trainers",
    "rl.masks": "rl-trainers",
    "rl.policy_losses": "rl-trainers",
    "rl.trackers": "rl-trainers",
    "rl.apps": "rl-apps",
}
"""The entry-point groups and the packages of this project that fill each, with spaces between; a third party may fill
any."""


def available(group: str) -> dict[str, str]:
    """Names installed in an entry-point group, each with the `module:attribute` that it stands for."""
    return {e.name: e.value for e in _installed(tuple(sys.path)).select(group=group)}


def load(group: str, name: str) -> Any:
    """The object that `name` stands for in an entry-point group.

    Args:
        group: entry-point group, for example `"rl.rewards"`.
        name: a name installed in the group, a dotted path `package.module:attribute`, or a file `my/part.py:attribute`.

    Raises:
        ConfigError: nothing of that name is installed, or it cannot be imported.
    """
    return _imported(group, name, _target(group, name))


def settings(group: str, name: str) -> type:
    """The dataclass with the settings of the class that `name` stands for: for `module:Engine` it is
    `module:EngineConfig`. Imports that module, which is to leave heavy libraries to the class itself.

    Raises:
        ConfigError: nothing of that name is installed, or it brings no such dataclass.
    """
    target = f"{_target(group, name)}Config"
    found = _imported(group, name, target)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ConfigError(
            f"{group}: {name!r} brings its settings as {target!r}: expected a dataclass, found {found!r}."
        )
    return found


def load_components(config: ComponentConfig) -> list[Any]:
    """What the settings of a part name, with its constants; nothing for `none`, several for names joined by `+`.

    A part is a function whose constants are keyword-only arguments, or a class that takes them so and whose objects are
    called like the function.

    Raises:
        ConfigError: nothing of that name is installed, an option is none of its keyword arguments, or one that it needs
            is missing.
    """
    constants, parts, known = config.constants(), [], set[str]()
    for kind in config.kind.split("+") if config.kind != "none" else ():
        found = load(config.group, kind)
        takes = {n: p for n, p in inspect.signature(found).parameters.items() if p.kind is p.KEYWORD_ONLY}
        missing = sorted(n for n, p in takes.items() if p.default is p.empty and n not in constants)
        if missing:
            raise ConfigError(
                f"{config.setting}.kind={kind} needs the constants {missing}; give them as "
                f"{config.setting}.options.<name>=<value>."
            )
        bound = {n: constants[n] for n in takes if n in constants}
        parts.append(found(**bound) if inspect.isclass(found) else partial(found, **bound))
        known |= set(takes)
    odd = sorted(name for name, value in config.options.items() if value is not None and name not in known)
    if odd:
        raise ConfigError(
            f"{config.setting}.options: expected constants of {config.setting}.kind={config.kind} "
            f"({', '.join(sorted(known)) or 'it takes none'}), found {', '.join(odd)}. Leave out those of another kind "
            f"with {config.setting}.options.<name>=null."
        )
    return parts


def load_component(config: ComponentConfig, optional: bool = False) -> Any:
    """The one part that settings name.

    Args:
        config: the settings.
        optional: whether they may name none; None then.

    Raises:
        ConfigError: they name several, or none where one is needed, or as `load_components`.
    """
    parts = load_components(config) or ([None] if optional else [])
    if len(parts) != 1:
        raise ConfigError(f"{config.setting}.kind: expected one name, found {config.kind!r}.")
    return parts[0]


def unknown_name_error(name: str, *groups: str) -> str:
    """A sentence about a name that is in none of the groups: the nearest one, what is installed, what to install."""
    installed = sorted(known for group in groups for known in available(group))
    close = sorted(
        get_close_matches(name, installed), key=lambda known: sorted(known) != sorted(name)
    )  # letters swapped
    hint = f"; did you mean {close[0]!r}?" if close else "."
    missing = [
        package
        for group in groups
        for package in KNOWN_PACKAGES.get(group, "").split()
        if not any(target.startswith(package.replace("-", "_")) for target in available(group).values())
    ]
    packages = " or ".join(missing) or "a package that registers it"
    return (
        f"{', '.join(groups)}: nothing is called {name!r}{hint} Installed: {', '.join(installed) or 'nothing'}. "
        f"Install {packages}, or give a dotted path such as 'my_package.module:name'."
    )


@functools.cache
def _installed(path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """All entry points on a search path; to read them takes tens of milliseconds."""
    return importlib.metadata.entry_points()


def _target(group: str, name: str) -> str:
    """`module:attribute` of a name."""
    target = name if ":" in name else available(group).get(name)
    if target is None and name.endswith(".py"):
        raise ConfigError(
            f"{group}: expected FILE.py:NAME, found {name!r}; say which function or class of it is meant."
        )
    if target is None:
        raise ConfigError(unknown_name_error(name, group))
    return target


def _imported(group: str, name: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    stands_for = "" if name == target else f" stands for {target!r}, which"
    found = None
    try:
        found = _of_file(module) if module.endswith(".py") else importlib.import_module(module)
        return attrgetter(attribute)(found)
    except (Exception, SystemExit) as error:  # any code runs at import: told in a sentence, with the place of it
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            raise  # this process was asked to end meanwhile
        raise ConfigError(
            f"{group}: {name!r}{stands_for} cannot be imported: {type(error).__name__}: {error}{raised_at(error)}."
            f"{_hint(error, found, attribute)}"
        ) from error


def _hint(error: BaseException, module: ModuleType | None, attribute: str) -> str:
    """What to do about a part that cannot be imported; empty where the error says it."""
    if module is not None:
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        close = get_close_matches(attribute, names, n=1)
        has = [known for known in names if getattr(vars(module)[known], "__module__", "") == module.__name__]
        return f" Did you mean {close[0]!r}?" if close else f" It has: {', '.join(has) or 'no function and no class'}."
    if isinstance(error, ModuleNotFoundError):
        return " Looked in the current directory, on PYTHONPATH and among what is installed."
    if isinstance(error, SystemExit):
        return " A module that holds a part must not end the program where it is imported."
    return f" Looked from {Path.cwd()}." if isinstance(error, FileNotFoundError) else ""


def _of_file(path: str) -> ModuleType:
    """The module in a file, which finds those beside it as a program does."""
    file = Path(path).expanduser().resolve()
    if str(file) not in sys.modules:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        spec = importlib.util.spec_from_file_location(str(file), file)
        assert spec is not None  # of any name that ends with .py
        assert spec.loader is not None
        module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[str(file)]
            raise
    return sys.modules[str(file)]
