"""The pages of docs/ that are made of the sources: settings from the dataclasses, commands from their parsers,
tutorials from their programs.

    uv run python infra/docs/reference.py

writes them; `tests/docs/test_docs_site.py` fails where one is not what this would write.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rl_apps.run.app import App
from rl_apps.settings.compose import FILLED_IN, FLAGS, describe
from rl_contracts import registry

ROOT = Path(__file__).parents[2]
COMMAND = "uv run python infra/docs/reference.py"
APPS = {
    "grpo": ("grpo", "gsm8k-grpo", "multi-turn-math", "math-agent"),
    "sft": ("sft", "gsm8k-sft"),
    "dpo": ("hh-rlhf-dpo",),
    "rm": ("hh-rlhf-rm",),
}
"""Commands that have the same settings, with different defaults."""
PARTS = {
    "actor.engine": "rl.train_engines",
    "rollout.server": "rl.inference_engines",
    "launcher.options": "rl.schedulers",
}
"""Sections whose settings are those of the part that is chosen, and where the parts are found."""


# ---- settings


def settings_page() -> str:
    """docs/settings.md: every setting of every command."""
    apps: dict[str, App] = {name: registry.load("rl.apps", name) for names in APPS.values() for name in names}
    kinds = {kind: _settings(apps[names[0]].schema()) for kind, names in APPS.items()}
    merged = {key: row for kind in reversed(kinds.values()) for key, row in kind.items()}
    ordered = [key for kind in kinds.values() for key in kind]
    parts = [
        "# Settings",
        "Every setting with its default and its meaning. `--help SECTION` of a command shows the same, `--cfg job`\n"
        "what a command would run with. The defaults are those of the dataclasses;\n"
        "[what the commands set](#what-the-commands-set) says what each lays over them. This page is made of the\n"
        f"dataclasses and the docstrings under their fields, by `{COMMAND}`.",
        "Where a setting is not of all commands, the last column says of which: "
        + "; ".join(f"*{kind}* is {_listed(names)}" for kind, names in APPS.items())
        + ". An app of your own has those of the class that it derives from.",
    ]
    for section in dict.fromkeys(map(_section, ordered)):
        keys = dict.fromkeys(key for key in ordered if _section(key) == section)
        rows = [(f"`{key}`", *merged[key], _only(key, kinds)) for key in keys]
        parts += [f"## {section}", _table(("setting", "default", "meaning", "of"), rows)]
    for section, group in PARTS.items():
        parts += _parts(section, group)
    parts += ["## What the commands set", "Beyond the defaults above, before files and settings of your own:"]
    for name, app in apps.items():
        parts += [f"### {name}", _table(("setting", "value"), _changed(app))]
    return "\n\n".join(parts) + "\n"


def _settings(config: Any) -> dict[str, tuple[str, str]]:
    """Default and meaning of each setting, without those of parts."""
    parts = tuple(f"{section}." for section in (*PARTS, "ref.engine", "critic.engine"))
    rows = (row for row in describe(config) if not row[0].startswith(parts) and row[0] not in FILLED_IN)
    return {key: (_code(value), _text(meaning)) for key, value, meaning in rows}


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else "The run"


def _only(key: str, kinds: dict[str, dict[str, Any]]) -> str:
    """The kinds of commands that have a setting; empty: all."""
    having = [kind for kind, settings in kinds.items() if key in settings]
    return "" if len(having) == len(kinds) else ", ".join(having)


def _parts(section: str, group: str) -> Iterable[str]:
    """The settings of the parts that a section is for."""
    for name in sorted(registry.available(group)):
        rows = describe(registry.settings(group, name)(), f"{section}.")
        yield f"## {section}: {name}"
        yield _table(("setting", "default", "meaning"), [(f"`{k}`", _code(v), _text(m)) for k, v, m in rows])


def _changed(app: App) -> list[tuple[str, str]]:
    """What a command's own file says that the dataclasses do not."""
    plain, own = _settings(app.schema()), _settings(app.config([]))
    return [(f"`{key}`", value) for key, (value, _) in own.items() if plain.get(key, ("",))[0] != value]


# ---- commands


def commands_page() -> str:
    """docs/commands.md: every command with its subcommands and options."""
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
        f"What can be typed. This page is made of the commands' own parsers, by `{COMMAND}`; `--help` says the same.",
        "## The apps",
        "`rl grpo` and `rl sft` are run by these two words, the others by their name alone or behind `rl`. All take\n"
        "`key=value` ([settings](settings.md)) and these flags:",
        f"```text\n{FLAGS.partition(chr(10))[2]}\n```",
        _table(("command", "what it does"), apps),
    ]
    for name, parser in choices.choices.items():
        parts += [f"## rl {name}", _sentence(helps[name]), _arguments(parser)]
    parts += ["## python -m rl_datasets.validate", _sentence("whether the gold answers of a data set score 1.0")]
    parts += [_arguments(parser_of(lambda: validate.main([])))]
    parts += ["## python -m rl_inference.embedded_server", "The embedded server; the launcher starts it."]
    parts += [_arguments(parser_of(lambda: server.parse([])))]
    return "\n\n".join(parts) + "\n"


class _ParserMadeError(Exception):
    """Ends a command where it has made its parser, which is the argument."""


def parser_of(command: Callable[[], Any]) -> argparse.ArgumentParser:
    """The parser that a command makes."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _ParserMadeError(parser)

    with patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            command()
        except _ParserMadeError as found:
            return found.args[0]  # type: ignore[no-any-return]
    raise AssertionError("expected a command that parses arguments")


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        shown = action.metavar or (
            f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        )
        takes = "" if action.nargs == 0 else f" {shown}"
        name = ", ".join(f"{option}{takes}" for option in action.option_strings) or str(shown)
        said = (action.help or "") % {"default": action.default, "prog": parser.prog}
        rows.append((f"`{name}`", _text(said)))
    return _table(("argument", "meaning"), rows)


# ---- tutorials


def tutorial_page(program: Path) -> str:
    """A program's page: what its docstring and its numbered comments say, with the code between them."""
    tree = ast.parse(program.read_text())
    title, _, about = (ast.get_docstring(tree) or "").partition("\n\n")
    place = program.relative_to(ROOT)
    parts = [
        f"# {program.name.partition('_')[0]}. {title}",
        about,
        f"```console\n$ uv run python {place}\n```",
        f"The program is [`{place}`]({program.name}); words behind it are settings, which win over its own. This\n"
        f"page is made of it, by `{COMMAND}`.",
    ]
    code = program.read_text().split('"""\n', 1)[1]
    before, *sections = re.split(r"^( *)# (\d+\. .*)\.\n", code, flags=re.MULTILINE)
    parts += [_python(before)]
    for heading, rest in zip(sections[1::3], sections[2::3], strict=True):
        said = list(takewhile(lambda line: line.lstrip().startswith("#"), rest.splitlines()))
        text = "\n".join(line.lstrip().removeprefix("#").removeprefix(" ") for line in said)
        parts += [f"## {heading}", text, _python("\n".join(rest.splitlines()[len(said) :]))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _python(code: str) -> str:
    code = textwrap.dedent(code).strip()
    return f"```python\n{code}\n```" if code else ""


# ---- Markdown


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" if line[0] != "---" else "|" + "|".join(line) + "|" for line in lines
    )


def _text(text: str) -> str:
    """A sentence for a cell: what stands between backticks is code, and nothing is a tag."""
    said = text.split("`")
    said[::2] = [part.replace("<", "&lt;") for part in said[::2]]
    return "`".join(said).replace("|", "\\|")


def _code(value: str) -> str:
    return "`" + value.replace("|", "\\|") + "`"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "docs/commands.md": commands_page,
    **{
        program.with_suffix(".md").relative_to(ROOT).as_posix(): partial(tutorial_page, program)
        for program in sorted((ROOT / "docs" / "tutorials").glob("*.py"))
    },
}


if __name__ == "__main__":
    for place, page in PAGES.items():
        (ROOT / place).write_text(page())
