"""Detection of stop strings in completions.

The embedded server uses it. The client uses it for servers that see only the new tokens of a resumed completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

from rl_contracts.errors import InferenceError

_LOADING = Lock()
_MARGIN = 8
"""Number of tokens decoded in addition to the longest stop string.

A character can span several tokens, and the first decoded token may lose its leading space.
"""


def completed(strings: Sequence[str], ids: Sequence[int], tokenizer: Any) -> str | None:
    """Return the first stop string that the last token of `ids` completes, or None.

    A token is at least one byte, so a stop string of b bytes lies within the last b tokens.

    Args:
        strings: stop strings, at least one.
        ids: a completion, or its last `longest_stop_length(strings)` tokens.
        tokenizer: tokenizer of the model.
    """
    tail = list(ids[-longest_stop_length(strings) :])
    text = tokenizer.decode(tail, skip_special_tokens=False)
    matches = [stop for stop in strings if stop in text]
    if not matches:
        return None
    previous_text = tokenizer.decode(tail[:-1], skip_special_tokens=False)
    # without the last token, an incomplete character decodes differently, so it counts as new text
    pairs = enumerate(zip(previous_text, text, strict=False))
    unchanged = next((index for index, (old_char, new_char) in pairs if old_char != new_char), len(previous_text))
    return next((stop for stop in matches if text.rfind(stop) + len(stop) > unchanged), None)


def longest_stop_length(strings: Sequence[str]) -> int:
    """Return how many tokens at the end of a completion must be decoded to detect any of the strings."""
    return max(len(text.encode()) for text in strings) + _MARGIN


@dataclass
class StopStrings:
    """Incremental detector of stop strings in one completion."""

    strings: Sequence[str]
    """Strings that end the completion."""
    least: int
    """Minimum number of tokens of the completion; a stop string that is complete earlier does not end it."""
    tokenizer: Any
    """Tokenizer of the model."""
    end: int | None = field(default=None, init=False)
    """Length of the completion, in tokens, up to and including its stop string; None if it has none yet."""
    _checked: int = field(default=0, init=False)

    def update(self, output_ids: list[int]) -> bool:
        """Check the new tokens of a completion and return whether it contains a stop string."""
        if self.end is None and self._checked < len(output_ids):
            tail = output_ids[max(self._checked - longest_stop_length(self.strings), 0) :]
            text = self.tokenizer.decode(tail, skip_special_tokens=False)
            if any(string in text for string in self.strings):
                self._find_completing_token(output_ids)
            self._checked = len(output_ids)
        return self.end is not None

    def forget(self, length: int) -> None:
        """Continue after the first `length` tokens, because the others were removed from the completion."""
        self.end, self._checked = None, min(self._checked, length)

    def _find_completing_token(self, output_ids: list[int]) -> None:
        """Set `end` to the first new token that completes a stop string, if there is one."""
        for length in range(max(self._checked + 1, self.least), len(output_ids) + 1):
            tail = output_ids[max(length - longest_stop_length(self.strings), 0) : length]
            if completed(self.strings, tail, self.tokenizer) is not None:
                self.end = length
                return


def tokenizer_of(model_path: str) -> Any:
    """Return the tokenizer of the servers' model. The first call loads it, which is slow.

    Raises:
        InferenceError: `model_path` is empty, or its tokenizer cannot be loaded.
    """
    remedy = "Set ServeSpec.model_path to the servers' model, or use stop_token_ids."
    if not model_path:
        raise InferenceError(f"stop strings need a tokenizer with these servers, but the model is unknown. {remedy}")
    try:
        with _LOADING:
            return _load(model_path)
    except (OSError, ValueError) as error:
        raise InferenceError(
            f"{model_path}: cannot load the tokenizer, which stop strings need: {error}. {remedy}"
        ) from error


@lru_cache(maxsize=4)
def _load(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)
