"""Code blocks of a page, and the files that they speak of."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name that its first line gives it."""
        named = re.match(r"# ([\w.]+\.(?:py|yaml|toml))\b", self.text)
        return named.group(1) if named else None

    @property
    def is_program(self) -> bool:
        """Whether it is Python that runs as it stands, after the blocks before it."""
        return self.language == "python" and not self.file

    def commands(self) -> list[str]:
        """What stands behind prompts, without comments."""
        lines = (line[2:] for line in self.text.splitlines() if line.startswith("$ "))
        return [shlex.join(shlex.split(part, comments=True)) for line in lines for part in line.split(" && ")]


def blocks(page: str, root: Path) -> list[Block]:
    """The code blocks of a page below a folder, in order."""
    tokens = MarkdownIt().parse((root / page).read_text())
    return [Block(page, t.map[0] + 1, t.info, t.content) for t in tokens if t.type in ("fence", "code_block")]


def write_files(found: list[Block], directory: Path) -> None:
    """Write those blocks that are files."""
    for block in found:
        if block.file:
            (directory / block.file).write_text(block.text)


def write_data(directory: Path) -> None:
    """Write `train.jsonl` and `test.jsonl` with rows of every form that pages read."""
    row = {"answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    directory.mkdir(parents=True)
    for split in ("train", "test"):
        lines = []
        for i in range(64):
            question = f"What is 2 + 3? ({i})"
            dialogue = f"\n\nHuman: {question}\n\nAssistant: "
            pair = {"chosen": dialogue + "5", "rejected": dialogue + "6"}
            lines.append(json.dumps({**row, **pair, "question": question}) + "\n")
        (directory / f"{split}.jsonl").write_text("".join(lines))
