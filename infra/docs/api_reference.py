"""Sphinx extension with the directive `public-names`, which documents every public name of a package.

    .. public-names:: rl_rewards

The names come from `infra/ci/public_api.txt`; a test compares that file with the `__all__` of each module. Signatures
and docstrings come from `sphinx.ext.autodoc`, which imports the modules.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict
from functools import cache
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

LIST = Path(__file__).parents[1] / "ci" / "public_api.txt"
_MEMBERS = {"attribute", "method", "property"}
_CODE = re.compile(r"(?P<before>\w?)`(?P<code>[^`]+)`(?P<after>\w?)")
_NO_SOURCE = re.compile(r"= ?<(?:[^<>]|<\w+>)*>")
_MARKUP = re.compile(r"[\\*|]|(?<=\w)_(?!\w)")


def public_names(package: str) -> dict[str, str]:
    """Return the paths of a package's public names, each with the shortest path of the same object."""
    return {path: target for path, target in _listed()[0].items() if path.startswith(f"{package}.")}


@cache
def _listed() -> tuple[dict[str, str], set[str]]:
    """Return the public names as in `public_names`, and the paths of their members."""
    lines = LIST.read_text().splitlines()
    paths = {match[0] for line in lines if (match := re.match(r"[\w.]+", line))}
    members = {path for path in paths if path.rpartition(".")[0] in paths}
    aliases = dict(line.split(" is ") for line in lines if re.fullmatch(r"[\w.]+ is [\w.]+", line))
    return {path: aliases.get(path, path) for path in sorted(paths - members)}, members


@cache
def _link_targets() -> dict[str, str]:
    """Map every unambiguous spelling of a public object (`Class`, `Class.member`, its path) to the object's path."""
    targets: defaultdict[str, set[str]] = defaultdict(set)
    names, members = _listed()
    for path, target in (*names.items(), *((path, path) for path in members)):
        short = path.split(".")[-2 if path in members else -1 :]
        for text in (path, ".".join(short)):
            targets[text].add(target)
    return {text: paths.pop() for text, paths in targets.items() if len(paths) == 1}


class PublicNames(SphinxDirective):
    """Directive with the name of a package. Creates a section for each of its modules with public names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        (package,) = self.arguments
        self.env.note_dependency(str(LIST))
        modules: defaultdict[str, list[str]] = defaultdict(list)
        for path, target in public_names(package).items():
            modules[path.rpartition(".")[0]] += _entry(path, target)
        text = modules.pop(package, [])
        for name in sorted(modules):
            text += [name, "-" * len(name), "", *modules[name]]
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def _entry(path: str, target: str) -> list[str]:
    """Return the reStructuredText that documents a public name, or refers to the shorter path `target`."""
    module, _, name = path.rpartition(".")
    if path != target:
        return [f"``{name}``", f"   The same object as :py:obj:`{target}`.", ""]
    value = getattr(importlib.import_module(module), name)
    kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
    members = ["   :members:", "   :undoc-members:", "   :show-inheritance:"] if kind == "class" else []
    return [f".. auto{kind}:: {path}", *members, ""]


def _translate_docstring(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Translate a docstring from Markdown with sections in Google style to reStructuredText, in place."""
    text = "\n".join(lines)
    if kind == "data" and text.strip() == inspect.getdoc(type(value)):
        text = ""  # for example the docstring of `dict`
    text, marker, example = text.partition("Example:\n")
    text = _translate(text)
    if marker:  # the code ends at an empty line; indented text of the section may follow
        code, _, rest = example.partition("\n\n")
        indented = "".join(takewhile(lambda line: line[0] in " \n", rest.splitlines(keepends=True)))
        text += f"Example::\n\n{code}\n\n{_translate(dedent(indented) + rest[len(indented) :])}"
    if kind not in ("attribute", "data"):  # in a docstring of these, text before a colon would become a type
        text = str(GoogleDocstring(text, what="function", name=name, obj=value, options=options))
    lines[:] = [*text.splitlines(), ""]


def _translate(text: str) -> str:
    """Escape the markup of reStructuredText. Turn text between backticks into code, and public names into links."""
    result, end = "", 0
    for match in _CODE.finditer(text):
        code = match["code"].strip()  # a literal cannot begin or end with a space
        target = _link_targets().get(code)
        role = f":py:obj:`{code} <{target}>`" if target else f"``{code}``"
        result += _escape(text[end : match.start()])
        result += "\\ ".join(filter(None, (match["before"], role, match["after"])))  # an escaped space is not shown
        end = match.end()
    return result + _escape(text[end:])


def _escape(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _shorten_signature(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show default values without source code as an ellipsis, since Sphinx cannot parse `= <factory>`."""
    return signature and _NO_SOURCE.sub("= ...", signature), returned


def _skip_member(app: Sphinx, kind: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the tests of conformance suites, as `public_api.txt` does."""
    return True if name.startswith("test_") else None


def _hide_in_contents(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Leave members of classes out of the contents of the page."""
    if kind in _MEMBERS and content.parent is not None:
        content.parent["no-contents-entry"] = True


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", _translate_docstring)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-skip-member", _skip_member)
    app.connect("object-description-transform", _hide_in_contents)
    return {"parallel_read_safe": True}
