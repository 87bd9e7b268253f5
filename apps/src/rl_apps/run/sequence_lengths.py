"""Check for examples that are too long, before a run starts: reject, drop or cut them (`data.overlong`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_apps.run.app import Run
from rl_apps.run.chat_template import load_tokenizer
from rl_apps.settings.data import DataConfig, Rows, held_out_rows, load_rows
from rl_apps.settings.evaluation_sets import configs_of_sets, naming_set
from rl_contracts.chat.image_messages import has_images
from rl_contracts.chat.rendering import ChatRenderer, tokenizer_of
from rl_contracts.config import require
from rl_contracts.errors import DataError
from rl_contracts.models.directory import context_length, vocabulary_size

__all__ = ["measure_rows"]

USUAL = 2048
"""Maximum tokens of an example if neither `data.max_length` nor the model's context length is smaller."""


def longest_row(data: DataConfig, model: str) -> int:
    """Return the maximum tokens of an example, or of a prompt with its completion.

    Args:
        model: directory of the model.

    Raises:
        ConfigError: `data.max_length` is above the context length of the model.
    """
    context = context_length(model)
    if data.max_length is None:
        return min(USUAL, context or USUAL)
    expected = f"at most {context}, the context of {model}"
    require(context is None or data.max_length <= context, "data.max_length", expected, data.max_length)
    return data.max_length


class SelectedRows(Sequence[dict[str, Any]]):
    """Selected examples of a data set, some of them replaced."""

    def __init__(self, rows: Rows, numbers: Sequence[int], instead: Mapping[int, dict[str, Any]]) -> None:
        self._rows, self._numbers, self._instead = rows, numbers, instead

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        """Return an example, or the examples of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = self._numbers[index]
        return self._instead.get(number) or self._rows[number]


@dataclass
class Lengths:
    """Length limit of the data, and handling of examples above it."""

    data: DataConfig
    form: str
    """Form of the examples, see `load_rows`."""
    tokenizer: Any
    """Tokenizer, or the processor of a vision-language model."""
    limit: int
    """Maximum tokens of an example. A prompt must leave one of them for its completion."""
    room: int = 1
    """Tokens that a cut prompt leaves for its completion."""
    renderer: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.tokenizer)

    def fit(self, rows: Rows, split: str) -> tuple[Rows, str]:
        """Return the examples to use, and a sentence about the examples that are too long, or "".

        Raises:
            DataError: the chat template drops part of an example, or examples are too long and `data.overlong=reject`,
                or no example remains.
        """
        messages = [{"role": role, "content": "."} for role in ("user", "assistant")]
        overhead = len(self.renderer.render(messages))  # upper bound of the tokens that the template adds to a message
        too_long: dict[int, int] = {}
        columns, kinds = ("chosen", "rejected") if self.form == "pairs" else ("messages",), set[Any]()
        for number in range(len(rows)):
            row = rows[number]
            texts = [row[key] for key in columns if row.get(key)]
            if (kind := _kind(texts, row)) not in kinds:
                kinds.add(kind)
                self._require_shown(texts, row, number)
            # a token has at least one byte of text, so most examples without images need not be tokenized
            if (
                row.get("tools")
                or any(map(has_images, texts))
                or (texts and max(_bytes(text, overhead) for text in texts) >= self.limit)
            ):
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
        if self.data.overlong == "reject":
            name = rows[min(too_long)].get("prompt_id", min(too_long))
            raise DataError(
                f"{sentence}; the first is example {name}. Raise data.max_length, or set data.overlong=drop to leave "
                "them out, or data.overlong=truncate to cut them."
            )
        cut = {number: self.cut(rows[number]) for number in too_long} if self.data.overlong == "truncate" else {}
        replaced = {number: row for number, row in cut.items() if row is not None}
        selected = [number for number in range(len(rows)) if number not in too_long or number in replaced]
        if not selected:
            raise DataError(f"{sentence}: no example remains. Raise data.max_length.")
        return SelectedRows(
            rows, selected, replaced
        ), f"{sentence}: {len(replaced)} truncated, {len(rows) - len(selected)} dropped"

    def _require_shown(self, texts: Sequence[Any], row: dict[str, Any], number: int) -> None:
        """Reject an example if the chat template drops part of it."""
        try:
            for messages in texts:
                self.renderer.require_rendered(messages, row.get("tools"), self.form == "rl")
        except DataError as error:
            raise DataError(f"example {row.get('prompt_id', number)}: {error}") from error

    def tokens(self, row: dict[str, Any]) -> int:
        """Return the number of tokens of a conversation, of the longer side of a pair, or of a prompt plus one."""
        return max(map(len, self.ids(row))) + (self.form == "rl")

    def ids(self, row: dict[str, Any]) -> list[Sequence[int]]:
        """Return the token ids of an example: of its prompt, its conversation, or both sides of a pair."""
        if self.form == "rl":
            return [self.renderer.render(row["messages"], row.get("tools"))]
        return [rendered.input_ids for rendered in self._rendered(row, USUAL**3)]

    def together(self, row: dict[str, Any]) -> int:
        """Return the maximum number of tokens of an example in one micro-batch. A pair counts both sides."""
        if self.form != "pairs":
            return self.tokens(row)
        return sum(min(len(ids), self.limit) for ids in self.ids(row))

    def cut(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the example to use instead of one that is too long, or None if nothing trainable would remain.

        The last message of a prompt is cut at its beginning. Other examples are cut at their end when rendered.
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
            tokens = len(tokenizer_of(self.tokenizer).encode(text, add_special_tokens=False))
            text = text[math.ceil(len(text) * surplus / max(tokens, surplus)) :]
        return None

    def _rendered(self, row: dict[str, Any], limit: int) -> Sequence[Any]:
        from rl_trainers.learners.preference import preference_sequences
        from rl_trainers.learners.supervised import supervised_sequences

        render: Callable[..., Sequence[Any]] = preference_sequences if self.form == "pairs" else supervised_sequences
        return render([row], self.renderer, limit, truncate=True)


def lengths_of(run: Run[Any], form: str, tokenizer: Any) -> Lengths:
    """Return the length limits of a run."""
    config = run.config
    limit = longest_row(config.data, config.model.directory())
    room = min(config.generation.max_new_tokens, limit // 2) if form == "rl" else 0
    return Lengths(config.data, form, tokenizer, limit, room)


def measure_rows(run: Run[Any], form: str) -> list[str]:
    """Check the lengths of all examples with the tokenizer of the run's model.

    Returns:
        Sentences: how many examples are dropped or cut, and whether a step repeats examples.

    Raises:
        ConfigError: `data.max_length` is above the context length of the model, or an example may not fit into a
            micro-batch.
        DataError: examples are too long and `data.overlong=reject`, no example remains, or the model has no embedding
            for a token of an example.
    """
    config = run.config
    lengths = lengths_of(run, form, load_tokenizer(config.model))
    train = load_rows(config.data, "train", form, config.seed)
    fitting, sentence = lengths.fit(train, "train")
    sentences = [sentence]
    _check_ids(config.model.directory(), lengths, fitting)
    if config.actor.micro_batch.max_tokens < lengths.limit * (2 if form == "pairs" else 1):
        _check_micro_batch(run, lengths, fitting)
    if config.evaluation.examples:
        test = load_rows(config.data, "test", form, config.seed)
        sentences.append(lengths.fit(held_out_rows(test, config.evaluation.examples), "test")[1])
    sentences += measure_sets(run, configs_of_sets(config), lengths.tokenizer)
    messages = [f"data.overlong={config.data.overlong}: {sentence}" for sentence in sentences if sentence]
    if form == "rl" and len(fitting) < config.data.batch_size:
        messages.append(
            f"warning: data.batch_size={config.data.batch_size} exceeds the {len(fitting)} examples of the data, so "
            "every step repeats some of them"
        )
    return messages


def measure_sets(run: Run[Any], configs: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Check the lengths of the examples of evaluation sets, as `measure_rows` does.

    Args:
        configs: config of each set by name, see `rl_apps.settings.evaluation_sets`.
        tokenizer: tokenizer or processor of the model.
    """
    sentences = []
    for name, config in configs.items():
        with naming_set(name):
            rows = held_out_rows(load_rows(config.data, "set", "rl", config.seed), config.evaluation.examples)
            lengths = lengths_of(replace(run, config=config), "rl", tokenizer)
            fitting, sentence = lengths.fit(rows, f"evaluation set {name}" if name else "held-out")
            _check_ids(config.model.directory(), lengths, fitting)
            sentences += [sentence] if sentence else []
    return sentences


def _check_ids(model: str, lengths: Lengths, rows: Rows) -> None:
    """Reject examples with token ids for which the model has no embedding.

    The check is skipped if the model's vocabulary size is unknown, or covers all ids of the tokenizer.
    """
    tokenizer = tokenizer_of(lengths.tokenizer)
    embeddings, largest = vocabulary_size(model), max(tokenizer.get_vocab().values())
    if embeddings is None or largest < embeddings:
        return
    for number in range(len(rows)):
        token_id = max(max(ids) for ids in lengths.ids(rows[number]))
        if token_id >= embeddings:
            name, token = rows[number].get("prompt_id", number), tokenizer.convert_ids_to_tokens(int(token_id))
            raise DataError(
                f"example {name} has the token {token!r} ({token_id}), but the model {model} has only {embeddings} "
                "embeddings. Resize its embeddings for this tokenizer, or use its own tokenizer."
            )


def _check_micro_batch(run: Run[Any], lengths: Lengths, rows: Rows) -> None:
    """Reject examples that may not fit into a micro-batch, with their completion or as a pair. Otherwise the run would
    fail later."""
    longest = max(lengths.together(rows[number]) for number in range(len(rows)))
    completion = run.config.generation.max_new_tokens - 1 if lengths.form == "rl" else 0
    needed = longest if lengths.form == "pairs" else min(lengths.limit, longest + completion)
    expected = f"at least {needed}, the length that the longest example may reach, or a smaller data.max_length"
    max_tokens = run.config.actor.micro_batch.max_tokens
    require(max_tokens >= needed, "actor.micro_batch.max_tokens", expected, max_tokens)


def _kind(texts: Sequence[Any], row: Mapping[str, Any]) -> Any:
    """Return the features of an example that decide which parts a chat template may drop.

    One example of each kind is checked before the run starts, and every example when it is rendered.
    """
    messages = [(index, message) for text in texts for index, message in enumerate(text)]
    keys = ("content", "tool_calls", "reasoning_content")
    return bool(row.get("tools")), frozenset((i == 0, m["role"], *(bool(m.get(k)) for k in keys)) for i, m in messages)


def _bytes(messages: Sequence[Mapping[str, Any]], overhead: int) -> int:
    return sum(
        overhead + len(json.dumps(message, ensure_ascii=False, default=str).encode(errors="replace"))
        for message in messages
    )
