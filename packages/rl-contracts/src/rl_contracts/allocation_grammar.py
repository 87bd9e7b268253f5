"""Reads the allocation grammar, which `rl_contracts.allocation` describes, and points at what is wrong in a text."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NoReturn

from rl_contracts.allocation import (
    DEFAULT_NAMES,
    Allocation,
    Component,
    ComponentKind,
    ParallelStrategy,
    find_conflict,
)
from rl_contracts.errors import ConfigError

_SIZE = re.compile(r"[0-9]{1,9}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class AllocationParser:
    """Recursive descent over `text`; one method per rule of the grammar."""

    def __init__(self, text: str, inference_backends: Collection[str]) -> None:
        self.text = text
        self.at = 0
        self.inference_backends = inference_backends

    def parse(self) -> Allocation:
        starts: list[int] = []
        groups = [self.group(starts)]
        while self.accept("+"):
            groups.append(self.group(starts))
        self.blanks()
        if self.at < len(self.text):
            self.expected("another dimension, '+', '|' or the end")
        conflict = find_conflict(tuple(groups))
        if conflict is not None:
            self.fail(conflict[1], starts[conflict[0]])
        return Allocation(tuple(groups))

    def group(self, starts: list[int]) -> tuple[Component, ...]:
        components = [self.component(starts)]
        while self.accept("|"):
            components.append(self.component(starts))
        return tuple(components)

    def component(self, starts: list[int]) -> Component:
        self.blanks()
        starts.append(self.at)
        backend = self.identifier("the name of a backend, such as 'fsdp' or 'sglang'")
        kind = ComponentKind.INFERENCE if backend in self.inference_backends else ComponentKind.TRAIN
        name = DEFAULT_NAMES[kind]
        if self.accept("["):
            name = self.identifier("the name of the component")
            self.require("]")
        self.require(":")
        self.blanks()
        strategy = self.hybrid() if self.accept("(") else self.plain()
        return Component(backend, name, strategy, kind)

    def plain(self) -> ParallelStrategy:
        start = self.at
        size = self.dimensions("dtpce")
        try:
            return ParallelStrategy(size["d"], size["t"], size["p"], size["c"], size["e"])
        except ConfigError as error:
            self.fail(str(error), start)

    def hybrid(self) -> ParallelStrategy:
        """Attention and experts split apart over the same ranks (the opening bracket is read)."""
        attention = self.part("attn", "dtpc")
        self.require("|")
        self.blanks()
        start = self.at
        experts = self.part("ffn", "dtpe")
        self.require(")")
        if attention["p"] != experts["p"]:
            self.fail(f"attn and ffn need the same p, found {attention['p']} and {experts['p']}", start)
        outer = attention["d"] * attention["t"] * attention["p"] * attention["c"]
        inner = experts["d"] * experts["t"] * experts["p"] * experts["e"]
        if outer != inner:
            self.fail(
                f"attn and ffn run on the same ranks, so attn d*t*p*c must equal ffn d*t*p*e: "
                f"found {outer} and {inner}",
                start,
            )
        return ParallelStrategy(
            attention["d"], attention["t"], attention["p"], attention["c"], experts["e"], experts["t"]
        )

    def part(self, keyword: str, letters: str) -> dict[str, int]:
        self.blanks()
        start = self.at
        if self.identifier(f"'{keyword}:'") != keyword:
            self.at = start
            self.expected(f"'{keyword}:'")
        self.require(":")
        self.blanks()
        return self.dimensions(letters)

    def dimensions(self, letters: str) -> dict[str, int]:
        listing = ", ".join(letters)
        sizes: dict[str, int] = {}
        while self.at < len(self.text) and (self.text[self.at].isalnum() or not sizes):
            letter = self.text[self.at]
            if letter not in letters:
                self.expected(f"a dimension (one of {listing}, then a number)")
            if letter in sizes:
                self.fail(f"dimension '{letter}' is given twice", self.at)
            number = _SIZE.match(self.text, self.at + 1)
            if number is None:
                self.at += 1
                self.expected(f"the size of dimension '{letter}', a number of at least 1")
            if int(number[0]) == 0:
                self.fail(f"expected a size of at least 1 for dimension '{letter}', found 0", self.at + 1)
            sizes[letter] = int(number[0])
            self.at = number.end()
        if not sizes:
            self.expected(f"a dimension (one of {listing}, then a number)")
        return {letter: sizes.get(letter, 1) for letter in letters}

    def identifier(self, what: str) -> str:
        self.blanks()
        word = _IDENTIFIER.match(self.text, self.at)
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
        raise ConfigError(f"allocation: {message}\n  {self.text}\n  {' ' * at}^")
