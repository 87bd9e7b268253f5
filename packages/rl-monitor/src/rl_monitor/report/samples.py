"""Select completions of a run for its page: the worst, the best and some others, of steps over the whole run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rl_monitor.completions import completion_files, last_user_turn
from rl_monitor.report.curves import is_number

STEPS = 24
"""Maximum number of training steps on the page in addition to the newest steps, and likewise of evaluations."""
NEWEST = 4
"""Number of newest steps that are always shown."""
EACH = 6
"""Completions per step: a third with the lowest, a third with the highest rewards, and others."""
IMAGE_BYTES = 200_000
"""Maximum size of the data URL of an image in a conversation."""

CompletionRecord = dict[str, Any]
"""Record of `rollouts/`, with fields of its training such as `advantage`; see
`rl_trainers.run_log.rollouts.learned_records`."""


Choice = Callable[[list[CompletionRecord]], list[CompletionRecord]]
"""Function that selects and orders completions. It receives only the fields in `HEAD`."""

HEAD = ("reward", "truncated", "rejected", "prompt_id", "group_id", "episode_id")


def read_completions(directory: Path, step: int, evaluation: bool, choose: Choice) -> list[CompletionRecord]:
    """Return selected completions of a step. Training completions include their advantages, if recorded.

    Only the selected completions are loaded completely."""
    summaries = []
    for at, path in completion_files(directory, evaluation):
        for begin, completion in _lines(path) if at == step else ():
            summaries.append({name: completion[name] for name in HEAD} | {"begin": begin, "path": path})
    chosen = choose(summaries)
    learned = (
        {} if evaluation else _training_records(directory, step, {(a["group_id"], a["episode_id"]) for a in chosen})
    )
    completions = []
    for summary in chosen:
        _, completion = next(_lines(summary["path"], summary["begin"]))
        completions.append(
            completion
            | _training_fields(completion, learned.get((completion["group_id"], completion["episode_id"]), []))
        )
    return completions


def _training_records(
    directory: Path, step: int, keys: set[tuple[int, int]]
) -> dict[tuple[int, int], list[CompletionRecord]]:
    """Return the training records of some episodes of a step, by group and episode id."""
    records: dict[tuple[int, int], list[CompletionRecord]] = {}
    for path in sorted((directory / "rollouts").glob(f"learned_step_{step}-*.jsonl")):
        for _, record in _lines(path):
            if (key := (record["group_id"], record["episode_id"])) in keys:
                records.setdefault(key, []).append(record)
    return records


def _training_fields(completion: CompletionRecord, records: Sequence[CompletionRecord]) -> CompletionRecord:
    """Return the training fields of a completion: its own record, matched by length, or else the mean advantage."""
    if not records or completion["rejected"]:
        return {}
    matching = [record for record in records if record["tokens"] == len(completion.get("token_ids") or ())]
    if len(matching) == 1:
        return {name: matching[0][name] for name in ("advantage", "advantages", "proximal") if name in matching[0]}
    advantages = [record["advantage"] for record in records if record["advantage"] is not None]
    return {"advantage": sum(advantages) / len(advantages)} if advantages else {}


def _lines(path: Path, begin: int = 0) -> Iterator[tuple[int, CompletionRecord]]:
    """Yield the complete records of a file from a byte offset, each with its own offset."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(begin)
        for line in file:
            with suppress(ValueError):  # incomplete line of a process that is writing or was killed
                yield begin, json.loads(line)
            begin += len(line)


def by_reward(completion: CompletionRecord) -> tuple[float, int, int]:
    """Return a sort key by reward. Among equal rewards, neighbors belong to different prompts."""
    reward = completion["reward"]
    return reward if is_number(reward) else float("-inf"), completion["episode_id"], completion["group_id"]


def extremes(completions: Sequence[CompletionRecord], number: int = EACH) -> list[CompletionRecord]:
    """Select `number` completions by reward: the lowest third, the highest third, the rest evenly spaced between."""
    ordered = sorted(completions, key=by_reward)
    if len(ordered) <= number:
        return ordered
    third = number // 3
    middle, remaining = ordered[third : len(ordered) - third], number - 2 * third
    spread = [middle[i * len(middle) // remaining] for i in range(remaining)]
    return [*ordered[:third], *spread, *ordered[len(ordered) - third :]]


@dataclass
class Samples:
    """Repeatedly select completions of a running run, without reading unchanged files again.

    Args:
        directory: run directory.
    """

    directory: Path
    _previous: dict[tuple[int, bool], tuple[int, list[CompletionRecord]]] = field(default_factory=dict)

    def choose(self) -> list[CompletionRecord]:
        """Return the selected completions with the fields `step` and `evaluation`, newest first."""
        selected: dict[tuple[int, bool], tuple[int, list[CompletionRecord]]] = {}
        for evaluation in (False, True):
            groups = groupby(completion_files(self.directory, evaluation), key=lambda item: item[0])
            files = {step: [path for _, path in group] for step, group in groups}
            for step in spread_steps(sorted(files)):
                size = sum(path.stat().st_size for path in files[step] if path.exists())
                previous, key = self._previous.get((step, evaluation)), (step, evaluation)
                selected[key] = (
                    previous if previous and previous[0] == size else (size, self._select_of_step(step, evaluation))
                )
        self._previous = selected
        return [completion for key in sorted(selected, reverse=True) for completion in selected[key][1]]

    def _select_of_step(self, step: int, evaluation: bool) -> list[CompletionRecord]:
        chosen = read_completions(self.directory, step, evaluation, extremes)
        return [{"step": step, "evaluation": evaluation} | completion for completion in chosen]


def spread_steps(steps: Sequence[int]) -> list[int]:
    """Return the newest steps, the first one, and steps at a regular stride between.

    The stride is a power of 2, so a longer run keeps a subset of the earlier selection and few files are read again."""
    stride = 1
    while len(steps) // stride > STEPS:
        stride *= 2
    return sorted({*steps[::stride], *steps[-NEWEST:]})


# ---- records of the page


def to_page_record(
    completion: CompletionRecord,
    pieces: Callable[[list[int]], list[str] | None],
    tokens: int,
    characters: int,
    thumbnails: Collection[str] = (),
) -> CompletionRecord:
    """Return the record of a completion for the page.

    Args:
        completion: record, see `CompletionRecord`.
        pieces: function from token ids to the text of each, or to None without a tokenizer.
        tokens: maximum number of tokens, counted from the first.
        characters: maximum characters per text.
        thumbnails: names of the image files that the page has. Other images appear as text.
    """
    copied = ("step", "evaluation", "prompt_id", "group_id", "episode_id", "rejected", "truncated", "temperature")
    record = {name: completion.get(name) for name in (*copied, "version_first", "version_last", "reward")}
    record |= {"set": completion["set"]} if completion.get("set") else {}
    record |= {"advantage": completion["advantage"]} if completion.get("advantage") is not None else {}
    for name in ("prompt", "completion", "answer"):
        if isinstance(completion.get(name), str):
            record[name] = truncate_text(completion[name], characters)
    if (question := last_user_turn(completion)) != completion.get("prompt", ""):
        record["question"] = truncate_text(question, characters)
    images = (_image(image, thumbnails) for image in completion.get("images") or ())
    if messages := completion.get("conversation"):
        record["conversation"] = [_message(message, characters, images) for message in messages]
        record.pop("prompt", None)
        record.pop("completion", None)
        record.pop("question", None)
    if parts := list(images):  # those that no message has
        record["images"] = parts
    if ids := completion.get("token_ids"):
        shown_ids = ids[:tokens]
        record["tokens"] = {
            "count": len(ids),
            "text": pieces(shown_ids) or [f"[{i}] " for i in shown_ids],
            **{
                name: completion[name][:tokens]
                for name in ("logprobs", "advantages", "proximal")
                if completion.get(name)
            },
            "versions": [[version, len([*group])] for version, group in groupby(completion["versions"][:tokens])],
        }
    return record


def truncate_text(text: str, characters: int) -> str:
    """Truncate a text to a number of characters, and append the number of omitted ones."""
    surplus = len(text) - characters
    return text if surplus <= 0 else f"{text[:characters]} [... {surplus} more characters]"


def _message(message: CompletionRecord, characters: int, images: Iterator[CompletionRecord]) -> CompletionRecord:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
    record = {"role": str(message.get("role")), "parts": [_part(part, characters, images) for part in parts]}
    if reasoning := message.get("reasoning_content"):
        record["thought"] = truncate_text(str(reasoning), characters)
    if calls := message.get("tool_calls"):
        record["calls"] = [truncate_text(_call(call), characters) for call in calls]
    names = ("reward", "version_first", "version_last", "name", "tool_call_id")
    return record | {name: message[name] for name in names if message.get(name) is not None}


def _part(part: Any, characters: int, images: Iterator[CompletionRecord]) -> CompletionRecord:
    """Convert a part of a message: text, the next of the images, embedded image, or any other part as JSON text."""
    if part == {"type": "image"} and (image_part := next(images, None)):
        return image_part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {"text": truncate_text(part["text"], characters)}
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(url, str) and url.startswith("data:image/") and len(url) <= IMAGE_BYTES:
        return {"image": url}
    return {"text": truncate_text(json.dumps(part, ensure_ascii=False), min(characters, 400))}


def _image(image: dict[str, Any], thumbnails: Collection[str]) -> CompletionRecord:
    """Convert an image of a record: name, size and path of its thumbnail, or a text without a thumbnail."""
    name, label = Path(image["file"]).name, f"{image['width']} x {image['height']}, rollouts/{image['file']}"
    return {"image": name, "label": label} if name in thumbnails else {"text": f"[image {label}]"}


def _call(call: Any) -> str:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    arguments = function.get("arguments", "")
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"
