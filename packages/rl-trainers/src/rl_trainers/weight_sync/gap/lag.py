"""Does a server still serve the version before? A sequential test that needs no threshold in nats.

Of each row three sets of log-probs are known: a reference's before the update, b, and after it, a, and those of the
server that is looked at, s, which ought to be a but for rounding. With A = sum (s - a)^2 and B = sum (s - b)^2 over the
generated tokens of a group's rows,

    x = (A - B) / (A + B)        -1: the server's are a;  +1: they are b

whatever the learning rate and the dtype. Where noise alone decides, a and b are exchangeable and x is symmetric about
0; where the server is up to date, x is lower. So a mean of x above 0 that chance does not explain names a server that
is behind. Each look gives Student's t over its groups as a normal quantile (Wallace, "Bounds on normal approximations
to Student's and the chi-square distributions", 1959), cut at `MAX_COMPARISONS` because x is not normal, and the last n
looks at the server, n = 2 to 20, their sum over sqrt(n). Groups are what is counted, because the tokens of a row, and
rows of one prompt, share their noise.

A look speaks only where the server's distance from the middle, s - (a + b) / 2, has a direction along a - b: a |cosine|
above `CLEAR`. Otherwise a difference between two kernels that has a direction, however small beside their noise, would
decide it. Such a look counts as 0: left out, it would make room for older ones that chance once put together. For the
same reason a reference must compute with the weights as they are served: where rounding to bfloat16 swallows the
updates of a trainer that keeps float32, a healthy server *is* nearer to the version before.

In 16 bits an update may move log-probs by far less than rounding does (at lr 1e-6 by a thirtieth, in a small random
model), and a reference with kernels of its own does not help: 20 looks of 100 tokens, each against the exact movement,
put 1.6 standard deviations between a server that is up to date and one that is not. There a server may be its own
reference (`add_self_comparison`): one that repeats its log-probs to the last bit when it is asked twice, and gives them
a third time after an update that changed the trainer's, did not receive it. A server whose kernels depend on what else
it computes at the moment does not repeat itself, and that says nothing.

Simulated looks of 4 groups with 30 tokens, where the noise is the server's alone. *Named*: a server that is always one
version behind, after 2 looks where the update moved log-probs by ten times the noise, 4 at twice, 7 at once, 23 at half
of it; at a third two of three within 100. With as much noise in a and in b 6 looks at twice, 43 at once, none at half.
One that stays behind while the trainer goes on, of four in turn: 4 looks where successive updates resemble each other
(correlation 0.9), mostly 5 at 0.5; hardly ever where they have nothing in common. *Accused*: one of two million healthy
looks, where noise had heavy tails and a group a single token (others: normal noise, Cauchy, shared by the tokens of a
row; 2 to 8 groups of 1 to 30 tokens; updates of 0 to 1 times the noise). None where kernels differ systematically by a
tenth of their noise and all updates go that way; at a fifth of it a healthy server is accused.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

MIN_COMPARISONS = 20
"""Looks at a server that count; what is older is forgotten."""
LIMIT = 5.5
"""z above which a server is behind."""
CLEAR = 0.15
"""Least |cosine| between the server's distance from the middle of a and b, and the reference's movement."""
MAX_COMPARISONS = 4.0
"""z of a single look, at most: two are needed."""
ROUNDING = 1e-6
"""Error of a mean of x where all values are the same."""


class LagTest:
    """What the looks at one server say, against one kind of reference."""

    def __init__(self) -> None:
        self._looks: deque[float] = deque(maxlen=MIN_COMPARISONS)

    def add(self, groups: Sequence[Sequence[float]]) -> float | None:
        """One more look.

        Args:
            groups: of each group the sums of squares s - a, s - b and a - b.

        Returns:
            z so far, of the most suspicious n; 0 if this look speaks for the server; None if it says nothing: fewer
            than two groups, no direction, or the first look.
        """
        after, before, moved = (math.fsum(column) for column in zip(*groups, strict=True))
        values = [(a - b) / (a + b) for a, b, _ in groups if a + b]
        middle = (after + before) / 2 - moved / 4  # sum (s - (a + b) / 2)^2
        # after - before = 2 sum (s - (a + b) / 2) (b - a)
        clear = len(values) > 1 and (after - before) ** 2 > (2 * CLEAR) ** 2 * moved * middle
        return self._add_score(signed_z_score(values) if clear else None)

    def add_self_comparison(self, still: bool) -> float | None:
        """One more look, at the server's own log-probs before and after the update.

        Args:
            still: they are the same to the last bit, where they had to change.

        Returns:
            As `update_completion`; None where they are not still.
        """
        return self._add_score(MAX_COMPARISONS if still else None)

    def _add_score(self, z: float | None) -> float | None:
        """Count a look that gave z, or said nothing."""
        self._looks.appendleft(min(z or 0.0, MAX_COMPARISONS))
        if z is None:
            return None
        if z <= 0:
            return 0.0
        sums = enumerate(accumulate(self._looks), 1)
        return max((total / math.sqrt(n) for n, total in sums if n > 1), default=None)


def signed_z_score(values: Sequence[float]) -> float:
    """How little chance explains a mean other than 0: Student's t as a normal quantile, with the mean's sign."""
    count, mean = len(values), statistics.fmean(values)
    free, error = count - 1, math.sqrt(statistics.variance(values) / count)
    t = mean / max(error, ROUNDING)
    z = (8 * free + 1) / (8 * free + 3) * math.sqrt(free * math.log1p(t**2 / free))
    return math.copysign(z, mean)
