"""Registry of components, which are selected by entry point, dotted path or file, not by a table in the code.

A component with settings has a dataclass for them: the settings of a class `Engine` are `EngineConfig`, in the module
that the entry point names.
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

__all__ = ["available", "load", "load_component", "load_components", "require_installed", "settings"]

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
"""Packages of this project that provide each entry-point group, separated by spaces.

Third-party packages can add names to any group.
"""


def available(group: str) -> dict[str, str]:
    """Return the names installed in an entry-point group, each with its `module:attribute`."""
    return {e.name: e.value for e in _installed(tuple(sys.path)).select(group=group)}


def load(group: str, name: str) -> Any:
    """Import and return the object that `name` refers to in an entry-point group.

    Args:
        group: entry-point group, for example `"rl.rewards"`.
        name: a name installed in the group, a dotted path `package.module:attribute`, or a file `my/file.py:attribute`.

    Raises:
        ConfigError: the name is not installed, or it cannot be imported.
    """
    return _import_object(group, name, _target(group, name))


def settings(group: str, name: str) -> type:
    """Return the settings dataclass of the class that `name` refers to: `module:EngineConfig` for `module:Engine`.

    This imports the module. The module should import heavy libraries only inside the functions that use them.

    Raises:
        ConfigError: the name is not installed, or it has no such dataclass.
    """
    target = f"{_target(group, name)}Config"
    settings_class = _import_object(group, name, target)
    if not (isinstance(settings_class, type) and is_dataclass(settings_class)):
        raise ConfigError(f"{group}: {target!r} must be the settings dataclass of {name!r}; found {settings_class!r}.")
    return settings_class


def require_installed(config: ComponentConfig) -> None:
    """Require that the names of the components exist. This imports nothing.

    Raises:
        ConfigError: a name is neither installed nor a dotted path.
    """
    for kind in _kinds(config):
        _target(config.group, kind)


def load_components(config: ComponentConfig) -> list[Any]:
    """Return the components that the settings select, with their options bound; empty for `kind=none`.

    Several names may be joined with `+`. A component is a function whose options are keyword-only arguments, or a class
    with such constructor arguments and callable instances.

    Raises:
        ConfigError: a name is not installed, no selected component has a keyword argument for an option, or a required
            option is missing.
    """
    constants, components, accepted = config.constants(), [], set[str]()
    for kind in _kinds(config):
        factory = load(config.group, kind)
        parameters = {n: p for n, p in inspect.signature(factory).parameters.items() if p.kind is p.KEYWORD_ONLY}
        missing = sorted(n for n, p in parameters.items() if p.default is p.empty and n not in constants)
        if missing:
            raise ConfigError(
                f"{config.setting}.kind={kind} requires the options {missing}; set them with "
                f"{config.setting}.options.<name>=<value>."
            )
        bound = {n: constants[n] for n in parameters if n in constants}
        components.append(factory(**bound) if inspect.isclass(factory) else partial(factory, **bound))
        accepted |= set(parameters)
    unknown = sorted(name for name, value in config.options.items() if value is not None and name not in accepted)
    if unknown:
        raise ConfigError(
            f"{config.setting}.options: expected options of {config.setting}.kind={config.kind} "
            f"({', '.join(sorted(accepted)) or 'it has none'}), found {', '.join(unknown)}. Remove an option of "
            f"another kind with {config.setting}.options.<name>=null."
        )
    return components


def _kinds(config: ComponentConfig) -> list[str]:
    """Return the names that the settings select."""
    return config.kind.split("+") if config.kind != "none" else []


def load_component(config: ComponentConfig, optional: bool = False) -> Any:
    """Return the single component that the settings select.

    Args:
        config: the settings.
        optional: whether `kind=none` is allowed; the result is then None.

    Raises:
        ConfigError: the settings select several components, or none although one is required; also the errors of
            `load_components`.
    """
    components = load_components(config) or ([None] if optional else [])
    if len(components) != 1:
        raise ConfigError(f"{config.setting}.kind: expected one name, found {config.kind!r}.")
    return components[0]


def unknown_name_error(name: str, *groups: str) -> str:
    """Return an error message for an unknown name: the most similar name, the installed names, and the remedy."""
    installed = sorted(entry for group in groups for entry in available(group))
    # names with the same letters in another order come first
    close = sorted(get_close_matches(name, installed), key=lambda entry: sorted(entry) != sorted(name))
    hint = f"; did you mean {close[0]!r}?" if close else "."
    missing = [
        package
        for group in groups
        for package in KNOWN_PACKAGES.get(group, "").split()
        if not any(target.startswith(package.replace("-", "_")) for target in available(group).values())
    ]
    packages = " or ".join(missing) or "a package that registers it"
    return (
        f"{', '.join(groups)}: unknown name {name!r}{hint} Installed: {', '.join(installed) or 'nothing'}. "
        f"Install {packages}, or use a dotted path such as 'my_package.module:name'."
    )


@functools.cache
def _installed(path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """Return all entry points on a search path. Cached, because reading them takes tens of milliseconds."""
    return importlib.metadata.entry_points()


def _target(group: str, name: str) -> str:
    """Return the `module:attribute` that a name refers to."""
    target = name if ":" in name else available(group).get(name)
    if target is None and name.endswith(".py"):
        raise ConfigError(f"{group}: expected FILE.py:NAME, found {name!r}; add the name of a function or class.")
    if target is None:
        raise ConfigError(unknown_name_error(name, group))
    return target


def _import_object(group: str, name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    meaning = "" if name == target else f" refers to {target!r}, which"
    module = None
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        return attrgetter(attribute)(module)
    except (Exception, SystemExit) as error:  # an import runs arbitrary code, which can raise anything
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            raise  # this process received SIGTERM during the import
        raise ConfigError(
            f"{group}: {name!r}{meaning} cannot be imported: {type(error).__name__}: {error}{raised_at(error)}."
            f"{_hint(error, module, attribute)}"
        ) from error


def _hint(error: BaseException, module: ModuleType | None, attribute: str) -> str:
    """Return advice about a component that cannot be imported, or "" if the error is sufficient."""
    if module is not None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        close = get_close_matches(attribute, names, n=1)
        defined = [name for name in names if getattr(vars(module)[name], "__module__", "") == module.__name__]
        return f" Did you mean {close[0]!r}?" if close else f" It defines: {', '.join(defined) or 'nothing callable'}."
    if isinstance(error, ModuleNotFoundError):
        return " Searched the current directory, PYTHONPATH and the installed packages."
    if isinstance(error, SystemExit):
        return " A module with a component must not exit the program during its import."
    return f" Relative paths start in {Path.cwd()}." if isinstance(error, FileNotFoundError) else ""


def _load_file(path: str) -> ModuleType:
    """Import the module in a file. The directory of the file is added to `sys.path`, as for a program."""
    file = Path(path).expanduser().resolve()
    if str(file) not in sys.modules:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        spec = importlib.util.spec_from_file_location(str(file), file)
        assert spec is not None  # true for every name that ends with .py
        assert spec.loader is not None
        module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[str(file)]
            raise
    return sys.modules[str(file)]
