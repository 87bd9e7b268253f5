"""Write the generated pages of docs/: settings from dataclasses, commands from parsers, tutorials from programs.

`guarantees.py` generates the page of guarantees from test markers.

    uv run python infra/docs/reference.py

`tests/docs/test_docs_site.py` fails if a page differs from the output of this script.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from guarantees import guarantees_page

from rl_apps.cli.help import FLAGS, FREQUENT, split_sentences
from rl_apps.run.app import App
from rl_apps.settings.compose import FILLED_IN, describe
from rl_contracts import registry

ROOT = Path(__file__).parents[2]
COMMAND = "uv run python infra/docs/reference.py"
APPS = {
    "grpo": ("grpo", "gsm8k-grpo", "multi-turn-math", "math-agent", "clevr-count-grpo", "geometry3k-grpo"),
    "sft": ("sft", "gsm8k-sft", "clevr-count-sft"),
    "dpo": ("hh-rlhf-dpo",),
    "rm": ("hh-rlhf-rm",),
}
"""Commands that have the same settings, with different defaults."""
COMPONENTS = {
    "actor.engine": "rl.train_engines",
    "rollout.server": "rl.inference_engines",
    "launcher.options": "rl.schedulers",
}
"""Sections whose settings depend on the selected component, each with the entry point group of its components."""
CELL_WORDS = 25
"""Maximum number of words in a table cell."""


# ---- settings


def settings_page() -> str:
    """Return docs/settings.md: every setting of every command."""
    apps: dict[str, App] = {name: registry.load("rl.apps", name) for names in APPS.values() for name in names}
    kinds = {kind: _settings(apps[names[0]].schema()) for kind, names in APPS.items()}
    merged = {key: row for kind in reversed(kinds.values()) for key, row in kind.items()}
    ordered = [key for kind in kinds.values() for key in kind]
    parts = [
        "# Settings",
        "Most runs change only these settings. Each name links to the setting in the full tables below.",
        _frequent_table(merged),
        "Set a value with `key=value` on the command line, for example `rollout.group_size=8`, or in a YAML file.\n"
        "The tables list all settings with their defaults. Where a table shortens a text, *more* leads to the full\n"
        "text below it.",
        "- `--help SECTION` of a command prints the same texts, and `--cfg job` the values that a command would use.\n"
        "- [Values of the commands](#values-of-the-commands) lists the defaults that a command changes.\n"
        "- Each setting has an address: `settings.html#setting-rollout-group_size`, with `-` in place of dots.",
        "A setting exists in all commands if the table has no entry under *apps*. Otherwise *apps* names the commands: "
        + "; ".join(f"*{kind}* is {_listed(names)}" for kind, names in APPS.items())
        + ". Your own app has the settings of the class that it derives from.",
        f"`{COMMAND}` writes this page from the config classes.",
    ]
    for section in dict.fromkeys(map(_section, ordered)):
        keys = dict.fromkeys(key for key in ordered if _section(key) == section)
        rows = [(key, *merged[key], _only(key, kinds)) for key in keys]
        columns = 4 if any(row[3] for row in rows) else 3
        head = ("setting", "default", "meaning", "apps")[:columns]
        parts += [f"## {section}", *_setting_tables(head, [row[:columns] for row in rows], _address)]
    for section, group in COMPONENTS.items():
        parts += _parts(section, group)
    parts += ["## Values of the commands", "Values that a command sets before your files and settings:"]
    for name, app in apps.items():
        parts += [f"### {name}", _table(("setting", "value"), _changed(app))]
    return "\n\n".join(parts) + "\n"


def _frequent_table(settings: dict[str, tuple[str, str]]) -> str:
    """Return the table of `FREQUENT` settings, with the first sentence of each meaning."""
    rows = []
    for key in (key for key in FREQUENT if key in settings):
        default, meaning = settings[key]
        name = f'<a href="#{_address(key)}"><code>{key}</code></a>'
        rows.append((name, default, _text(split_sentences(_first_sentences(meaning))[0])))
    return _table(("setting", "default", "meaning"), rows)


def _setting_tables(
    head: tuple[str, ...], rows: Iterable[tuple[str, ...]], address: Callable[[str], str]
) -> Iterator[str]:
    """Yield a table of settings, then a list of the settings whose meaning is too long for a cell, with the full text.

    The HTML id of a setting is on its list item, or on its table row if it has no list item.
    """
    cells, items = [], []
    for key, default, meaning, *rest in rows:
        anchor, short = f'<a id="{address(key)}"></a>', _first_sentences(meaning)
        if short == meaning:
            cells.append((f"{anchor}`{key}`", default, _text(meaning), *rest))
            continue
        cells.append((f"`{key}`", default, f'{_text(short)} <a href="#{address(key)}">more</a>', *rest))
        items.append(f"- {anchor}`{key}`: {_text(meaning, in_cell=False)}")
    yield _table(head, cells)
    if items:
        yield "\n".join(items)


def _address(key: str) -> str:
    """Return the HTML id of a setting."""
    return "setting-" + key.replace(".", "-")


def _first_sentences(text: str) -> str:
    """Return a text if it fits into a cell, otherwise its first sentences or the beginning of a long first one."""
    if len(text.split()) <= CELL_WORDS:
        return text
    limit = CELL_WORDS - 2  # the link to the full text counts as two words
    sentences = split_sentences(text)
    while len(sentences) > 1 and len(" ".join(sentences).split()) > limit:
        sentences.pop()
    short = " ".join(sentences)
    return short if len(short.split()) <= limit else re.split(r"[:;] | \(", short)[0] + "."


def _settings(config: Any) -> dict[str, tuple[str, str]]:
    """Return the default and the meaning of each setting, except settings of exchangeable components."""
    parts = tuple(f"{section}." for section in (*COMPONENTS, "ref.engine", "critic.engine"))
    rows = (row for row in describe(config) if not row[0].startswith(parts) and row[0] not in FILLED_IN)
    return {key: (_code(value), meaning) for key, value, meaning in rows}


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else "The run"


def _only(key: str, kinds: dict[str, dict[str, Any]]) -> str:
    """Return the kinds of commands that have a setting, or an empty string for all."""
    having = [kind for kind, settings in kinds.items() if key in settings]
    return "" if len(having) == len(kinds) else ", ".join(having)


def _parts(section: str, group: str) -> Iterator[str]:
    """Yield a heading and a table per component that can be selected for a section."""
    for name in sorted(registry.available(group)):
        rows = describe(registry.settings(group, name)(), f"{section}.")
        yield f"## {section}: {name}"
        yield from _setting_tables(
            ("setting", "default", "meaning"),
            [(key, _code(value), meaning) for key, value, meaning in rows],
            partial(_address_of_component, section, name),
        )


def _address_of_component(section: str, name: str, key: str) -> str:
    """Return the HTML id of a component's setting: components of a section may have settings of the same name."""
    return _address(f"{section}.{name}{key.removeprefix(section)}")


def _changed(app: App) -> list[tuple[str, str]]:
    """Return the settings with other values in a command's file than in the config classes."""
    plain, own = _settings(app.schema()), _settings(app.config([]))
    return [(f"`{key}`", value) for key, (value, _) in own.items() if plain.get(key, ("",))[0] != value]


# ---- commands


def commands_page() -> str:
    """Return docs/commands.md: every command with its subcommands and options."""
    from rl_apps.cli import main
    from rl_datasets import validate
    from rl_inference.backends.embedded import config as server

    rl = parser_of(lambda: main.main(["status", "."]))
    (choices,) = (action for action in rl._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in choices._choices_actions}
    apps = [
        (f"`{name}`", _text(registry.load("rl.apps", name).title.strip(".")))
        for names in APPS.values()
        for name in names
    ]
    parts = [
        "# Commands",
        f"All commands with their arguments, as `--help` prints them. `{COMMAND}` writes this page from the parsers.",
        "## The apps",
        "Type `rl grpo` or `rl sft`. The other apps run by their name alone, or after `rl`. All apps accept\n"
        "`key=value` ([settings](settings.md)) and these flags:",
        f"```text\n{FLAGS.partition(chr(10))[2]}\n```",
        _table(("command", "what it does"), apps),
    ]
    for name, parser in choices.choices.items():
        parts += [f"## rl {name}", _sentence(helps[name]), _arguments(parser)]
    parts += ["## python -m rl_datasets.validate", "Check that the gold answers of a data set score 1.0."]
    parts += [_arguments(parser_of(lambda: validate.main([])))]
    parts += ["## python -m rl_inference.embedded_server"]
    parts += [
        "Start the embedded server, as the launcher does.\n"
        "[Settings](settings.md#rolloutserver-embedded) has the full text of each argument."
    ]
    parts += [_arguments(parser_of(lambda: server.parse([])), _first_sentences)]
    return "\n\n".join(parts) + "\n"


class _ParserMadeError(Exception):
    """Ends a command that has built its parser. The argument of the exception is the parser."""


def parser_of(command: Callable[[], Any]) -> argparse.ArgumentParser:
    """Return the parser that a command builds."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _ParserMadeError(parser)

    with patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            command()
        except _ParserMadeError as found:
            return found.args[0]  # type: ignore[no-any-return]
    raise AssertionError(f"{command} parsed no arguments; expected a command with an argument parser")


def _arguments(parser: argparse.ArgumentParser, shorten: Callable[[str], str] = str) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        shown = action.metavar or (
            f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        )
        takes = "" if action.nargs == 0 else f" {shown}"
        name = ", ".join(f"{option}{takes}" for option in action.option_strings) or str(shown)
        meaning = (action.help or "") % {"default": action.default, "prog": parser.prog}
        rows.append((f"`{name}`", _text(shorten(meaning).removesuffix("."))))
    return _table(("argument", "meaning"), rows)


# ---- tutorials


def tutorial_page(program: Path) -> str:
    """Return the page of a tutorial: the docstring of its program, then a section for each numbered comment."""
    tree = ast.parse(program.read_text())
    title, _, summary = (ast.get_docstring(tree) or "").partition("\n\n")
    path = program.relative_to(ROOT)
    blocks = [
        f"# {program.name.partition('_')[0]}. {title}",
        summary,
        f"```console\n$ uv run python {path}\n```",
        f"The program is [`{path}`]({program.name}). Its arguments are settings, which override those\n"
        f"in the program. `{COMMAND}` generates this page from the program.",
    ]
    code = program.read_text().split('"""\n', 1)[1]
    imports, *sections = re.split(r"^( *)# (\d+\. .*)\.\n", code, flags=re.MULTILINE)
    blocks += [_python(imports)]
    for heading, section in zip(sections[1::3], sections[2::3], strict=True):
        lines = section.splitlines()
        comment = list(takewhile(lambda line: line.lstrip().startswith("#"), lines))
        text = "\n".join(line.lstrip().removeprefix("#").removeprefix(" ") for line in comment)
        blocks += [f"## {heading}", text, _python("\n".join(lines[len(comment) :]))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _python(code: str) -> str:
    code = textwrap.dedent(code).strip()
    return f"```python\n{code}\n```" if code else ""


# ---- Markdown


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" if line[0] != "---" else "|" + "|".join(line) + "|" for line in lines
    )


def _text(text: str, in_cell: bool = True) -> str:
    """Escape `<` outside of code, which would begin a tag, and `|` in a cell, which would end the cell."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|" if in_cell else "|")


def _code(value: str) -> str:
    return "`" + value.replace("|", "\\|") + "`"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "docs/commands.md": commands_page,
    "docs/guarantees.md": partial(guarantees_page, COMMAND),
    **{
        program.with_suffix(".md").relative_to(ROOT).as_posix(): partial(tutorial_page, program)
        for program in sorted((ROOT / "docs" / "tutorials").glob("*.py"))
    },
}


if __name__ == "__main__":
    for place, page in PAGES.items():
        (ROOT / place).write_text(page())
