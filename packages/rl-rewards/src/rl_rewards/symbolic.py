r"""The reward for mathematical answers: equal as expressions, through math-verify.

math-verify limits its own time with SIGALRM, which works in the main thread only, and turns a time-out into "not
equal". Here its limits are off: the caller's deadline (a reward runs in a worker process that can be killed) is the
only one, and an answer that takes too long is a reward error rather than a silent zero.
"""

from __future__ import annotations

import logging
from typing import Any

from rl_contracts.errors import RewardError
from rl_rewards.extraction import last_box

MAX_CHARS = 2_000
"""Characters of an unboxed completion that are searched, from its end; math-verify's search is not linear."""


def math_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str | int | float | None = None,
    **_: Any,
) -> float:
    r"""1.0 if the answer that `completions` gives is mathematically equal to `answer`, else 0.0.

    The last `\boxed{...}` counts; without one, the line after the last `####`; without that, what math-verify finds
    in the last `MAX_CHARS` characters. Comparing two expressions may take without bound: run it under a deadline.

    Args:
        prompt: not read.
        completions: the text of one sample.
        prompt_ids: not read.
        completion_ids: not read.
        answer: the gold answer: a solution with a `\boxed{...}` or a `####` line, or a bare LaTeX or plain expression.

    Raises:
        RewardError: `answer` is missing or cannot be read as an expression.
    """
    gold = [] if answer is None else _parse(_boxed(_final_part(str(answer)) or str(answer)))
    if not gold:
        found = "no answer" if answer is None else repr(str(answer)[-80:])
        raise RewardError(
            f"expected `answer` to be a mathematical expression, found {found}; check the data row's 'answer'"
        )
    final = _final_part(completions)
    given = _parse(_boxed(final)) if final else _parse(completions[-MAX_CHARS:])
    if not given:
        return 0.0
    from math_verify import verify

    return float(verify(gold, given, timeout_seconds=None))


def _final_part(text: str) -> str | None:
    text = text.rpartition("</think>")[2]
    boxed = last_box(text)
    if boxed is not None:
        return boxed[-MAX_CHARS:]
    _, hashes, line = text.rpartition("####")
    return line.strip().split("\n")[0][:MAX_CHARS] if hashes else None


def _boxed(expression: str) -> str:
    return rf"$\boxed{{{expression.strip().strip('$')}}}$"


def _parse(text: str) -> list[Any]:
    """Expressions found in `text`; empty if there is none that can be read."""
    # imported here: sympy takes most of a second, and rewards of other kinds do not need it
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # it warns, once per process, that its time limit is off; that is what is wanted here
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, config, fallback_mode="no_fallback", parsing_timeout=None))
