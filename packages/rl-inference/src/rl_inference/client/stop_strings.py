"""Stop strings: found by the embedded server in its answers, and by the client in those of servers that see of a
resumed answer its new tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

from rl_contracts.errors import InferenceError

_LOADING = Lock()
_MARGIN = 8
"""Tokens decoded beyond the longest stop string: a character can span tokens, and the first one may lose a
leading space."""


def completed(strings: Sequence[str], ids: Sequence[int], tokenizer: Any) -> str | None:
    """The first stop string that the last of `ids` completes.

    A token is at least one byte, so a stop string of b bytes ends within the last b tokens.

    Args:
        strings: stop strings, at least one.
        ids: an answer, or its end: `reach(strings)` tokens are enough.
        tokenizer: of the model.
    """
    tail = list(ids[-longest_stop_length(strings) :])
    text = tokenizer.decode(tail, skip_special_tokens=False)
    found = [stop for stop in strings if stop in text]
    if not found:
        return None
    before = tokenizer.decode(tail[:-1], skip_special_tokens=False)
    # a character that was not whole yet is new
    pairs = enumerate(zip(before, text, strict=False))
    old = next((place for place, (was, now) in pairs if was != now), len(before))
    return next((stop for stop in found if text.rfind(stop) + len(stop) > old), None)


def longest_stop_length(strings: Sequence[str]) -> int:
    """Tokens at the end of an answer that say whether one of the strings is complete."""
    return max(len(text.encode()) for text in strings) + _MARGIN


@dataclass
class StopStrings:
    """Looks for stop strings in an answer as it comes."""

    strings: Sequence[str]
    """What ends the answer."""
    least: int
    """Tokens that it must have; a string that is complete before stays where it is."""
    tokenizer: Any
    """Of the model."""
    end: int | None = field(default=None, init=False)
    """Tokens of the answer with the one that ends it; None while it goes on."""
    _looked: int = field(default=0, init=False)

    def update(self, output_ids: list[int]) -> bool:
        """Look at what is new in an answer; whether it is complete."""
        if self.end is None and self._looked < len(output_ids):
            tail = output_ids[max(self._looked - longest_stop_length(self.strings), 0) :]
            text = self.tokenizer.decode(tail, skip_special_tokens=False)
            if any(string in text for string in self.strings):
                self._find_completing_token(output_ids)
            self._looked = len(output_ids)
        return self.end is not None

    def forget(self, length: int) -> None:
        """The answer was cut to so many tokens; look at what comes after them anew."""
        self.end, self._looked = None, min(self._looked, length)

    def _find_completing_token(self, output_ids: list[int]) -> None:
        """Find the new token that completes a string, if there is one."""
        for length in range(max(self._looked + 1, self.least), len(output_ids) + 1):
            tail = output_ids[max(length - longest_stop_length(self.strings), 0) : length]
            if completed(self.strings, tail, self.tokenizer) is not None:
                self.end = length
                return


def tokenizer_of(model_path: str) -> Any:
    """The tokenizer of the servers' model; loading it, once, takes a while.

    Raises:
        InferenceError: no model is known, or its tokenizer cannot be loaded.
    """
    remedy = "Give the client the servers' model (ServeSpec.model_path), or use stop_token_ids."
    if not model_path:
        raise InferenceError(f"stop strings with these servers need a tokenizer, and no model is known. {remedy}")
    try:
        with _LOADING:
            return _load(model_path)
    except (OSError, ValueError) as error:
        raise InferenceError(f"{model_path}: no tokenizer to look for stop strings with: {error}. {remedy}") from error


@lru_cache(maxsize=4)
def _load(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)
