"""Parser of allocation texts, with errors that mark the wrong character. `rl_contracts.allocation` has the grammar."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rl_contracts.errors import ConfigError

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_.-]*"
# a name after a colon belongs to a dotted path only if ':' or '[' follows; else it starts the dimensions
_BACKEND = _IDENTIFIER + r"(:[A-Za-z_][A-Za-z0-9_.]*(?=\s*[:\[]))?"
_STRATEGY = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True, slots=True)
class ParsedComponent:
    """Component of an allocation text, and its position in it."""

    backend: str
    name: str
    """Name in brackets, or empty."""
    sizes: dict[str, int]
    """Arguments of a `ParallelStrategy`."""
    at: int
    """Index of the component's first character in the text."""
    sizes_at: int
    """Index of the first character of its dimensions."""


def with_caret(text: str, message: str, at: int) -> ConfigError:
    """Return an error that shows the text with a caret under character `at`."""
    return ConfigError(f"allocation: {message}\n  {text}\n  {' ' * at}^")


class Reader:
    """Recursive-descent parser of `text`, with one method per rule of the grammar.

    Raises:
        ConfigError: the text does not follow the grammar.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def groups(self) -> list[list[ParsedComponent]]:
        """Parse the whole text into device groups, each a list of components."""
        groups = [[self.component()]]
        while sign := self.take(r"[+|]"):
            if sign == "+":
                groups.append([])
            groups[-1].append(self.component())
        self.take(r"\Z", "another dimension, '+', '|' or the end")
        return groups

    def component(self) -> ParsedComponent:
        """Parse one component."""
        backend = self.take(_BACKEND, "the name of a backend, such as 'fsdp' or 'sglang'")
        at, name = self.at - len(backend), ""
        if backend.partition(":")[0] == "archon":
            raise with_caret(
                self.text, "archon is an engine of AReaL that is not available here; use fsdp or megatron", at
            )
        if self.take(r"\["):
            name = self.take(_IDENTIFIER, "the name of the component")
            self.take("]", "']'")
        self.take(": *", "':'")
        sizes_at = self.at
        sizes = self.hybrid() if self.take(r"\(") else self.dimensions("dtpce")
        return ParsedComponent(backend, name, sizes, at, sizes_at)

    def hybrid(self) -> dict[str, int]:
        """Parse separate layouts of attention and experts over the same ranks, after the opening parenthesis.

        Default sizes of `ffn`, as in AReaL: the p of `attn`, and the d that fills the ranks of `attn`.
        """
        self.take("attn *: *", "'attn:'")
        attention = self.dimensions("dtpc")
        self.take(r"\| *", "'|'")
        start = self.at
        self.take("ffn *: *", "'ffn:'")
        experts = {"pipeline": attention["pipeline"], **self.explicit_dimensions("dtpe")}
        self.take(r"\)", "')'")
        ranks_per_replica = math.prod(size for name, size in experts.items() if name != "data")
        experts = {
            "tensor": 1,
            "expert": 1,
            "data": max(math.prod(attention.values()) // ranks_per_replica, 1),
        } | experts
        if attention["pipeline"] != experts["pipeline"]:
            raise with_caret(
                self.text,
                f"attn and ffn need the same p, found {attention['pipeline']} and {experts['pipeline']}",
                start,
            )
        attention_ranks, expert_ranks = math.prod(attention.values()), math.prod(experts.values())
        if attention_ranks != expert_ranks:
            raise with_caret(
                self.text,
                f"attn and ffn run on the same ranks, so attn d*t*p*c must equal ffn d*t*p*e: "
                f"found {attention_ranks} and {expert_ranks}",
                start,
            )
        return attention | {"expert": experts["expert"], "expert_tensor": experts["tensor"]}

    def dimensions(self, letters: str) -> dict[str, int]:
        """Parse sizes, keyed by the field names of `ParallelStrategy`; missing sizes are 1."""
        return dict.fromkeys((_STRATEGY[letter] for letter in letters), 1) | self.explicit_dimensions(letters)

    def explicit_dimensions(self, letters: str) -> dict[str, int]:
        """Parse sizes, keyed by the field names of `ParallelStrategy`, without defaults for missing sizes."""
        sizes: dict[str, int] = {}
        while not sizes or self.text[self.at : self.at + 1].isalnum():
            letter = self.match(f"[{letters}]", f"a dimension (one of {', '.join(letters)}, then a number)")
            if letter in sizes:
                raise with_caret(self.text, f"dimension '{letter}' is given twice", self.at - 1)
            size = self.match("[0-9]{1,9}", f"the size of dimension '{letter}', a number of at least 1")
            if int(size) == 0:
                raise with_caret(
                    self.text, f"expected a size of at least 1 for dimension '{letter}', found 0", self.at - len(size)
                )
            sizes[letter] = int(size)
        return {_STRATEGY[letter]: size for letter, size in sizes.items()}

    def take(self, pattern: str, expected: str = "") -> str:
        """Skip spaces, then `match`."""
        self.match(" *")
        return self.match(pattern, expected)

    def match(self, pattern: str, expected: str = "") -> str:
        """Consume and return the text at the current position that matches a pattern.

        Returns:
            the text; empty if it does not match and `expected` is empty.

        Raises:
            ConfigError: the text does not match, and `expected` is not empty.
        """
        word = re.compile(pattern).match(self.text, self.at)
        if word is None and expected:
            character = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
            raise with_caret(
                self.text, f"expected {expected}, found {character}; example: embedded:d1+fsdp:d1", self.at
            )
        if word is None:
            return ""
        self.at = word.end()
        return word[0]
