"""The sources contain the messages of docs/errors.md."""

import re
from functools import cache
from pathlib import Path

import pytest

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


def test_page_lists_more_than_30_messages() -> None:
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_written_by_the_sources(message: str) -> None:
    assert _is_written(message)


def test_message_missing_from_the_sources_is_detected() -> None:
    assert not _is_written("sequence … has … tokens, but a macro-batch holds …")
