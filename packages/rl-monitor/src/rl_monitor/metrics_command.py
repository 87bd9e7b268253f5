"""`rl metrics`: explain the metrics of a run, in the terminal and as the page `docs/metrics.md`."""

from __future__ import annotations

from itertools import groupby

from rl_contracts.errors import ConfigError, did_you_mean
from rl_contracts.runtime.metric_docs import MEANINGS, meaning


def table(name: str = "") -> str:
    """Return one line per metric with its name, unit and meaning.

    Args:
        name: name or prefix of metrics, or an empty string for all.

    Raises:
        ConfigError: no documented metric has this name or prefix.
    """
    matches = {metric: entry for metric, entry in MEANINGS.items() if metric.startswith(name)}
    exact = meaning(name) if name else None
    if exact is not None:
        matches = {name: exact, **{metric: entry for metric, entry in matches.items() if metric != name}}
    if not matches:
        near = did_you_mean(name, [*dict.fromkeys(metric.partition("/")[0] for metric in MEANINGS), *MEANINGS])
        raise ConfigError(
            f"{name!r}: expected the name or prefix of a documented metric, found none.{near} `rl metrics` lists "
            "them; custom rewards, workflows, agents and losses record others."
        )
    widths = [max(map(len, column)) for column in ((*matches,), (entry.unit for entry in matches.values()))]
    lines = [f"{metric:<{widths[0]}}  {entry.unit:<{widths[1]}}  {entry.text}" for metric, entry in matches.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the Markdown page of all metrics."""
    parts = [
        "# Metrics",
        "Fields of the records in `metrics.jsonl` of a run. The file has one JSON object per training step, and one\n"
        "for each evaluation before the first and after the last step (`evaluation` is true). null: not measured.\n"
        "`<...>` in a name stands for any word. Custom rewards, workflows, agents and losses name their own metrics.\n"
        "`rl metrics` prints this table. `uv run rl metrics --markdown > docs/metrics.md` generates this page from\n"
        "`rl_contracts.runtime.metric_docs`.",
    ]
    for section, metrics in groupby(MEANINGS.items(), key=lambda item: item[1].section):
        lines = [f"| `{name}` | {entry.unit} | {entry.text.replace('|', chr(92) + '|')} |" for name, entry in metrics]
        parts += [f"## {section}", "\n".join(["| metric | unit | meaning |", "|---|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"
