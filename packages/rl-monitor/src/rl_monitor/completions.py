"""Find a run's saved completions (`rollouts/`) and render a conversation with its tool calls, rewards and versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError

if TYPE_CHECKING:
    from rich.text import Text

TURN_CHARACTERS = 160
"""Maximum length of the user's turn in a short conversation."""
_FILE = re.compile(r"(eval_(?:[\w-]+_)?)?step_(\d+)-\d+\.jsonl")
_USER_TURN = re.compile(r"<[^<>]*>user(?:<[^<>]*>|\n)|<[|\uff5c]user[|\uff5c]>|\[INST\]", re.IGNORECASE)
"""Start of a user's turn in common chat templates."""
_END_OF_TURN = re.compile(
    r"<[|\uff5c](?:im_end|eot_id|eot|end|assistant)[|\uff5c]>|<end_of_turn>|\[/INST\]", re.IGNORECASE
)
_SPECIAL_TOKENS = re.compile(r"(?:<\|\w+\|>)+")
_STYLES = {
    "system": "magenta",
    "user": "cyan",
    "assistant": "green",
    "tool": "yellow",
    "prompt": "cyan",  # as rendered by the chat template
    "completion": "green",
}


def completion_files(directory: Path, evaluation: bool) -> Iterator[tuple[int, Path]]:
    """Yield each step with a file of its completions, in order."""
    matches = ((_FILE.fullmatch(path.name), path) for path in (directory / "rollouts").glob("*.jsonl"))
    yield from sorted((int(name[2]), path) for name, path in matches if name and bool(name[1]) == evaluation)


def format_steps(steps: list[int]) -> str:
    """Format steps for a message: all if there are at most 8, else the first and last three."""
    shown = [*map(str, steps)] if len(steps) <= 8 else [*map(str, steps[:3]), "...", *map(str, steps[-3:])]
    return f"[{', '.join(shown)}]"


def kept_steps(directory: Path, evaluation: bool) -> list[int]:
    """Return the steps whose completions, or completions of evaluations, are saved.

    Raises:
        DataError: no completions are saved.
    """
    steps = sorted({step for step, _ in completion_files(directory, evaluation)})
    if not steps:
        raise DataError(
            f"{directory}/rollouts: expected completions{' of evaluations' * evaluation}, found none. `rollouts.every` "
            "selects the steps to save; supervised runs have none. `rl plot` and `rl report` show metrics."
        )
    return steps


def conversation(completion: dict[str, Any], where: str, directory: Path, short: bool = False) -> Text:
    """Render a record of `rollouts/` for the terminal. An image is shown as its size and path.

    Args:
        completion: the record.
        where: beginning of the heading, such as the step.
        directory: run directory.
        short: whether to begin with the last turn of the user, cut to `TURN_CHARACTERS`.
    """
    from rich.text import Text

    heading = [
        where,
        *([f"set {completion['set']}"] if completion.get("set") else []),
        *(f"{name} {completion[f'{name}_id']}" for name in ("prompt", "episode")),
        f"reward {completion['reward']:g}",
    ]
    heading += [f"advantage {completion['advantage']:+.3g}"] if completion.get("advantage") is not None else []
    heading += [f"rejected: {completion['rejected']}"] if completion["rejected"] else []
    heading += ["truncated"] if completion["truncated"] else []
    text = Text(f"== {', '.join(heading)}\n", style="bold")
    for number, image in enumerate(completion.get("images") or (), 1):
        path = directory / "rollouts" / image["file"]
        text.append(
            _escape_control_characters(f"image {number}: {image['width']} x {image['height']}, {path}\n"), "dim"
        )
    for message in _last_turns(completion) if short else completion.get("conversation") or _as_conversation(completion):
        text.append(f"{message['role']}{_version_and_reward(message)}: ", style=_STYLES.get(message["role"], ""))
        text.append(f"{_escape_control_characters(_message_text(message))}\n", style="not bold")
    return text


def last_user_turn(completion: dict[str, Any]) -> str:
    """Return the text of the user's last turn, or the whole prompt if its chat template is not a common one."""
    messages = completion.get("conversation") or ()
    if turns := [message for message in messages if message.get("role") == "user"]:
        content = turns[-1].get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        return "".join(part.get("text", "") for part in parts)
    prompt = str(completion.get("prompt", ""))
    starts = [match.end() for match in _USER_TURN.finditer(prompt)]
    if not starts:
        return prompt
    turn = _END_OF_TURN.split(prompt[starts[-1] :], maxsplit=1)[0]
    return _SPECIAL_TOKENS.sub("", turn).strip()  # such as the placeholders of images


def _last_turns(completion: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last turn of the user, shortened, and all messages after it."""
    messages = completion.get("conversation") or _as_conversation(completion)
    last = max((i for i, message in enumerate(messages) if message["role"] in ("user", "prompt")), default=-1)
    turn = {"role": "user", "content": shorten(last_user_turn(completion), TURN_CHARACTERS)}
    return [turn, *messages[last + 1 :]]


def _as_conversation(completion: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a prompt and its completion in the form of a conversation."""
    versions = {name: completion.get(name) for name in ("version_first", "version_last")}
    return [
        {"role": "prompt", "content": completion.get("prompt", "")},
        {"role": "completion", "content": completion.get("completion", ""), **versions},
    ]


def _version_and_reward(message: dict[str, Any]) -> str:
    """Format version and reward of a completion."""
    first, last = message.get("version_first"), message.get("version_last")
    if first is None:
        return ""
    versions = f"v{first}" if first == last else f"v{first}-{last}"
    return f" ({versions}{', reward {:g}'.format(message['reward']) if message.get('reward') else ''})"


def _message_text(message: dict[str, Any]) -> str:
    """Format reasoning, text and tool calls of a message."""
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    calls = (call["function"] for call in message.get("tool_calls") or ())
    parts = [f"<think>{reasoning}</think>"] if reasoning else []
    parts += [content] if content else []
    parts += [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n  ".join(parts)


def _escape_control_characters(text: str) -> str:
    """Escape characters that move the cursor of a terminal or change its colors."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
