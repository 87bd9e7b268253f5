"""The "model" of the null inference engine: fixed logits per position, so that sampling and scoring agree exactly."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_PERIOD = 16


class NullModel:
    """Distribution over `vocab_size` tokens that depends only on the position (modulo 16).

    Prompt ids beyond the vocabulary are taken modulo its size.
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
        """Sample `length` tokens, starting at position `start`, without the banned ones; int64 [length]."""
        import numpy as np

        _, cumulative, greedy = self._tables(temperature, banned)
        rows = (start + np.arange(length)) % _PERIOD
        if temperature == 0:
            return greedy[rows]
        draws = rng.random(length)[:, None]
        return (cumulative[rows] <= draws).sum(1)

    def logprobs(self, ids: np.ndarray, start: int, temperature: float) -> list[float]:
        """Return log_softmax(logits / temperature) of each id, [len(ids)]; the first id is at position `start`."""
        rows = self._rows(temperature, start % _PERIOD, -(-len(ids) // _PERIOD))
        return [row[token] for row, token in zip(rows, (ids % self.vocab_size).tolist(), strict=False)]

    def _make_rows(self, temperature: float, start: int, periods: int) -> list[list[float]]:
        """Return the log-probs over the vocabulary for positions from `start` on, [periods * 16][vocab_size].

        Lists let all completions share the float objects. Reading an array would allocate new ones per completion,
        which is slow with many outstanding completions.
        """
        rows = self._lists(temperature)
        return [*rows[start:], *rows[:start]] * periods

    def _make_lists(self, temperature: float) -> list[list[float]]:
        """Return the log-probs of `_tables` as lists."""
        table, _, _ = self._tables(temperature, frozenset())
        rows: list[list[float]] = table.tolist()
        return rows

    def _make_tables(self, temperature: float, banned: frozenset[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return log-probs over the vocabulary, and the cumulative distribution and argmax over allowed tokens."""
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
    """Return the random generator of a request. Without a seed (greedy requests) it depends on the prompt alone."""
    import numpy as np

    text = b"%d %d " % (model_seed, -1 if seed is None else seed % 2**63) + repr(input_ids).encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(blake2b(text, digest_size=8).digest())))
