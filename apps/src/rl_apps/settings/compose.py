"""From the command line to a checked config: files and `key=value`, laid over a schema that the run's parts complete.
And what `--help` says of it: every setting with its default and its meaning, the docstring under its field.

Later layers win: the presets that are chosen (`algorithm=dapo`), the app's own file with the recipe that goes with the
model (`recipe=NAME`, one of its `recipes:`), one's own file (`--config`), and `key=value` in Hydra's grammar. What is
named decides the type of its settings: `allocation` that of the engines and the servers, `launcher.kind` that of
`launcher.options`; each part brings its dataclass (`rl_contracts.registry.settings`).
"""

from __future__ import annotations

import re
import textwrap
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
from rl_apps.settings.synonyms import RENAMED, SYNONYMS
from rl_contracts import registry
from rl_contracts.allocation import Allocation
from rl_contracts.config import Settings, field_docstrings
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.errors import ConfigError, did_you_mean
from rl_contracts.inference import ServerConfig
from rl_contracts.scheduler import SchedulerConfig

CONF = Path(__file__).parents[1] / "conf"
"""The commands' own files, and the presets."""

SEAMS: dict[type, str] = {
    TrainEngineConfig: "rl.train_engines",
    ServerConfig: "rl.inference_engines",
    SchedulerConfig: "rl.schedulers",
}
"""A field of such a type takes the type of the part that the run names. With the group in which the parts are found."""

FILLED_IN = ("model.directories",)
"""Settings that the command says itself."""

LEARNER = "actor.engine"
"""The settings that the engines of a run's other models have, where they say nothing else."""


def compose[T](schema: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> T:
    """A config of the run, whose own checks have passed.

    Settings of a part go with the part: a file that names its allocation (or launcher) and is overruled there loses
    what it says about the part that went. So does a setting of a loss, an optimizer or another method in a preset or a
    file, where a later layer selects a method that does not read it (`Settings.reads`).

    Args:
        schema: dataclass with the settings and their defaults.
        files: laid over them, in this order; each with those that its `defaults:` name below it.
        overrides: `key=value`, laid over the files.

    Raises:
        ConfigError: a part that is not installed, an unknown key, a value of the wrong type, or one that its config
            refuses.
    """

    base: Any = schema()
    parts: dict[str, str] = {}
    from_files = [layer for file in files for layer in _layers(file)]
    layers = from_files + [_override(text) for text in overrides]
    for layer in layers:
        if isinstance(names := layer.get("trackers"), ListConfig):
            layer.trackers = "+".join(map(str, names)) or "none"
    try:
        for layer in layers:
            _check_sections(layer, base)
        _take_recipe(layers, base)
        choices = _take_choices(layers, base)
        seams = dict(_seams(base))
        unsaid = {"allocation": base.allocation, "launcher": {"kind": base.launcher.kind}}
        merged: Any = OmegaConf.merge(unsaid, *layers)
        parts = {path: _component_of(merged, path, seam) for path, seam in seams.items()}
        for path, seam in seams.items():
            section, _, name = path.rpartition(".")
            for layer in layers:
                if _warn_overridden(layer, path, seam, parts[path]):
                    OmegaConf.select(layer, section, default={}).pop(name, None)
            if parts[path]:
                setattr(attrgetter(section)(base), name, _settings(seam, parts[path])())
        presets = [_preset(section, name, files) for section, name in choices.items()]
        _drop_unread([*presets, *layers], len(presets + from_files), base)
        plain = OmegaConf.merge({}, *presets, *layers)
        for path, seam in seams.items():
            if seam is TrainEngineConfig and parts[path] == parts[LEARNER]:
                both = [OmegaConf.select(plain, key) or {} for key in (LEARNER, path)]
                OmegaConf.update(plain, path, OmegaConf.merge(*both), force_add=True)
        result = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(base), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, base, overrides, parts)) from error
    except ConfigError as error:  # of one section, which does not know where it stands
        name = str(error).partition(":")[0].partition(" with ")[0]
        merged = [key for key in (text.partition("=")[0] for text in overrides) if key.endswith(f".{name}")]
        if len(merged) != 1:
            raise
        raise ConfigError(merged[0] + str(error).removeprefix(name)) from error
    assert isinstance(result, schema)
    return result


def to_yaml(config: Any) -> str:
    """A config object as YAML, which `compose` reads back."""

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_plain(config: Any) -> dict[str, Any]:
    """A config object as nested dicts of JSON's types."""
    return yaml.safe_load(to_yaml(config))  # type: ignore[no-any-return]


def describe(config: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, value, meaning) of every leaf setting of a config object, of sections that are left out (None) too."""
    rows: list[tuple[str, str, str]] = []
    for key, value, section, meaning in _settings_of(config, prefix):
        if not is_dataclass(value):
            rows.append((key, repr(value), meaning))
        if section is not None:
            rows += describe(section, f"{key}.")
    return rows


def _settings_of(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Key, value, what is set below it (None: it is a leaf) and meaning of each field of a config object."""
    docs, types = field_docstrings(type(config)), get_type_hints(type(config))
    for item in fields(config):
        value = section = getattr(config, item.name)
        if not is_dataclass(value):
            kinds: list[Any] = [kind for kind in get_args(types[item.name]) if is_dataclass(kind)]
            section = kinds[0]() if kinds else None
        yield prefix + item.name, value, section, docs.get(item.name, "")


def _sections(config: Any, prefix: str = "") -> dict[str, str]:
    """The sections of a config object and those inside of them, each with its meaning."""
    found: dict[str, str] = {}
    for key, _, section, meaning in _settings_of(config, prefix):
        if section is not None:
            found |= {key: meaning, **_sections(section, f"{key}.")}
    return found


EVERYTHING = "all"
"""What `--help` shows every setting for."""

FLAGS = f"""Flags:
  --config FILE.yaml  read settings from a file; key=value on the command line overrides it
  --dry-run           check the settings and print what would run, without starting it
  --cfg job           print the settings as YAML
  --help SECTION      list the settings of a section, such as rollout or rollout.server; {EVERYTHING} lists every one"""


def render_help(title: str, config: Any, topic: str = "", refused: Sequence[str] = (), width: int = 120) -> str:
    """The help text.

    Args:
        topic: a section, a setting or `all`; empty: the settings in no section, and which sections there are.
        refused: settings that the command never takes.

    Raises:
        ConfigError: there is no such section or setting.
    """
    hidden, sections = (*refused, *FILLED_IN), _sections(config)
    rows = [row for row in describe(config) if row[0] not in hidden]
    if topic in ("", EVERYTHING):
        lines = [
            title,
            "",
            FLAGS,
            "",
            "Settings, given as key=value (for example total_steps=20 actor.optimizer.lr=1e-4):",
        ]
        shown = [row for row in rows if topic or "." not in row[0]]
    else:
        lines = [f"{topic}: {sections[topic]}" if topic in sections else title]
        shown = [row for row in rows if f"{row[0]}.".startswith(f"{topic}.")]
    if not shown:
        hint = did_you_mean(topic, [*sections, *(key for key, _, _ in rows)], 0.5)
        top = ", ".join(key for key in sections if "." not in key)
        raise ConfigError(f"--help {topic}: no such section or setting.{hint} Sections: {top}.")
    by_section: dict[str, list[tuple[str, str, str]]] = {}
    for row in shown:
        by_section.setdefault(row[0].rpartition(".")[0], []).append(row)
    for section, inside in by_section.items():
        lines += ["", f"{section}: {sections[section]}"] if section not in ("", topic) else [""]
        for key, value, meaning in inside:
            lines.append(f"  {key}={value}")
            lines += textwrap.wrap(meaning, width, initial_indent="      ", subsequent_indent="      ")
    if not topic:
        lines += ["", "Sections and their number of settings (--help SECTION):", ""]
        for key in [key for key in sections if "." not in key]:
            count = sum(row[0].startswith(f"{key}.") for row in rows)
            about = f"  {key:<12}{count:>4}  "
            lines += textwrap.wrap(
                about + sections[key], width, subsequent_indent=" " * len(about), drop_whitespace=True
            )
    return "\n".join(lines)


def _layers(file: Path) -> list[DictConfig]:
    """A file of settings, behind those that its list `defaults:` names: other files beside it, or presets."""

    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{file}: expected a YAML file with settings, found: {found}. `--cfg job` prints one to begin with."
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
        else:  # Hydra's files say `override /algorithm: dapo` where they mean `algorithm: dapo`
            layers += [OmegaConf.create({str(k).removeprefix("override ").lstrip("/"): v}) for k, v in entry.items()]
    return [*layers, content]


def _override(text: str) -> DictConfig:
    """What `key=value` says."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = text.partition("=")
    if key == "allocation" and value[:1] not in ("'", '"') and "(" in value:
        text = f"{key}='{value}'"  # brackets, as the layout of experts has them, mean something else to Hydra
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise ConfigError(
            f"argument {text!r}: expected key=value, found: {str(error).splitlines()[0]}. A value with brackets, "
            f"quotes or signs in it stands in quotes of its own: \"{key.strip()}='...'\"."
        ) from error
    if parsed.is_delete() or parsed.is_sweep_override():
        several = "`+` joins its parts" if key == "allocation" else f"{key}=[A,B] is a list"
        raise ConfigError(
            f"argument {text!r}: expected key=value with one value; a comma stands between several ({several})."
        )
    layer = OmegaConf.create()
    OmegaConf.update(layer, parsed.key_or_group, parsed.value(), force_add=True)
    return layer


def _take_recipe(layers: list[DictConfig], base: Any) -> None:
    """Merges the chosen recipe into the layers that have it: the one that is named, or the one for the run's model."""
    offered = {id(layer): layer.pop("recipes") for layer in layers if "recipes" in layer}
    known = sorted({str(name) for recipes in offered.values() for name in recipes})
    if not known:
        return
    merged: Any = OmegaConf.merge({"recipe": base.recipe, "model": {"path": base.model.path}}, *layers)
    name = merged.recipe or (EMBEDDED if merged.model.path in MADE else PRETRAINED)
    if name not in known:
        raise ConfigError(f"recipe={name}: unknown recipe; there are {', '.join(known)}.{did_you_mean(name, known)}")
    for layer in layers:
        if id(layer) in offered:
            layer.merge_with(offered[id(layer)].get(name, {}))
    layers.append(OmegaConf.create({"recipe": name}))


def _take_choices(layers: list[DictConfig], base: Any) -> dict[str, str]:
    """Takes the presets that are chosen out of the layers: where a name stands for a whole section, the last counts.

    `launcher=NAME` is short for `launcher.kind=NAME`, and so is `trackers=[NAME,NAME]`.
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
    """Refuse a value where a section is meant, but for the name of a preset."""
    for key, value in layer.items():
        name, section = prefix + str(key), getattr(config, str(key), None)
        if isinstance(value, DictConfig) and is_dataclass(section):
            _check_sections(value, section, f"{name}.")
        elif value is not None and is_dataclass(section) and (prefix or not isinstance(value, str)):
            raise ConfigError(_of_section(name, value))


def _of_section(key: str, found: Any) -> str:
    """A sentence about a section that was given a value."""
    return (
        f"{key}={found}: {key} is a section; expected the settings in it, {key}.NAME=VALUE. `--help {key}` lists them."
    )


def _preset(section: str, name: str, files: Sequence[Path]) -> DictConfig:
    """The settings of a preset: `<section>/<name>.yaml` beside one of the files, or ours."""

    folders = [folder / section for folder in (*(file.parent for file in files), CONF)]
    found = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if not found:
        raise ConfigError(_of_section(section, name))
    if name not in found:
        there = ", ".join(sorted(found))
        raise ConfigError(f"{section}={name}: unknown preset; there are {there}.{did_you_mean(name, found)}")
    return OmegaConf.create({section: OmegaConf.load(found[name])})


def _seams(config: Any, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The fields that take their type from a part of the run: dotted key, and which kind of part."""
    for item in fields(config):
        value = getattr(config, item.name)
        kinds = [kind for kind in SEAMS if isinstance(value, kind)]
        if kinds:
            yield prefix + item.name, kinds[0]
        elif is_dataclass(value):
            yield from _seams(value, f"{prefix}{item.name}.")


def _component_of(config: DictConfig, path: str, seam: type) -> str:
    """Name of the part to which a field belongs: the component of its section, or the first of its kind; "" if none."""
    if seam is SchedulerConfig:
        return str(config.launcher.kind)
    allocation = Allocation.parse(config.allocation)
    components = allocation.train if seam is TrainEngineConfig else allocation.inference
    named = [c for c in components if c.name == path.split(".")[0]]
    return next((c.backend for c in (*named, *components)), "")


def _warn_overridden(layer: DictConfig, path: str, seam: type, chosen: str) -> bool:
    """Whether a layer itself names another part for a field than the one that was chosen in the end."""

    try:
        return _component_of(layer, path, seam) != chosen
    except ConfigError:  # it was for parts that are not installed here
        return True
    except OmegaConfBaseException:  # it names none
        return False


def _drop_unread(layers: list[DictConfig], files: int, base: Any) -> None:
    """Take out of presets and files, which are the first layers, what a method that a later layer selects does not
    read."""
    for section, settings in _sections_with_selectors(base):
        for selector in settings.reads:
            selected: list[Any] = [OmegaConf.select(layer, f"{section}.{selector}") for layer in layers]
            last = max((number for number, value in enumerate(selected) if isinstance(value, str)), default=0)
            for layer in layers[: min(last, files)]:
                given = OmegaConf.select(layer, section) or {}
                for name in settings.unread(selector, selected[last]) & given.keys():
                    del given[name]


def _sections_with_selectors(config: Any, prefix: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """The sections in which a setting selects what others are read: dotted key, and class."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            if getattr(value, "reads", None):
                yield prefix + item.name, type(value)  # type: ignore[misc]  # only `Settings` have `reads`
            yield from _sections_with_selectors(value, f"{prefix}{item.name}.")


def _settings(seam: type, part: str) -> type:
    own = registry.settings(SEAMS[seam], part)
    if not issubclass(own, seam):
        raise ConfigError(f"{part}: expected settings derived from {seam.__name__}, found {own.__name__}.")
    return own


_OF_ANOTHER_TYPE = re.compile(
    r"Value ('.*') (?:of type .* could not be converted to|is not a valid) (Integer|Float|bool)"
)
_IN_WORDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def _explain(error: Any, config: Any, overrides: Sequence[str], parts: dict[str, str]) -> str:
    """One sentence about settings that do not fit: the key, what was wrong, and the nearest valid key, or the part that
    has it where the one that was chosen has not."""

    key, first = error.full_key or "", str(error).strip().splitlines()[0]
    values = {known: value for known, value, _ in describe(config)}
    if not isinstance(error, ConfigKeyError):
        more = f" `--help {key}` says what it takes, and its default." if key in values else ""
        if wrong := _OF_ANOTHER_TYPE.match(first):
            first = f"expected {_IN_WORDS[wrong[2]]}, found {wrong[1]}"
        elif "is not a ListConfig" in first:
            first = f"expected a list, {key}=[ONE,...]"
        return f"{key}: {first.rstrip('.')}.{more}" if key else first
    key = next((text.split("=")[0] for text in overrides if text.startswith(f"{key}.")), key)  # not only its section
    for path, seam in _seams(config):
        if not (parts.get(path) and key.startswith(f"{path}.")):
            continue
        name = key.removeprefix(f"{path}.").split(".")[0]
        if (others := _components_with(name, seam)) and parts[path] not in others:
            chosen = "launcher" if seam is SchedulerConfig else "allocation"
            return (
                f"{key} does not go with {parts[path]!r}, which the {chosen} names: it has no {name}. "
                f"Choose {' or '.join(others)} there, or leave {key} out."
            )
    return f"unknown setting {key!r}.{_hint(key, values)} `--help all` lists all settings."


def _hint(key: str, values: Mapping[str, Any]) -> str:
    """Return a suggestion for an unknown setting: its new name, one of the same section, or one of another section with
    what the section has."""
    if RENAMED.get(key) in values:
        return f" It is {RENAMED[key]!r} now."
    place, _, leaf = key.rpartition(".")
    while place and not any(known.startswith(f"{place}.") for known in values):
        place = place.rpartition(".")[0]
    same_leaf = [known for known in values if known.rsplit(".", 1)[-1] == leaf]
    like_theirs = [SYNONYMS[name] for name in get_close_matches(leaf, SYNONYMS, n=1, cutoff=0.9)]
    meant = [name for name in (SYNONYMS.get(leaf), *same_leaf, *like_theirs) if name in values]
    if not place:
        return f" Did you mean {meant[0]!r}?" if meant else did_you_mean(key, values, 0.5)
    inside = {known.removeprefix(f"{place}."): known for known in values if known.startswith(f"{place}.")}
    near = [known for known in meant if known in inside.values()]
    near += [inside[name] for name in get_close_matches(key.removeprefix(f"{place}."), inside, n=1, cutoff=0.6)]
    if near:
        return f" Did you mean {near[0]!r}?"
    has = ", ".join(dict.fromkeys(name.partition(".")[0] for name in inside))
    return (f" Did you mean {meant[0]!r}?" if meant else "") + f" {place} has {has}."


def _components_with(name: str, seam: type) -> list[str]:
    """The installed parts of a kind that have a setting of this name."""
    found = []
    for part in sorted(registry.available(SEAMS[seam])):
        with suppress(ConfigError):  # one that cannot be imported here
            found += [part] if name in {item.name for item in fields(_settings(seam, part))} else []
    return found
