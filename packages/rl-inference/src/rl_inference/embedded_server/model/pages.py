"""What the slots hold: pages of the cache, and which prefixes are in them."""

from __future__ import annotations

import torch

PAGE = 128
"""Positions of a sequence that lie next to each other in the cache, and are given and taken back together."""
BLOCK = 32
"""Prefixes are found by multiples of this."""


def pages_of(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE)


class PageTable:
    """Which pages belong to which slot, the same in all layers. Page 0 is nobody's, and holds zeros.

    Whole pages of a common prefix belong to several slots; nobody writes to them.
    """

    def __init__(self, slots: int, context_length: int, device: torch.device) -> None:
        self.table = torch.zeros(slots, pages_of(context_length), dtype=torch.int64, device=device)
        """Pages of each slot in the order of its positions, [slots, pages]; 0 beyond."""
        self.count = 0
        self.of: list[list[int]] = [[] for _ in range(slots)]
        self.free: list[int] = []
        self._owners: list[int] = []

    def reset(self, count: int) -> None:
        """Have `count` pages, page 0 among them, all free."""
        self.count = count
        self._owners = [0] * count
        self.free = list(range(count - 1, 0, -1))
        self.of = [[] for _ in self.of]
        self.table.zero_()

    def assign(self, slot: int, pages: list[int]) -> None:
        """Let a slot have these pages, in the order of its positions, and no others. What nobody has is free."""
        before, self.of[slot] = self.of[slot], pages
        for page in pages:
            self._owners[page] += 1
        for page in before:
            self._owners[page] -= 1
            if not self._owners[page]:
                self.free.append(page)
        self.table[slot] = 0
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64, device=self.table.device)


class PrefixIndex:
    """Sequences by their prefixes, under one version of the weights.

    A sequence is found by hashes of its whole blocks and of all of it; a hash only proposes, tokens decide. What a slot
    held stays usable until the slot is given away, also after its job has ended.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[list[int], list[int]]] = {}
        self._slot_of: dict[int, int] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._held

    def hold(self, slot: int, tokens: list[int]) -> None:
        """Keys and values of `tokens` are in `slot` from position 0 on."""
        self.forget(slot)
        keys = prefix_keys(tokens)
        self._held[slot] = tokens, keys
        self._slot_of.update(dict.fromkeys(keys, slot))

    def find(self, tokens: list[int], keys: list[int] | None = None) -> tuple[int, int] | None:
        """The longest known prefix that leaves at least one token to be read.

        Args:
            keys: `prefix_keys(tokens)`, where it is known.

        Returns:
            slot and length, or None.
        """
        for key in reversed(keys or prefix_keys(tokens)):
            slot = self._slot_of.get(key)
            if slot is None:
                continue
            held, _ = self._held[slot]
            longest = min(len(held), len(tokens))
            shared = longest if held[:longest] == tokens[:longest] else longest // BLOCK * BLOCK
            while shared and held[:shared] != tokens[:shared]:
                shared -= BLOCK
            if shared > 0:
                return slot, min(shared, len(tokens) - 1)
        return None

    def length(self, slot: int) -> int:
        """How many tokens a slot holds."""
        return len(self._held[slot][0])

    def forget(self, slot: int) -> None:
        """The slot gets another sequence."""
        _, keys = self._held.pop(slot, ((), ()))
        for key in keys:
            if self._slot_of.get(key) == slot:
                del self._slot_of[key]

    def clear(self) -> None:
        """The weights changed: nothing that was read before may be used."""
        self._held.clear()
        self._slot_of.clear()


def prefix_keys(tokens: list[int]) -> list[int]:
    """Chained hashes of the whole blocks, and last that of all tokens."""
    keys, last = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        last = hash((last, *tokens[start : start + BLOCK]))
        keys.append(last)
    keys.append(hash((last, "end", *tokens[len(keys) * BLOCK :])))
    return keys
