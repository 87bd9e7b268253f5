"""The code blocks of a page, and the files that they read."""

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
        """File name in the comment of the first line, if there is one."""
        match = re.match(r"# ([\w.]+\.(?:py|yaml|toml))\b", self.text)
        return match.group(1) if match else None

    @property
    def is_program(self) -> bool:
        """Whether the block is Python that runs after the previous programs of the page."""
        return self.language == "python" and not self.file

    def commands(self) -> list[str]:
        """Return the commands after the prompts `$ `, without comments."""
        lines = (line[2:] for line in self.text.splitlines() if line.startswith("$ "))
        return [shlex.join(shlex.split(part, comments=True)) for line in lines for part in line.split(" && ")]


def blocks(page: str, root: Path) -> list[Block]:
    """Return the code blocks of a page, in order. `page` is a path relative to `root`."""
    tokens = MarkdownIt().parse((root / page).read_text())
    return [Block(page, t.map[0] + 1, t.info, t.content) for t in tokens if t.type in ("fence", "code_block")]


def write_files(page_blocks: list[Block], directory: Path) -> None:
    """Write the blocks that are files."""
    for block in page_blocks:
        if block.file:
            (directory / block.file).write_text(block.text)


def write_data(directory: Path) -> None:
    """Write `train.jsonl` and `test.jsonl` with examples that serve RL, SFT and preference training."""
    worked_answer = {"answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    directory.mkdir(parents=True)
    for split in ("train", "test"):
        lines = []
        for i in range(64):
            question = f"What is 2 + 3? ({i})"
            dialogue = f"\n\nHuman: {question}\n\nAssistant: "
            pair = {"chosen": dialogue + "5", "rejected": dialogue + "6"}
            lines.append(json.dumps({**worked_answer, **pair, "question": question}) + "\n")
        (directory / f"{split}.jsonl").write_text("".join(lines))
