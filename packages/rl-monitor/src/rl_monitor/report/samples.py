"""The answers of a run that its page shows: of steps over the whole run the worst, the best and some others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rl_monitor.completions import completion_files
from rl_monitor.report.curves import is_number

STEPS = 24
"""Steps, and as many evaluations, from which answers are shown at most, besides the newest."""
NEWEST = 4
"""Newest steps that are shown whatever the others are."""
EACH = 6
"""Answers of each step: a third worst, a third best, and others."""
IMAGE_BYTES = 200_000
"""Size up to which a picture in a conversation is shown."""

Answer = dict[str, Any]
"""A line of `rollouts/`, and what was learned from it (`advantage`, ...; see
`rl_trainers.run_log.rollouts.learned_records`)."""


Choice = Callable[[list[Answer]], list[Answer]]
"""Takes some of the answers, of which it sees what `HEAD` names, in the order in which they are wanted."""

HEAD = ("reward", "truncated", "rejected", "prompt_id", "group_id", "episode_id")


def read_answers(directory: Path, step: int, evaluation: bool, choose: Choice) -> list[Answer]:
    """Some of the answers that are kept of a step; those of training with their advantages, where these are known. Only
    those that are chosen are held in memory."""
    heads = []
    for at, path in completion_files(directory, evaluation):
        for begin, answer in _lines(path) if at == step else ():
            heads.append({name: answer[name] for name in HEAD} | {"begin": begin, "path": path})
    chosen = choose(heads)
    learned = {} if evaluation else _learned(directory, step, {(a["group_id"], a["episode_id"]) for a in chosen})
    found = []
    for head in chosen:
        _, answer = next(_lines(head["path"], head["begin"]))
        found.append(answer | _what_was_learned(answer, learned.get((answer["group_id"], answer["episode_id"]), [])))
    return found


def _learned(directory: Path, step: int, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], list[Answer]]:
    """What trainers say of some episodes of a step, by group and episode: a list, of a row of each."""
    found: dict[tuple[int, int], list[Answer]] = {}
    for path in sorted((directory / "rollouts").glob(f"learned_step_{step}-*.jsonl")):
        for _, row in _lines(path):
            if (key := (row["group_id"], row["episode_id"])) in wanted:
                found.setdefault(key, []).append(row)
    return found


def _what_was_learned(answer: Answer, rows: Sequence[Answer]) -> Answer:
    """Of the rows of an episode that of this answer, by its number of tokens; where that says nothing, their mean."""
    if not rows or answer["rejected"]:
        return {}
    fitting = [row for row in rows if row["tokens"] == len(answer.get("token_ids") or ())]
    if len(fitting) == 1:
        return {name: fitting[0][name] for name in ("advantage", "advantages", "proximal") if name in fitting[0]}
    means = [row["advantage"] for row in rows if row["advantage"] is not None]
    return {"advantage": sum(means) / len(means)} if means else {}


def _lines(path: Path, begin: int = 0) -> Iterator[tuple[int, Answer]]:
    """The whole lines of a file from a byte on, each with that at which it begins."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(begin)
        for line in file:
            with suppress(ValueError):  # half of one, of a process that writes or was killed
                yield begin, json.loads(line)
            begin += len(line)


def by_reward(answer: Answer) -> tuple[float, int, int]:
    """Orders answers by reward, and those with the same one so that neighbours are of different prompts."""
    reward = answer["reward"]
    return reward if is_number(reward) else float("-inf"), answer["episode_id"], answer["group_id"]


def extremes(answers: Sequence[Answer], number: int = EACH) -> list[Answer]:
    """So many of the answers, in order of their rewards: a third of them those with the least, a third those with the
    greatest rewards, the rest spread over the others."""
    ordered = sorted(answers, key=by_reward)
    if len(ordered) <= number:
        return ordered
    ends = number // 3
    middle, others = ordered[ends : len(ordered) - ends], number - 2 * ends
    spread = [middle[i * len(middle) // others] for i in range(others)]
    return [*ordered[:ends], *spread, *ordered[len(ordered) - ends :]]


@dataclass
class Samples:
    """Chooses answers of a run again and again while it goes on; files that did not change are not read again.

    Args:
        directory: of the run.
    """

    directory: Path
    _known: dict[tuple[int, bool], tuple[int, list[Answer]]] = field(default_factory=dict)

    def choose(self) -> list[Answer]:
        """Answers with their `step` and whether they are of an `evaluation`, newest first."""
        kept: dict[tuple[int, bool], tuple[int, list[Answer]]] = {}
        for evaluation in (False, True):
            found = groupby(completion_files(self.directory, evaluation), key=lambda item: item[0])
            files = {step: [path for _, path in group] for step, group in found}
            for step in spread_steps(sorted(files)):
                size = sum(path.stat().st_size for path in files[step] if path.exists())
                before, key = self._known.get((step, evaluation)), (step, evaluation)
                kept[key] = before if before and before[0] == size else (size, self._of_step(step, evaluation))
        self._known = kept
        return [answer for key in sorted(kept, reverse=True) for answer in kept[key][1]]

    def _of_step(self, step: int, evaluation: bool) -> list[Answer]:
        chosen = read_answers(self.directory, step, evaluation, extremes)
        return [{"step": step, "evaluation": evaluation} | answer for answer in chosen]


def spread_steps(steps: Sequence[int]) -> list[int]:
    """The newest steps, the first, and every so many-th between; those that are chosen are so again with more steps, or
    never again, so that few are looked at anew."""
    stride = 1
    while len(steps) // stride > STEPS:
        stride *= 2
    return sorted({*steps[::stride], *steps[-NEWEST:]})


# ---- as the page shows them


def to_page_record(
    answer: Answer, pieces: Callable[[list[int]], list[str] | None], tokens: int, characters: int
) -> Answer:
    """What the page has of an answer.

    Args:
        answer: see `Answer`.
        pieces: text of each of some token ids; None where the tokenizer is not there.
        tokens: that are shown at most, from the first on.
        characters: of each text that are shown at most.
    """
    same = ("step", "evaluation", "prompt_id", "group_id", "episode_id", "rejected", "truncated", "temperature")
    found = {name: answer.get(name) for name in (*same, "version_first", "version_last", "reward")}
    found |= {"advantage": answer["advantage"]} if answer.get("advantage") is not None else {}
    for name in ("prompt", "completion", "answer"):
        if isinstance(answer.get(name), str):
            found[name] = truncate_text(answer[name], characters)
    if talk := answer.get("conversation"):
        found["conversation"] = [_message(message, characters) for message in talk]
        found.pop("prompt", None)
        found.pop("completion", None)
    if ids := answer.get("token_ids"):
        first = ids[:tokens]
        found["tokens"] = {
            "count": len(ids),
            "text": pieces(first) or [f"[{i}] " for i in first],
            **{name: answer[name][:tokens] for name in ("logprobs", "advantages", "proximal") if answer.get(name)},
            "versions": [[version, len([*run])] for version, run in groupby(answer["versions"][:tokens])],
        }
    return found


def truncate_text(text: str, characters: int) -> str:
    """A text that is not longer than so many characters, with what is missing in words."""
    left = len(text) - characters
    return text if left <= 0 else f"{text[:characters]} [... {left} more characters]"


def _message(message: Answer, characters: int) -> Answer:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
    found = {"role": str(message.get("role")), "parts": [_part(part, characters) for part in parts]}
    if thought := message.get("reasoning_content"):
        found["thought"] = truncate_text(str(thought), characters)
    if calls := message.get("tool_calls"):
        found["calls"] = [truncate_text(_call(call), characters) for call in calls]
    names = ("reward", "version_first", "version_last", "name", "tool_call_id")
    return found | {name: message[name] for name in names if message.get(name) is not None}


def _part(part: Any, characters: int) -> Answer:
    """A text, or a picture that is in the message itself; whatever else as JSON."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {"text": truncate_text(part["text"], characters)}
    image = part.get("image_url") if isinstance(part, dict) else None
    address = image.get("url") if isinstance(image, dict) else image
    if isinstance(address, str) and address.startswith("data:image/") and len(address) <= IMAGE_BYTES:
        return {"image": address}
    return {"text": truncate_text(json.dumps(part, ensure_ascii=False), min(characters, 400))}


def _call(call: Any) -> str:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    arguments = function.get("arguments", "")
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"
