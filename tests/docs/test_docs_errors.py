"""The sources contain the messages of docs/errors.md."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MESSAGES = re.findall(r"^\| `([^|]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)


@cache
def _sources() -> str:
    """Return all sources with string literals joined to one line and `…` for replacement fields."""
    files = (*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/src/**/*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    return re.sub(r"\{[^{}\n]*\}|`[^`\n]*`", "…", joined)


def _is_written(message: str) -> bool:
    pattern = "[^\n]*".join(re.escape(part) for part in message.split("…"))
    return re.search(pattern, _sources()) is not None


def test_messages_on_the_page_are_written_by_the_sources() -> None:
    assert len(MESSAGES) > 30
    assert [message for message in MESSAGES if not _is_written(message)] == []
    assert not _is_written("sequence … has … tokens, but a macro-batch holds …")
