"""Rows that are too long: found before anything starts, and refused, left out or cut (`data.overlong`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_apps.run.app import Run
from rl_apps.run.chat_template import load_tokenizer
from rl_apps.settings.data import DataConfig, Rows, held_out_rows, load_rows
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import require
from rl_contracts.errors import DataError
from rl_contracts.models.directory import context_length, vocabulary_size

__all__ = ["measure_rows"]

USUAL = 2048
"""Tokens of a row where neither `data.max_length` nor the model's context says less."""


def longest_row(data: DataConfig, model: str) -> int:
    """Tokens that a row may have, of a prompt with its answer.

    Args:
        model: its directory.

    Raises:
        ConfigError: `data.max_length` is more than the model's context.
    """
    context = context_length(model)
    if data.max_length is None:
        return min(USUAL, context or USUAL)
    expected = f"at most {context}, the context of {model}"
    require(context is None or data.max_length <= context, "data.max_length", expected, data.max_length)
    return data.max_length


class SelectedRows(Sequence[dict[str, Any]]):
    """Rows of a data set by their numbers, some of them in another form."""

    def __init__(self, rows: Rows, numbers: Sequence[int], instead: Mapping[int, dict[str, Any]]) -> None:
        self._rows, self._numbers, self._instead = rows, numbers, instead

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        """The row, or the rows of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = self._numbers[index]
        return self._instead.get(number) or self._rows[number]


@dataclass
class Lengths:
    """What is too long, and what becomes of it."""

    data: DataConfig
    form: str
    """Of the rows, see `load_rows`."""
    tokenizer: Any
    limit: int
    """Tokens of a row at most; of a prompt that is to be answered one less."""
    room: int = 1
    """Tokens that a prompt which is cut leaves for its answer."""
    renderer: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.tokenizer)

    def fit(self, rows: Rows, split: str) -> tuple[Rows, str]:
        """The rows that are used, and a sentence about those that are too long; "" if there are none.

        Raises:
            DataError: the chat template does not show a row whole, rows are too long and `data.overlong=refuse`, or
                none is left.
        """
        sides = [{"role": role, "content": "."} for role in ("user", "assistant")]
        overhead = len(self.renderer.render(sides))  # of any message, at least
        too_long: dict[int, int] = {}
        columns, kinds = ("chosen", "rejected") if self.form == "pairs" else ("messages",), set[Any]()
        for number in range(len(rows)):
            row = rows[number]
            texts = [row[key] for key in columns if row.get(key)]
            if (kind := _kind(texts, row)) not in kinds:
                kinds.add(kind)
                self._require_shown(texts, row, number)
            # a token is a byte of the text or more, so that most rows need not be tokenised
            if row.get("tools") or (texts and max(_bytes(text, overhead) for text in texts) >= self.limit):
                tokens = self.tokens(row)
                if tokens > self.limit:
                    too_long[number] = tokens
        if not too_long:
            return rows, ""
        sentence = (
            f"{len(too_long)} of {len(rows)} examples ({split}) have more than {self.limit} tokens"
            f"{', including one for the completion' if self.form == 'rl' else ''} (data.max_length, or the model's "
            f"context); the longest has {max(too_long.values())}"
        )
        if self.data.overlong == "refuse":
            name = rows[min(too_long)].get("prompt_id", min(too_long))
            raise DataError(
                f"{sentence}; the first is row {name}. Raise data.max_length, or set data.overlong=drop to leave them "
                "out, or data.overlong=truncate to cut them."
            )
        cut = {number: self.cut(rows[number]) for number in too_long} if self.data.overlong == "truncate" else {}
        instead = {number: row for number, row in cut.items() if row is not None}
        kept = [number for number in range(len(rows)) if number not in too_long or number in instead]
        if not kept:
            raise DataError(f"{sentence}: none is left. Raise data.max_length.")
        return SelectedRows(
            rows, kept, instead
        ), f"{sentence}: {len(instead)} truncated, {len(rows) - len(kept)} dropped"

    def _require_shown(self, texts: Sequence[Any], row: dict[str, Any], number: int) -> None:
        """Reject a row that the chat template does not show whole."""
        try:
            for messages in texts:
                self.renderer.require_rendered(messages, row.get("tools"), self.form == "rl")
        except DataError as error:
            raise DataError(f"row {row.get('prompt_id', number)}: {error}") from error

    def tokens(self, row: dict[str, Any]) -> int:
        """Tokens of a row, the longer side of a pair, a prompt with the first token of its answer."""
        return max(map(len, self.ids(row))) + (self.form == "rl")

    def ids(self, row: dict[str, Any]) -> list[Sequence[int]]:
        """Token ids of a row: of its prompt, its conversation or its two sides."""
        if self.form == "rl":
            return [self.renderer.render(row["messages"], row.get("tools"))]
        return [rendered.input_ids for rendered in self._rendered(row, USUAL**3)]

    def together(self, row: dict[str, Any]) -> int:
        """Tokens of a row that are in the same micro-batch, at most: of a pair, those of both sides."""
        if self.form != "pairs":
            return self.tokens(row)
        return sum(min(len(ids), self.limit) for ids in self.ids(row))

    def cut(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row that is used instead of one that is too long; None if nothing would be left to learn from.

        The last message of a prompt loses its beginning; all else is cut at its end when it is rendered.
        """
        if self.form != "rl":
            try:
                self._rendered(row, self.limit)
            except DataError:
                return None
            return row
        *before, last = row["messages"]
        text = last["content"]
        while text and isinstance(text, str):
            short = {**row, "messages": [*before, {**last, "content": text}]}
            surplus = self.tokens(short) - 1 + self.room - self.limit
            if surplus <= 0:
                return short
            tokens = len(self.tokenizer.encode(text, add_special_tokens=False))
            text = text[math.ceil(len(text) * surplus / max(tokens, surplus)) :]
        return None

    def _rendered(self, row: dict[str, Any], limit: int) -> Sequence[Any]:
        from rl_trainers.learners.preference import preference_sequences
        from rl_trainers.learners.supervised import supervised_sequences

        render: Callable[..., Sequence[Any]] = preference_sequences if self.form == "pairs" else supervised_sequences
        return render([row], self.renderer, limit, truncate=True)


def lengths_of(run: Run[Any], form: str, tokenizer: Any) -> Lengths:
    """The limits of a run."""
    config = run.config
    limit = longest_row(config.data, config.model.directory())
    room = min(config.generation.max_new_tokens, limit // 2) if form == "rl" else 0
    return Lengths(config.data, form, tokenizer, limit, room)


def measure_rows(run: Run[Any], form: str) -> list[str]:
    """Look for rows that are too long, with the tokenizer of the run's model.

    Returns:
        what is left out or cut, and whether a step takes rows more than once, in sentences.

    Raises:
        ConfigError: `data.max_length` is more than the model's context, or a row may be longer than a micro-batch.
        DataError: rows are too long and `data.overlong=refuse`, or none is left; or one has a token that the model has
            no embedding of.
    """
    config = run.config
    lengths = lengths_of(run, form, load_tokenizer(config.model))
    train = load_rows(config.data, "train", form, config.seed)
    fitting, sentence = lengths.fit(train, "train")
    found = [sentence]
    _check_ids(config.model.directory(), lengths, fitting)
    if config.actor.micro_batch.max_tokens < lengths.limit * (2 if form == "pairs" else 1):
        _check_micro_batch(run, lengths, fitting)
    if config.evaluation.rows:
        test = load_rows(config.data, "test", form, config.seed)
        found.append(lengths.fit(held_out_rows(test, config.evaluation.rows), "test")[1])
    told = [f"data.overlong={config.data.overlong}: {sentence}" for sentence in found if sentence]
    if form == "rl" and len(fitting) < config.data.batch_size:
        told.append(
            f"warning: data.batch_size={config.data.batch_size} exceeds the {len(fitting)} examples of the data, so "
            "every step repeats some of them"
        )
    return told


def _check_ids(model: str, lengths: Lengths, rows: Rows) -> None:
    """Refuse rows with tokens that the model has no embedding of, where its tokenizer has more than the model."""
    known, largest = vocabulary_size(model), max(lengths.tokenizer.get_vocab().values())
    if known is None or largest < known:
        return
    for number in range(len(rows)):
        beyond = max(max(ids) for ids in lengths.ids(rows[number]))
        if beyond >= known:
            name, token = rows[number].get("prompt_id", number), lengths.tokenizer.convert_ids_to_tokens(int(beyond))
            raise DataError(
                f"row {name} has the token {token!r} ({beyond}), but the model {model} has embeddings of {known} "
                "tokens only. Resize its embeddings for this tokenizer, or take its own."
            )


def _check_micro_batch(run: Run[Any], lengths: Lengths, rows: Rows) -> None:
    """Refuse rows that, with their answers, may be longer than a micro-batch, which would end the run on the way. Both
    sides of a pair are in the same one."""
    longest = max(lengths.together(rows[number]) for number in range(len(rows)))
    answers = run.config.generation.max_new_tokens - 1 if lengths.form == "rl" else 0
    needed = longest if lengths.form == "pairs" else min(lengths.limit, longest + answers)
    expected = f"at least {needed}, which the longest row of the data may have, or a smaller data.max_length"
    found = run.config.actor.micro_batch.max_tokens
    require(found >= needed, "actor.micro_batch.max_tokens", expected, found)


def _kind(texts: Sequence[Any], row: Mapping[str, Any]) -> Any:
    """Return what a chat template may drop of a row. One row of each kind is checked before anything starts, every row
    when it is rendered."""
    messages = [(index, message) for text in texts for index, message in enumerate(text)]
    keys = ("content", "tool_calls", "reasoning_content")
    return bool(row.get("tools")), frozenset((i == 0, m["role"], *(bool(m.get(k)) for k in keys)) for i, m in messages)


def _bytes(messages: Sequence[Mapping[str, Any]], overhead: int) -> int:
    return sum(
        overhead + len(json.dumps(message, ensure_ascii=False, default=str).encode(errors="replace"))
        for message in messages
    )
