"""Sequential test of whether a server still serves the previous version. It needs no threshold in nats.

The test uses three sets of log-probs of each sequence. A reference computes b before the update and a after it. The
tested server computes s, which should equal a up to rounding. With A = sum (s - a)^2 and B = sum (s - b)^2 over the
generated tokens of a group's sequences,

    x = (A - B) / (A + B)        -1: the server computes a;  +1: it computes b

for any learning rate and dtype. If noise hides the update, a and b are exchangeable and x is symmetric about 0. If the
server is up to date, x is lower. If the mean of x is above 0 by more than chance explains, the server is behind: it
still serves the previous version.

Each comparison converts Student's t over its groups to a normal quantile, capped at `MAX_Z` because x is not normal.
The formula is from Wallace, "Bounds on normal approximations to Student's and the chi-square distributions", 1959. The
result for a server is the sum of its last n quantiles over sqrt(n), maximized over n = 2 to 20. The unit is a group
because the tokens of a sequence, and the sequences of one prompt, share their noise.

A comparison is informative only if the server's offset from the midpoint, s - (a + b) / 2, points along a - b. Its
|cosine| with that direction must be above `CLEAR`. Otherwise a systematic difference between two kernels could decide
the comparison, even if that difference is far smaller than the kernels' noise. A comparison that is not informative
counts as 0. If such comparisons were dropped, older values that added up by chance would stay in the window.

A reference must compute with the weights as they are served. If rounding to bfloat16 removes the updates of a float32
trainer, even a healthy server is closer to the previous version.

In 16 bits an update may move log-probs far less than rounding does. In a small random model at lr 1e-6, the movement
is a thirtieth of the rounding error. A reference with different kernels does not help. Even if the movement is known
exactly, 20 comparisons of 100 tokens separate a current server from a stale one by only 1.6 standard deviations.

In this case a server can be its own reference (`add_self_comparison`). Suppose that the server returns bitwise
identical log-probs twice before an update and once after it, although the update changed the trainer's log-probs. Then
the server did not receive the update. If a server's kernels depend on its load, its log-probs are not reproducible and
give no evidence.

Simulation results for comparisons of 4 groups with 30 tokens, with noise only in the server's log-probs:

- A server that is always one version behind is detected after 2 comparisons if updates move log-probs by 10 times the
  noise. It takes 4 comparisons at 2 times, 7 at 1 times and 23 at half the noise. At a third of the noise, two of three
  such servers are detected within 100 comparisons.
- With as much noise in a and in b, detection takes 6 comparisons at 2 times and 43 at 1 times the noise. At half the
  noise, the server is never detected.
- One of four servers, compared in turn, may stay at one version while the trainer continues. The server is detected
  after 4 comparisons if successive updates have correlation 0.9, and mostly after 5 at 0.5. With uncorrelated updates,
  it is hardly ever detected.
- One of two million comparisons of healthy servers raised a false alarm, with heavy-tailed noise and one token per
  group. The other cases were normal noise, Cauchy noise and noise shared by the tokens of a sequence. They had 2 to 8
  groups of 1 to 30 tokens, and updates of 0 to 1 times the noise.
- Kernels may differ systematically, and all updates may go in the direction of that difference. There is no false
  alarm if the difference is a tenth of the noise, and one false alarm at a fifth.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

WINDOW = 20
"""Number of latest comparisons of a server that count."""
LIMIT = 5.5
"""z above which a server counts as behind."""
CLEAR = 0.15
"""|cosine| of the angle between s - (a + b) / 2 and a - b above which a comparison is informative."""
MAX_Z = 4.0
"""Largest z of a single comparison. It is below `LIMIT`, so at least two comparisons are needed."""
ROUNDING = 1e-6
"""Lower bound of the standard error of the mean of x, which would be 0 if all values were equal."""


class LagTest:
    """Sequential test of one server against one kind of reference."""

    def __init__(self) -> None:
        self._scores: deque[float] = deque(maxlen=WINDOW)

    def add(self, groups: Sequence[Sequence[float]]) -> float | None:
        """Add a comparison with the reference.

        Args:
            groups: for each group the sums of squares of s - a, s - b and a - b.

        Returns:
            The largest z over n, or 0 if this comparison shows no lag. None if this comparison is the first, or is not
            informative (fewer than two groups, or no clear direction).
        """
        after, before, moved = (math.fsum(column) for column in zip(*groups, strict=True))
        values = [(a - b) / (a + b) for a, b, _ in groups if a + b]
        middle = (after + before) / 2 - moved / 4  # sum (s - (a + b) / 2)^2
        # after - before = 2 sum (s - (a + b) / 2) (b - a)
        clear = len(values) > 1 and (after - before) ** 2 > (2 * CLEAR) ** 2 * moved * middle
        return self._add_score(signed_z_score(values) if clear else None)

    def add_self_comparison(self, unchanged: bool) -> float | None:
        """Add a comparison of the server's own log-probs before and after the update.

        Args:
            unchanged: whether these log-probs are bitwise identical although the update should have changed them.

        Returns:
            z as `add` returns it, or None if `unchanged` is false.
        """
        return self._add_score(MAX_Z if unchanged else None)

    def _add_score(self, z: float | None) -> float | None:
        """Add the z of a comparison, or None if it is not informative, and return the result so far."""
        self._scores.appendleft(min(z or 0.0, MAX_Z))
        if z is None:
            return None
        if z <= 0:
            return 0.0
        sums = enumerate(accumulate(self._scores), 1)
        return max((total / math.sqrt(n) for n, total in sums if n > 1), default=None)


def signed_z_score(values: Sequence[float]) -> float:
    """Return Student's t of the hypothesis that the mean is 0, as a normal quantile with the sign of the mean."""
    count, mean = len(values), statistics.fmean(values)
    free, error = count - 1, math.sqrt(statistics.variance(values) / count)
    t = mean / max(error, ROUNDING)
    z = (8 * free + 1) / (8 * free + 3) * math.sqrt(free * math.log1p(t**2 / free))
    return math.copysign(z, mean)
