"""The "model" of the null inference engine: fixed logits per position, so that sampling and scoring agree exactly."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_PERIOD = 16


class NullModel:
    """A distribution over `vocab_size` tokens that depends on the position alone (modulo 16).

    Prompt ids beyond the vocabulary count as their remainder by its size.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        import numpy as np

        self.vocab_size = vocab_size
        self._logits = np.random.default_rng([seed, vocab_size]).normal(size=(_PERIOD, vocab_size)) * 2.0
        self._tables = lru_cache(maxsize=64)(self._make_tables)
        self._lists = lru_cache(maxsize=64)(self._make_lists)
        self._rows = lru_cache(maxsize=1024)(self._make_rows)

    def sample(
        self, length: int, start: int, temperature: float, banned: frozenset[int], rng: np.random.Generator
    ) -> np.ndarray:
        """`length` tokens from position `start` on, none of them banned: int64 [length]."""
        import numpy as np

        _, cumulative, likeliest = self._tables(temperature, banned)
        rows = (start + np.arange(length)) % _PERIOD
        if temperature == 0:
            return likeliest[rows]
        draws = rng.random(length)[:, None]
        return (cumulative[rows] <= draws).sum(1)

    def logprobs(self, ids: np.ndarray, start: int, temperature: float) -> list[float]:
        """log_softmax(logits / temperature) of each id, the first of which stands at position `start`; [len(ids)]."""
        rows = self._rows(temperature, start % _PERIOD, -(-len(ids) // _PERIOD))
        return [row[token] for row, token in zip(rows, (ids % self.vocab_size).tolist(), strict=False)]

    def _make_rows(self, temperature: float, start: int, periods: int) -> list[list[float]]:
        """Log-probs over the vocabulary of each position from `start` on, [periods * 16][vocab_size].

        Lists, so that all answers share the numbers: an array would make new ones for every answer, and many
        outstanding answers would spend their time on memory.
        """
        rows = self._lists(temperature)
        return [*rows[start:], *rows[:start]] * periods

    def _make_lists(self, temperature: float) -> list[list[float]]:
        """The log-probs of `_tables` as lists."""
        table, _, _ = self._tables(temperature, frozenset())
        rows: list[list[float]] = table.tolist()
        return rows

    def _make_tables(self, temperature: float, banned: frozenset[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probs over everything; cumulative distribution and likeliest token over what is not banned."""
        import numpy as np

        scaled = self._logits / (temperature or 1.0)
        table = scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
        table -= scaled.max(1, keepdims=True)
        allowed = np.exp(table)
        allowed[:, [b for b in banned if 0 <= b < self.vocab_size]] = 0.0
        cumulative = np.cumsum(allowed, axis=1)
        cumulative /= cumulative[:, -1:]
        return table, cumulative, allowed.argmax(1)


def request_rng(model_seed: int, seed: int | None, input_ids: list[int]) -> np.random.Generator:
    """Randomness of one request; that of a greedy one (seed None) comes from its prompt alone."""
    import numpy as np

    text = b"%d %d " % (model_seed, -1 if seed is None else seed % 2**63) + repr(input_ids).encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(blake2b(text, digest_size=8).digest())))
