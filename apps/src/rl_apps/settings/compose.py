"""Composition of the command line into a checked config.

Files and `key=value` are merged over a schema, which the components of the run complete.

Later layers win, in this order:

1. the selected presets (`algorithm=dapo`),
2. the app's own file, with the recipe that fits the model (`recipe=NAME`, one of its `recipes:`),
3. the user's file (`--config`),
4. `key=value` in Hydra's grammar.

The selected components decide the types of their settings: `allocation` selects the settings of engines and servers,
`launcher.kind` selects `launcher.options`. Each component brings its dataclass (`rl_contracts.registry.settings`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rl_apps.settings.model import EMBEDDED, MADE, PRETRAINED
from rl_apps.settings.synonyms import ASSIGNMENTS, RENAMED, SYNONYMS
from rl_contracts import registry
from rl_contracts.allocation import Allocation
from rl_contracts.config import Settings, field_docstrings
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.errors import ConfigError, did_you_mean
from rl_contracts.inference import ServerConfig
from rl_contracts.scheduler import SchedulerConfig
from rl_monitor.run_directory import flatten

CONF = Path(__file__).parents[1] / "conf"
"""Directory of the commands' default files and of the presets."""

SEAMS: dict[type, str] = {
    TrainEngineConfig: "rl.train_engines",
    ServerConfig: "rl.inference_engines",
    SchedulerConfig: "rl.schedulers",
}
"""Base type of a field, to the entry-point group of the components that define the actual type of the field."""

NAMED = ".NAME."
"""Part of a key in help that stands for the name that the user gives to a section, as in `evaluation.sets`."""

FILLED_IN = ("model.directories",)
"""Settings that the command fills in; users do not set them."""

LEARNER = "actor.engine"
"""Section whose values are the defaults for the engines of the other models of a run."""


def compose[T](schema: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> T:
    """Compose the config of a run. Each config class checks its own settings.

    Settings of a component apply only to that component. If a later layer selects another component, the settings of
    an earlier file for its component are dropped. The same holds for methods such as a loss or an optimizer: a setting
    in a preset or file is dropped if a later layer selects a method that does not read it (`Settings.reads`).

    Args:
        schema: dataclass with the settings and their defaults.
        files: YAML files merged over the schema, in this order; those in the `defaults:` of a file come before it.
        overrides: `key=value`, merged over the files.

    Raises:
        ConfigError: a component that is not installed, an unknown key, a value of the wrong type, or a value that the
            config rejects.
    """

    base: Any = schema()
    components: dict[str, str] = {}
    from_files = [layer for file in files for layer in _layers(file)]
    layers = from_files + [_override(text) for text in overrides]
    for layer in layers:
        if isinstance(names := layer.get("trackers"), ListConfig):
            layer.trackers = "+".join(map(str, names)) or "none"
    try:
        for layer in layers:
            _check_sections(layer, base)
        choices = _pop_presets(layers, base)
        _apply_recipe(layers, base)
        component_fields = dict(_component_fields(base))
        defaults = {"allocation": base.allocation, "launcher": {"kind": base.launcher.kind}}
        merged: Any = OmegaConf.merge(defaults, *layers)
        components = {path: _component_of(merged, path, base_type) for path, base_type in component_fields.items()}
        for path, base_type in component_fields.items():
            section, _, name = path.rpartition(".")
            for layer in layers:
                if _selects_another(layer, path, base_type, components[path]):
                    OmegaConf.select(layer, section, default={}).pop(name, None)
            if components[path]:
                setattr(attrgetter(section)(base), name, _settings(base_type, components[path])())
        presets = [_preset(section, name, files) for section, name in choices.items()]
        _drop_unread([*presets, *layers], len(presets + from_files), base)
        plain = OmegaConf.merge({}, *presets, *layers)
        for path, base_type in component_fields.items():
            if base_type is TrainEngineConfig and components[path] == components[LEARNER]:
                engine_settings = [OmegaConf.select(plain, key) or {} for key in (LEARNER, path)]
                OmegaConf.update(plain, path, OmegaConf.merge(*engine_settings), force_add=True)
        result = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(base), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, base, layers, components)) from error
    except ConfigError as error:  # a section knows its field names only: add the path of the section
        name = str(error).partition(":")[0].partition(" with ")[0]
        keys = [key for key in (text.partition("=")[0] for text in overrides) if key.endswith(f".{name}")]
        if len(keys) != 1:
            raise
        raise ConfigError(keys[0] + str(error).removeprefix(name)) from error
    assert isinstance(result, schema)
    return result


def to_yaml(config: Any) -> str:
    """Return a config object as YAML, which `compose` reads back."""

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_plain(config: Any) -> dict[str, Any]:
    """Return a config object as nested dicts of JSON's types."""
    return yaml.safe_load(to_yaml(config))  # type: ignore[no-any-return]


def describe(config: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (key, value, meaning) of every leaf setting, also in sections that are None."""
    rows: list[tuple[str, str, str]] = []
    for key, value, section, meaning in _settings_of(config, prefix):
        if not is_dataclass(value):
            rows.append((key, repr(value), meaning))
        if section is not None:
            rows += describe(section, f"{key}{NAMED if isinstance(value, dict) else '.'}")
    return rows


def _settings_of(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield key, value, section and meaning of each field of a config object; the section of a leaf is None."""
    docs, types = field_docstrings(type(config)), get_type_hints(type(config))
    for item in fields(config):
        value = section = getattr(config, item.name)
        if not is_dataclass(value):
            kinds: list[Any] = [kind for kind in get_args(types[item.name]) if is_dataclass(kind)]
            section = kinds[0]() if kinds else None
        yield prefix + item.name, value, section, docs.get(item.name, "")


def sections_of(config: Any, prefix: str = "") -> dict[str, str]:
    """Return the meaning of every section of a config object, nested ones included, by dotted key."""
    sections: dict[str, str] = {}
    for key, value, section, meaning in _settings_of(config, prefix):
        if section is not None:
            inner = NAMED if isinstance(value, dict) else "."
            sections |= {(key + inner).rstrip("."): meaning, **sections_of(section, f"{key}{inner}")}
    return sections


def _layers(file: Path) -> list[DictConfig]:
    """Return the layers of a settings file: the files and presets in its list `defaults:`, then the file itself."""

    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{file}: expected a YAML file with settings, found: {problem}. `--cfg job` prints an example."
        ) from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{file}: expected settings as `key: value`, found a list.")
    layers: list[DictConfig] = []
    names = content.pop("defaults", None) or ListConfig([])
    if not (isinstance(names, ListConfig) and all(isinstance(entry, str | DictConfig) for entry in names)):
        raise ConfigError(
            f"{file}: expected `defaults:` to be a list of files and of `section: preset`, found {names}."
        )
    for entry in names:
        if isinstance(entry, str):
            layers += [] if entry == "_self_" else _layers(file.parent / f"{entry.removesuffix('.yaml')}.yaml")
        else:  # in Hydra's files, `override /algorithm: dapo` means `algorithm: dapo`
            layers += [OmegaConf.create({str(k).removeprefix("override ").lstrip("/"): v}) for k, v in entry.items()]
    return [*layers, content]


def _override(text: str) -> DictConfig:
    """Parse `key=value` into a layer."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = text.partition("=")
    if key == "allocation" and value[:1] not in ("'", '"') and "(" in value:
        text = f"{key}='{value}'"  # quoted, because Hydra parses the parentheses of an expert layout differently
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise ConfigError(
            f"argument {text!r}: expected key=value, found: {str(error).splitlines()[0]}. Quote a value that contains "
            f"brackets, quotes or operators: \"{key.strip()}='...'\"."
        ) from error
    if parsed.is_delete() or parsed.is_sweep_override():
        several = (
            "join components with `+`" if key == "allocation" else f"if the setting takes a list, write {key}=[A,B]"
        )
        raise ConfigError(f"argument {text!r}: expected key=value with one value, found several; {several}.")
    layer = OmegaConf.create()
    OmegaConf.update(layer, parsed.key_or_group, parsed.value(), force_add=True)
    return layer


def _apply_recipe(layers: list[DictConfig], base: Any) -> None:
    """Merge the recipe of the run into the layers that offer it: the named one, or the one for the run's model."""
    recipes_by_layer = {id(layer): layer.pop("recipes") for layer in layers if "recipes" in layer}
    recipe_names = sorted({str(name) for recipes in recipes_by_layer.values() for name in recipes})
    if not recipe_names:
        return
    merged: Any = OmegaConf.merge({"recipe": base.recipe, "model": {"path": base.model.path}}, *layers)
    name = merged.recipe or (EMBEDDED if merged.model.path in MADE else PRETRAINED)
    if name not in recipe_names:
        raise ConfigError(
            f"recipe={name}: unknown recipe; there are {', '.join(recipe_names)}.{did_you_mean(name, recipe_names)}"
        )
    for layer in layers:
        if id(layer) in recipes_by_layer:
            layer.merge_with(recipes_by_layer[id(layer)].get(name, {}))
    layers.append(OmegaConf.create({"recipe": name}))


def _pop_presets(layers: list[DictConfig], base: Any) -> dict[str, str]:
    """Remove the names of presets from the layers and return them by section; later layers win.

    `launcher=NAME` is short for `launcher.kind=NAME`, and `trackers=[A,B]` for `trackers.kind=A+B`.
    """
    choices = {}
    for layer in layers:
        for key, value in list(layer.items()):
            if isinstance(value, str) and is_dataclass(getattr(base, str(key), None)):
                if key in ("launcher", "trackers"):
                    layer[key] = {"kind": value}
                else:
                    choices[str(key)] = layer.pop(key)
    return choices


def _check_sections(layer: DictConfig, config: Any, prefix: str = "") -> None:
    """Reject a value in place of a section, except the name of a preset."""
    for key, value in layer.items():
        name, section = prefix + str(key), getattr(config, str(key), None)
        if isinstance(value, DictConfig) and is_dataclass(section):
            _check_sections(value, section, f"{name}.")
        elif _has_named_sections(config, str(key)):
            entries = value.values() if isinstance(value, DictConfig) else [value]
            if not all(isinstance(entry, DictConfig) for entry in entries):
                setting = f"{name}{NAMED}SETTING=VALUE"
                raise ConfigError(
                    f"{name}={value}: expected settings with a name, {setting}. `--help {name}` lists them."
                )
        elif value is not None and is_dataclass(section) and (prefix or not isinstance(value, str)):
            raise ConfigError(_section_error(name, value))


def _has_named_sections(config: Any, key: str) -> bool:
    """Return whether a setting holds sections by name, as `evaluation.sets` does."""
    kinds = get_args(get_type_hints(type(config)).get(key)) if isinstance(getattr(config, key, None), dict) else ()
    return any(map(is_dataclass, kinds))


def _section_error(key: str, value: Any) -> str:
    """Return the message for a section that was set to a value."""
    return (
        f"{key}={value}: {key} is a section; expected the settings in it, {key}.NAME=VALUE. `--help {key}` lists them."
    )


def _preset(section: str, name: str, files: Sequence[Path]) -> DictConfig:
    """Return the settings of a preset: `<section>/<name>.yaml` beside one of the files, or a preset of this package."""

    folders = [folder / section for folder in (*(file.parent for file in files), CONF)]
    presets = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if not presets:
        raise ConfigError(_section_error(section, name))
    if name not in presets:
        names = ", ".join(sorted(presets))
        raise ConfigError(f"{section}={name}: unknown preset; there are {names}.{did_you_mean(name, presets)}")
    return OmegaConf.create({section: OmegaConf.load(presets[name])})


def _component_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield dotted key and base type of each field that takes its type from a component of the run."""
    for item in fields(config):
        value = getattr(config, item.name)
        kinds = [kind for kind in SEAMS if isinstance(value, kind)]
        if kinds:
            yield prefix + item.name, kinds[0]
        elif is_dataclass(value):
            yield from _component_fields(value, f"{prefix}{item.name}.")


def _component_of(config: DictConfig, path: str, base_type: type) -> str:
    """Return the name of the component that a field configures, or "" if there is none.

    The component with the name of the field's section is preferred; otherwise, the first one of its kind is used.
    """
    if base_type is SchedulerConfig:
        return str(config.launcher.kind)
    allocation = Allocation.parse(config.allocation)
    components = allocation.train if base_type is TrainEngineConfig else allocation.inference
    named = [c for c in components if c.name == path.split(".")[0]]
    return next((c.backend for c in (*named, *components)), "")


def _selects_another(layer: DictConfig, path: str, base_type: type, chosen: str) -> bool:
    """Return whether a layer selects a component for a field, and this component differs from the final choice."""

    try:
        return _component_of(layer, path, base_type) != chosen
    except ConfigError:  # the layer selects components that are not installed here
        return True
    except OmegaConfBaseException:  # the layer selects no component
        return False


def _drop_unread(layers: list[DictConfig], files: int, base: Any) -> None:
    """Remove settings of presets and files that the method selected by a later layer does not read.

    Args:
        layers: presets and files, followed by the layers of the command line.
        files: number of presets and files.
        base: config whose sections name the settings that each method reads.
    """
    for section, settings in _sections_with_selectors(base):
        for selector in settings.reads:
            selected: list[Any] = [OmegaConf.select(layer, f"{section}.{selector}") for layer in layers]
            last = max((number for number, value in enumerate(selected) if isinstance(value, str)), default=0)
            for layer in layers[: min(last, files)]:
                section_settings = OmegaConf.select(layer, section) or {}
                for name in settings.unread(selector, selected[last]) & section_settings.keys():
                    del section_settings[name]


def _sections_with_selectors(config: Any, prefix: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Yield dotted key and class of each section in which one setting selects which others are read."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            if getattr(value, "reads", None):
                yield prefix + item.name, type(value)  # type: ignore[misc]  # only `Settings` have `reads`
            yield from _sections_with_selectors(value, f"{prefix}{item.name}.")


def _settings(base_type: type, component: str) -> type:
    settings_class = registry.settings(SEAMS[base_type], component)
    if not issubclass(settings_class, base_type):
        raise ConfigError(
            f"{component}: expected settings derived from {base_type.__name__}, found {settings_class.__name__}."
        )
    return settings_class


_WRONG_TYPE = re.compile(r"Value ('.*') (?:of type .* could not be converted to|is not a valid) (Integer|Float|bool)")
_TYPE_NAMES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def _explain(error: Any, config: Any, layers: Sequence[DictConfig], components: dict[str, str]) -> str:
    """Return a message for settings that do not fit: the key, the problem, and the nearest valid key.

    If another component has the setting, the message names that component.
    """

    key, first = error.full_key or "", str(error).strip().splitlines()[0]
    values = {name: value for name, value, _ in describe(config)}
    if "is not a subclass of" in first:
        return _section_error(key, first.rpartition("value: ")[2])
    if not isinstance(error, ConfigKeyError):
        more = f" `--help {key}` shows its type and default." if key in values else ""
        if wrong := _WRONG_TYPE.match(first):
            first = f"expected {_TYPE_NAMES[wrong[2]]}, found {wrong[1]}"
        elif first.startswith("Cannot convert 'ListConfig' to string: "):
            first = f"expected a text, found the list {first.partition(': ')[2].strip(chr(39))}"
        elif "is not a ListConfig" in first:
            first = f"expected a list, {key}=[ONE,...]"
        return f"{key}: {first.rstrip('.')}.{more}" if key else first
    # the whole key of the setting, not only its section
    names = (name for layer in layers for name in flatten(OmegaConf.to_container(layer)))
    key = next((name for name in names if name.startswith(f"{key}.")), key)
    for path, base_type in _component_fields(config):
        if not (components.get(path) and key.startswith(f"{path}.")):
            continue
        name = key.removeprefix(f"{path}.").split(".")[0]
        if (supporting := _components_with(name, base_type)) and components[path] not in supporting:
            chosen = "launcher" if base_type is SchedulerConfig else "allocation"
            return (
                f"{key}: {components[path]!r}, which {chosen} selects, has no setting {name}. "
                f"Select {' or '.join(supporting)} there, or remove {key}."
            )
    return f"unknown setting {key!r}.{_hint(key, values)} `--help all` lists all settings."


def _hint(key: str, values: Mapping[str, Any]) -> str:
    """Return a suggestion for an unknown setting.

    For a renamed setting, the suggestion is its new name; otherwise, a similar setting of the same section. If there is
    none, the suggestion is a setting of the same name in another section, followed by the names in this section.
    """
    new_name = RENAMED.get(key, "")
    if {new_name, new_name.rpartition(".")[0]} & values.keys():  # a setting, or an entry of a setting such as `options`
        return f" It was renamed to {new_name!r}."
    named = {name.partition(NAMED)[0] for name in values if NAMED in name}
    for parent in (parent for parent in named if key.startswith(f"{parent}.")):
        key = parent + re.sub(r"\.[^.]*", NAMED.rstrip("."), key.removeprefix(parent), count=1)
    section, _, leaf = key.rpartition(".")
    if leaf in ASSIGNMENTS:
        return f" Use {ASSIGNMENTS[leaf]}."
    if (synonym := SYNONYMS.get(key.removeprefix("actor_rollout_ref."))) in values:
        return f" Did you mean {synonym!r}?"
    while section and not any(candidate.startswith(f"{section}.") for candidate in values):
        section = section.rpartition(".")[0]
    suggested = _same_meaning(leaf, values)
    if not section:
        return f" Did you mean {suggested[0]!r}?" if suggested else did_you_mean(key, values, 0.5)
    section_keys = {k.removeprefix(f"{section}."): k for k in values if k.startswith(f"{section}.")}
    near = [candidate for candidate in suggested if candidate in section_keys.values()]
    near += [
        section_keys[name] for name in get_close_matches(key.removeprefix(f"{section}."), section_keys, n=1, cutoff=0.6)
    ]
    if near:
        return f" Did you mean {near[0]!r}?"
    names = ", ".join(dict.fromkeys(name.partition(".")[0] for name in section_keys))
    return (f" Did you mean {suggested[0]!r}?" if suggested else "") + f" {section} has {names}."


def _same_meaning(leaf: str, values: Mapping[str, Any]) -> list[str]:
    """Return the settings that the last part of a name probably means."""
    same_leaf = [candidate for candidate in values if candidate.rsplit(".", 1)[-1] == leaf]
    similar_synonyms = [SYNONYMS[name] for name in get_close_matches(leaf, SYNONYMS, n=1, cutoff=0.9)]
    return [name for name in (SYNONYMS.get(leaf, ""), *same_leaf, *similar_synonyms) if name in values]


def nearest_setting(name: str, config: Any) -> str:
    """Return the setting that a name without a section probably means, or an assignment to it, or ""."""
    values = {key: value for key, value, _ in describe(config)}
    similar = get_close_matches(name, values, n=1)
    return ASSIGNMENTS.get(name) or next(iter([*_same_meaning(name, values), *similar]), "")


def _components_with(name: str, base_type: type) -> list[str]:
    """Return the installed components of a kind that have a setting of this name."""
    names = []
    for component in sorted(registry.available(SEAMS[base_type])):
        with suppress(ConfigError):  # it cannot be imported here
            names += [component] if name in {item.name for item in fields(_settings(base_type, component))} else []
    return names
