"""Pages of the KV cache in each slot, and an index of the prefixes in the slots."""

from __future__ import annotations

import torch

PAGE = 128
"""Number of consecutive positions of a sequence that are stored, allocated and freed together."""
BLOCK = 32
"""Number of tokens per hashed block; shared prefixes are multiples of it."""


def pages_of(tokens: int) -> int:
    """Return the number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class PageTable:
    """Pages of each slot, the same in all layers.

    Page 0 belongs to no slot and holds zeros. Whole pages of a common prefix belong to several slots, and no slot
    writes to them.
    """

    def __init__(self, slots: int, context_length: int, device: torch.device) -> None:
        self.table = torch.zeros(slots, pages_of(context_length), dtype=torch.int64, device=device)
        """Pages of each slot in the order of its positions, [slots, pages]; 0 beyond."""
        self.count = 0
        self.of: list[list[int]] = [[] for _ in range(slots)]
        self.free: list[int] = []
        self._owners: list[int] = []

    def reset(self, count: int) -> None:
        """Set the number of pages to `count`, including page 0, all free."""
        self.count = count
        self._owners = [0] * count
        self.free = list(range(count - 1, 0, -1))
        self.of = [[] for _ in self.of]
        self.table.zero_()

    def assign(self, slot: int, pages: list[int]) -> None:
        """Replace the pages of a slot by `pages`, in the order of its positions.

        Pages without an owner become free.
        """
        previous, self.of[slot] = self.of[slot], pages
        for page in pages:
            self._owners[page] += 1
        for page in previous:
            self._owners[page] -= 1
            if not self._owners[page]:
                self.free.append(page)
        self.table[slot] = 0
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64, device=self.table.device)


class PrefixIndex:
    """Index of sequences by their prefixes, under one version of the weights.

    Lookup uses hashes of whole blocks and of the whole sequence, and verifies candidates by comparing tokens. The
    content of a slot stays usable until the slot is assigned again, even after its job has ended.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, tuple[list[int], list[int]]] = {}
        self._slot_of: dict[int, int] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._sequences

    def hold(self, slot: int, tokens: list[int]) -> None:
        """Register that `slot` contains keys and values of `tokens` from position 0 on."""
        self.forget(slot)
        keys = prefix_keys(tokens)
        self._sequences[slot] = tokens, keys
        self._slot_of.update(dict.fromkeys(keys, slot))

    def find(self, tokens: list[int], keys: list[int] | None = None) -> tuple[int, int] | None:
        """Return the longest indexed prefix that leaves at least one token to prefill.

        Args:
            keys: `prefix_keys(tokens)`, if already computed.

        Returns:
            Slot and length, or None.
        """
        for key in reversed(keys or prefix_keys(tokens)):
            slot = self._slot_of.get(key)
            if slot is None:
                continue
            cached, _ = self._sequences[slot]
            longest = min(len(cached), len(tokens))
            shared = longest if cached[:longest] == tokens[:longest] else longest // BLOCK * BLOCK
            while shared and cached[:shared] != tokens[:shared]:
                shared -= BLOCK
            if shared > 0:
                return slot, min(shared, len(tokens) - 1)
        return None

    def length(self, slot: int) -> int:
        """Return the number of tokens in a slot."""
        return len(self._sequences[slot][0])

    def forget(self, slot: int) -> None:
        """Remove the sequence of a slot from the index."""
        _, keys = self._sequences.pop(slot, ((), ()))
        for key in keys:
            if self._slot_of.get(key) == slot:
                del self._slot_of[key]

    def clear(self) -> None:
        """Remove all sequences; call it when the weights change."""
        self._sequences.clear()
        self._slot_of.clear()


def prefix_keys(tokens: list[int]) -> list[int]:
    """Return the chained hashes of the whole blocks, followed by the hash of all tokens."""
    keys, last = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        last = hash((last, *tokens[start : start + BLOCK]))
        keys.append(last)
    keys.append(hash((last, "end", *tokens[len(keys) * BLOCK :])))
    return keys
