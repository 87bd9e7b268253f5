"""Selection of the program in a completion.

The completion is parsed as CommonMark. The candidates are the fenced code blocks marked as Python (`python`,
`python3`, `py`, `Python title="a.py"`, `{.python}`, `main.py`, ...). If there are none, the unmarked blocks are the
candidates. The program is the last candidate that calls or defines a function, else the last candidate. Blocks marked
otherwise (`text`, `bash`, `cpp`) never count. An opening fence may follow text in its line. A block without a closing
fence ends with the completion. If a block is not valid Python but its text up to another fence is, it ends at that
fence. If the tests call a function, a block that defines it is preferred to later blocks that do not.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import islice
from textwrap import dedent

from markdown_it import MarkdownIt
from markdown_it.token import Token

# Inline text is not needed, and `<answer>` on a line must not start an HTML block that hides a fence.
_MARKDOWN = MarkdownIt("commonmark").disable(["inline", "html_block"])
_TRIED_FENCES, _RESTARTS = 6, 50
"""Maximum number of fences tried as the end of a block, and of restarts of the parser after such a fence."""
_PYTHON = re.compile(r"\{?\.?(?:(?:i?python|py(?:py)?)[0-9.]*|[\w./-]+\.py)(?![\w-])", re.IGNORECASE)
# "<answer>```python" and "The code is: ```python", also in a quotation; CommonMark covers a fence after a list marker
_OPENS_IN_LINE = re.compile(
    rf"^([ \t>]*)(?!(?:[-+*]|[0-9]{{1,9}}[.)])[ \t]+`|```)([^\s>].*?)[ \t]*(?=```+ ?{_PYTHON.pattern}\}}?[ \t]*\r?$)",
    re.IGNORECASE | re.MULTILINE,
)


def find_program(completion: str, function: str | None = None) -> str | None:
    """Return the program of a completion, or None if no fenced code block qualifies.

    Args:
        completion: the text after the reasoning.
        function: name of the function or method that tests call.
    """
    blocks = list(_fences(completion))
    marked = [code for info, code in blocks if _PYTHON.match(info)]
    unmarked = [code for info, code in blocks if not info]
    eligible = marked or unmarked
    candidates = [code for code in eligible if _calls_or_defines(code)] or eligible
    if function:
        definition = re.compile(rf"\bdef\s+{re.escape(function)}\s*\(|^{re.escape(function)}\s*=", re.MULTILINE)
        candidates = [code for code in candidates if definition.search(code)] or candidates
    return candidates[-1] if candidates else None


def _fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the info string and the content of each fenced block, including blocks that are indented as a whole."""
    lines, start, restarts = re.split(r"\r\n?|\n", _OPENS_IN_LINE.sub(r"\1\2\n\1", text)), 0, 0
    while start < len(lines) and restarts <= _RESTARTS:
        lines, start, restarts = lines[start:], len(lines), restarts + 1
        for token in _MARKDOWN.parse("\n".join(lines)):
            if token.type == "code_block" and token.content.startswith(("```", "~~~")):
                yield from _fences(token.content)
            if token.type != "fence" or token.map is None:
                continue
            info, end = token.info.strip(), token.map[1]
            content, last = _whole_program(token, lines) if not info or _PYTHON.match(info) else (token.content, end)
            yield info, content
            if last != end:  # the bounds of the later blocks may also change
                start = last
                break


def _whole_program(token: Token, lines: list[str]) -> tuple[str, int]:
    """Return the content of a block and the line after it.

    A closing fence may share its line with code or prose, and a line of a string in the program may look like a fence.
    So a block that is not valid Python ends at an earlier or later fence if its text up to that fence is valid Python.
    """
    first, end = token.map or (0, 0)
    # The content of a block in a list item may be indented more than its fence.
    for content in (token.content, dedent(token.content)):
        if _parse(content):
            return content, end
    for mark in islice(re.finditer(token.markup, token.content), _TRIED_FENCES):
        content = token.content[: mark.start()]
        if _parse(content):
            return content, first + 2 + content.count("\n")
    fences = (n for n in range(end, len(lines)) if re.fullmatch(rf" {{0,3}}{token.markup}\s*", lines[n]))
    for last in islice(fences, _TRIED_FENCES):
        if _parse(content := "\n".join([*lines[first + 1 : last], ""])):
            return content, last + 1
    return token.content, end


def _parse(code: str) -> ast.AST | None:
    with warnings.catch_warnings(action="ignore"):  # for example, about invalid escapes in strings
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _calls_or_defines(code: str) -> bool:
    """Return whether a text is Python that calls or defines something, unlike sample input or output."""
    tree = _parse(code)
    return tree is not None and any(isinstance(n, ast.Call | ast.FunctionDef | ast.ClassDef) for n in ast.walk(tree))
