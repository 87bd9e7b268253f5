"""The answers that a run keeps (`rollouts/`), and how one is shown: turn by turn, with tools, rewards and versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError

if TYPE_CHECKING:
    from rich.text import Text

_FILE = re.compile(r"(eval_)?step_(\d+)-\d+\.jsonl")
_STYLES = {
    "system": "magenta",
    "user": "cyan",
    "assistant": "green",
    "tool": "yellow",
    "prompt": "cyan",  # as it was rendered
    "completion": "green",
}


def completion_files(directory: Path, evaluation: bool) -> Iterator[tuple[int, Path]]:
    """Steps and the files of their answers, in order."""
    found = ((_FILE.fullmatch(path.name), path) for path in (directory / "rollouts").glob("*.jsonl"))
    yield from sorted((int(name[2]), path) for name, path in found if name and bool(name[1]) == evaluation)


def format_steps(steps: list[int]) -> str:
    """Steps for a sentence: all where they are few, else the first and the last."""
    shown = [*map(str, steps)] if len(steps) <= 8 else [*map(str, steps[:3]), "...", *map(str, steps[-3:])]
    return f"[{', '.join(shown)}]"


def kept_steps(directory: Path, evaluation: bool) -> list[int]:
    """Steps whose answers, or those of evaluations at them, are kept.

    Raises:
        DataError: there are none.
    """
    there = sorted({at for at, _ in completion_files(directory, evaluation)})
    if not there:
        raise DataError(
            f"{directory}/rollouts: expected answers{' of evaluations' * evaluation}, found none. `rollouts.every` "
            "says which are kept; supervised runs have none. `rl plot` and `rl report` show figures."
        )
    return there


def conversation(answer: dict[str, Any], where: str) -> Text:
    """What is shown of a line of `rollouts/`."""
    from rich.text import Text

    about = [
        where,
        *(f"{name} {answer[f'{name}_id']}" for name in ("prompt", "episode")),
        f"reward {answer['reward']:g}",
    ]
    about += [f"advantage {answer['advantage']:+.3g}"] if answer.get("advantage") is not None else []
    about += [f"not learned from: {answer['rejected']}"] if answer["rejected"] else []
    about += ["cut off"] if answer["truncated"] else []
    text = Text(f"== {', '.join(about)}\n", style="bold")
    for message in answer.get("conversation") or _of_two(answer):
        text.append(f"{message['role']}{_figures(message)}: ", style=_STYLES.get(message["role"], ""))
        text.append(f"{_printable(_said(message))}\n", style="not bold")
    return text


def _of_two(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer to a prompt as a conversation."""
    versions = {name: answer.get(name) for name in ("version_first", "version_last")}
    return [
        {"role": "prompt", "content": answer.get("prompt", "")},
        {"role": "completion", "content": answer.get("completion", ""), **versions},
    ]


def _figures(message: dict[str, Any]) -> str:
    """Version and own reward of an answer."""
    first, last = message.get("version_first"), message.get("version_last")
    if first is None:
        return ""
    versions = f"v{first}" if first == last else f"v{first}-{last}"
    return f" ({versions}{', reward {:g}'.format(message['reward']) if message.get('reward') else ''})"


def _said(message: dict[str, Any]) -> str:
    """Reasoning, text and tool calls of a message."""
    content, thought = message.get("content") or "", message.get("reasoning_content")
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    calls = (call["function"] for call in message.get("tool_calls") or ())
    parts = [f"<think>{thought}</think>"] if thought else []
    parts += [content] if content else []
    parts += [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n  ".join(parts)


def _printable(text: str) -> str:
    """Without what would move the cursor of a terminal or change its colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
