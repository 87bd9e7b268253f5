"""`rl figures`: what the figures of a run mean, for the terminal and as the page `docs/figures.md`."""

from __future__ import annotations

from itertools import groupby

from rl_contracts.errors import ConfigError, did_you_mean
from rl_contracts.runtime.metric_docs import MEANINGS, meaning


def table(name: str = "") -> str:
    """Figures with their units and meanings as lines.

    Args:
        name: of a figure, or what its name begins with; empty: all.

    Raises:
        ConfigError: no figure of ours is called so.
    """
    found = {known: said for known, said in MEANINGS.items() if known.startswith(name)}
    exact = meaning(name) if name else None
    if exact is not None:
        found = {name: exact, **{known: said for known, said in found.items() if known != name}}
    if not found:
        near = did_you_mean(name, [*dict.fromkeys(known.partition("/")[0] for known in MEANINGS), *MEANINGS])
        raise ConfigError(
            f"{name!r}: expected a figure of ours or the beginning of one, found none.{near} "
            "`rl figures` lists them; others are recorded by a reward, workflow, agent or loss."
        )
    widths = [max(map(len, column)) for column in ((*found,), (said.unit for said in found.values()))]
    lines = [f"{known:<{widths[0]}}  {said.unit:<{widths[1]}}  {said.text}" for known, said in found.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page of all figures, in Markdown."""
    parts = [
        "# Figures",
        "What stands in the lines of a run's `metrics.jsonl`, one JSON object for each training step, and for each\n"
        "evaluation before the first and after the last (`evaluation` is true). null is what could not be measured.\n"
        "`rl figures` prints this table. It is made of `rl_contracts.runtime.metric_docs`, by\n"
        "`uv run rl figures --markdown > docs/figures.md`. `<...>` in a name stands for any word. What a reward,\n"
        "workflow, agent or loss of one's own records has the name that it gives it.",
    ]
    for section, rows in groupby(MEANINGS.items(), key=lambda row: row[1].section):
        lines = [f"| `{name}` | {said.unit} | {said.text.replace('|', chr(92) + '|')} |" for name, said in rows]
        parts += [f"## {section}", "\n".join(["| figure | unit | meaning |", "|---|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"
