"""Which slots hold which token prefixes, so that a prompt is not read twice."""

from __future__ import annotations

from rl_inference.server.cache import BLOCK


class PrefixIndex:
    """Sequences by their prefixes, under one version of the weights.

    A sequence is found by hashes of its whole blocks and of all of it; a hash only proposes, tokens decide. What a slot
    held stays usable until the slot is given away, also after its job has ended.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}
        self._keys: dict[int, list[int]] = {}
        self._slot_of: dict[int, int] = {}

    def hold(self, slot: int, tokens: list[int]) -> None:
        """Keys and values of `tokens` are in `slot` from position 0 on."""
        self.forget(slot)
        keys = _keys(tokens)
        self._held[slot], self._keys[slot] = tokens, keys
        for key in keys:
            self._slot_of[key] = slot

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """The longest known prefix that leaves at least one token to be read.

        Returns:
            slot and length, or None.
        """
        for key in reversed(_keys(tokens)):
            slot = self._slot_of.get(key)
            if slot is None:
                continue
            held = self._held[slot]
            longest = min(len(held), len(tokens))
            shared = longest if held[:longest] == tokens[:longest] else longest // BLOCK * BLOCK
            while shared and held[:shared] != tokens[:shared]:
                shared -= BLOCK
            if shared > 0:
                return slot, min(shared, len(tokens) - 1)
        return None

    def forget(self, slot: int) -> None:
        """The slot gets another sequence."""
        self._held.pop(slot, None)
        for key in self._keys.pop(slot, ()):
            if self._slot_of.get(key) == slot:
                del self._slot_of[key]

    def clear(self) -> None:
        """The weights changed: nothing that was read before may be used."""
        self._held.clear()
        self._keys.clear()
        self._slot_of.clear()


def _keys(tokens: list[int]) -> list[int]:
    """Chained hashes of the whole blocks, and last that of all tokens."""
    keys, last = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        last = hash((last, *tokens[start : start + BLOCK]))
        keys.append(last)
    keys.append(hash((last, "end", *tokens[len(keys) * BLOCK :])))
    return keys
