"""Reads the text of an allocation, whose grammar heads `rl_contracts.allocation`, and points at what is wrong in it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NoReturn

from rl_contracts.errors import ConfigError

_SIZE = re.compile(r"[0-9]{1,9}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# the part after the colon of a dotted path is told from dimensions by what follows it
_BACKEND = re.compile(_IDENTIFIER.pattern + r"(:[A-Za-z_][A-Za-z0-9_.]*(?=\s*[:\[]))?")
_STRATEGY = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True, slots=True)
class Written:
    """A component as it is written, and where in the text."""

    backend: str
    name: str | None
    sizes: dict[str, int]
    """Arguments of a `ParallelStrategy`."""
    at: int
    sizes_at: int


def read(text: str) -> list[list[Written]]:
    """The device groups of an allocation, each with its components.

    Raises:
        ConfigError: the text does not follow the grammar.
    """
    return _Reader(text).groups()


def pointed_at(text: str, message: str, at: int) -> ConfigError:
    """An error that shows the text with a mark under character `at`."""
    return ConfigError(f"allocation: {message}\n  {text}\n  {' ' * at}^")


class _Reader:
    """Recursive descent over `text`; one method per rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def groups(self) -> list[list[Written]]:
        groups = [self.group()]
        while self.accept("+"):
            groups.append(self.group())
        self.blanks()
        if self.at < len(self.text):
            self.expected("another dimension, '+', '|' or the end")
        return groups

    def group(self) -> list[Written]:
        components = [self.component()]
        while self.accept("|"):
            components.append(self.component())
        return components

    def component(self) -> Written:
        self.blanks()
        at = self.at
        backend = self.match(_BACKEND, "the name of a backend, such as 'fsdp' or 'sglang'")
        name = None
        if self.accept("["):
            self.blanks()
            name = self.match(_IDENTIFIER, "the name of the component")
            self.require("]")
        self.require(":")
        self.blanks()
        sizes_at = self.at
        sizes = self.hybrid() if self.accept("(") else self.plain()
        return Written(backend, name, sizes, at, sizes_at)

    def plain(self) -> dict[str, int]:
        return {_STRATEGY[letter]: size for letter, size in self.dimensions("dtpce").items()}

    def hybrid(self) -> dict[str, int]:
        """Attention and experts split apart over the same ranks (the opening bracket is read)."""
        attention = self.part("attn", "dtpc")
        self.require("|")
        self.blanks()
        start = self.at
        experts = self.part("ffn", "dtpe")
        self.require(")")
        if attention["p"] != experts["p"]:
            self.fail(f"attn and ffn need the same p, found {attention['p']} and {experts['p']}", start)
        outer, inner = math.prod(attention.values()), math.prod(experts.values())
        if outer != inner:
            self.fail(
                f"attn and ffn run on the same ranks, so attn d*t*p*c must equal ffn d*t*p*e: "
                f"found {outer} and {inner}",
                start,
            )
        sizes = {_STRATEGY[letter]: size for letter, size in attention.items()}
        return sizes | {"expert": experts["e"], "expert_tensor": experts["t"]}

    def part(self, keyword: str, letters: str) -> dict[str, int]:
        self.blanks()
        start = self.at
        if self.match(_IDENTIFIER, f"'{keyword}:'") != keyword:
            self.at = start
            self.expected(f"'{keyword}:'")
        self.require(":")
        self.blanks()
        return self.dimensions(letters)

    def dimensions(self, letters: str) -> dict[str, int]:
        listing = ", ".join(letters)
        sizes: dict[str, int] = {}
        while not sizes or self.text[self.at : self.at + 1].isalnum():
            letter = self.text[self.at : self.at + 1]
            if not letter or letter not in letters:
                self.expected(f"a dimension (one of {listing}, then a number)")
            if letter in sizes:
                self.fail(f"dimension '{letter}' is given twice", self.at)
            self.at += 1
            start, number = self.at, self.match(_SIZE, f"the size of dimension '{letter}', a number of at least 1")
            if int(number) == 0:
                self.fail(f"expected a size of at least 1 for dimension '{letter}', found 0", start)
            sizes[letter] = int(number)
        return {letter: sizes.get(letter, 1) for letter in letters}

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        word = pattern.match(self.text, self.at)
        if word is None:
            self.expected(what)
        self.at = word.end()
        return word[0]

    def blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def accept(self, symbol: str) -> bool:
        self.blanks()
        if not self.text.startswith(symbol, self.at):
            return False
        self.at += 1
        return True

    def require(self, symbol: str) -> None:
        if not self.accept(symbol):
            self.expected(f"'{symbol}'")

    def expected(self, what: str) -> NoReturn:
        found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        self.fail(f"expected {what}, found {found}", self.at)

    def fail(self, message: str, at: int) -> NoReturn:
        raise pointed_at(self.text, message, at)
