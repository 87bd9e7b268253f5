"""Check the texts of examples on reading: valid UTF-8, not empty, and finite answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_contracts.chat.rendering import replace_invalid_text
from rl_contracts.config import require_choice
from rl_contracts.errors import DataError
from rl_datasets.conversations import Message, is_empty


@dataclass(frozen=True)
class FileOptions:
    """Options shared by all data sets that read files."""

    invalid_text: str = "reject"
    """Handling of text that is not UTF-8, such as half an emoji (`\\ud83d` in JSON): `reject` or `replace` it."""

    def __post_init__(self) -> None:
        require_choice("data.options.invalid_text", self.invalid_text, ("reject", "replace"))


def checked(where: str, row: dict[str, Any], options: FileOptions) -> dict[str, Any]:
    """Check that `answer` is finite and all texts are UTF-8, and return the example with invalid text replaced.

    Raises:
        DataError: `answer` is not finite, or a text is not UTF-8 and `options.invalid_text` is `reject`.
    """
    require_finite(where, row.get("answer"))
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        if options.invalid_text == "reject":
            raise DataError(
                f"{where}: expected UTF-8 text, found half a character or another encoding after "
                f"{error.object[max(error.start - 20, 0) : error.start]!r}; correct the example, or set "
                "data.options.invalid_text=replace"
            ) from None
        return {name: replace_invalid_text(value) for name, value in row.items()}
    return row


def require_finite(where: str, answer: Any) -> None:
    """Reject an answer that is or contains NaN or infinity.

    Raises:
        DataError: the answer is not finite.
    """
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f"{where}: expected a finite number in the column 'answer', found {answer}; remove the example")
    if isinstance(answer, list | Mapping):
        for inner in answer.values() if isinstance(answer, Mapping) else answer:
            require_finite(where, inner)


def reject_empty(where: str, messages: Iterable[Message]) -> None:
    """Reject a question without text, and an answer without text and tool calls.

    Raises:
        DataError: a message is empty.
    """
    for message in messages:
        if message["role"] in ("user", "assistant") and is_empty(message):
            raise DataError(
                f"{where}: expected text in every {message['role']} message, found none; remove the example"
            )
