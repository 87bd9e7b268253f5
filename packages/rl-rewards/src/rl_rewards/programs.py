"""Choice of the program in a completion.

The completion is parsed as CommonMark. The program is the last fenced code block marked as Python (`python`, `python3`,
`py`, `Python title="a.py"`, `{.python}`, `main.py`, ...). Without such a block it is the last unmarked fenced block
that calls or defines a function, and without such a block the last unmarked one. Blocks marked otherwise (`text`,
`bash`, `cpp`) never count. A block without a closing fence ends with the completion. If the tests call a function, a
block that defines it is preferred to later blocks that do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

# Text in a block is not needed, and `<answer>` on a line is not the start of HTML that hides a fence.
_MARKDOWN = MarkdownIt("commonmark").disable(["inline", "html_block"])
_PYTHON = re.compile(r"\{?\.?(?:(?:i?python|py(?:py)?)[0-9.]*|[\w./-]+\.py)(?![\w-])", re.IGNORECASE)


def find_program(completion: str, function: str | None = None) -> str | None:
    """Return the program that a completion gives, or None if it has no fenced code block that can be one.

    Args:
        completion: the text after the reasoning.
        function: the name of the function or method that tests call.
    """
    blocks = list(_fences(completion))
    marked = [code for info, code in blocks if _PYTHON.match(info)]
    unmarked = [code for info, code in blocks if not info]
    candidates = marked or [code for code in unmarked if _acts(code)] or unmarked
    if function:
        definition = re.compile(rf"\bdef\s+{re.escape(function)}\s*\(|^{re.escape(function)}\s*=", re.MULTILINE)
        candidates = [code for code in candidates if definition.search(code)] or candidates
    return candidates[-1] if candidates else None


def _fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the info string and the content of each fenced block, also of those that are indented as a whole."""
    for token in _MARKDOWN.parse(text):
        if token.type == "fence":
            yield token.info.strip(), token.content
        elif token.type == "code_block" and token.content.startswith(("```", "~~~")):
            yield from _fences(token.content)


def _acts(code: str) -> bool:
    """Whether a text is Python that does something, unlike sample input or output."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Call | ast.FunctionDef | ast.ClassDef) for node in nodes)
