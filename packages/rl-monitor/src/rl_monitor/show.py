"""`rl show` prints completions, `rl plot` draws curves, `rl report` writes a page."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_contracts.config import require
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.runtime.run_files import REPORT_FILE
from rl_monitor.completions import conversation, format_steps, kept_steps
from rl_monitor.report.curves import Curve, curves_of, read_records
from rl_monitor.report.page import write_report
from rl_monitor.report.samples import CompletionRecord, by_reward, read_completions
from rl_monitor.status import require_names

POINTS = 400
"""Approximate maximum of points per curve."""
COMPARISON = "comparison.html"
"""Default file of a comparison of several runs, in the current directory."""
FIRST_METRICS = ("reward/mean", "loss/train", "eval/accuracy")
"""Default metric of `rl plot`: the first of these that a run recorded."""
SIZE = (100, 22)
"""Columns and lines of a plot if the output is not a terminal."""


def report(directories: Sequence[Path], file: Path | None) -> int:
    """Write the report page of a run, or a comparison of several runs.

    Args:
        directories: run directories.
        file: output file. None selects `report.html` in the directory of a single run, or else `comparison.html` in the
            current directory.

    Raises:
        ConfigError: a directory has no run, or the file is not writable.
    """
    for directory in directories:
        require_names(directory)
    file = file or (directories[0] / REPORT_FILE if len(directories) == 1 else Path(COMPARISON).absolute())
    size = write_report(directories, file)
    print(f"{file} ({size / 1e6:.1f} MB)")
    return 0


def show(directory: Path, step: int | None, evaluation: bool, worst: bool, number: int) -> int:
    """Print completions of a step with prompts and rewards, and with advantages if the run recorded them.

    Args:
        directory: run directory.
        step: step to print, or None for the newest.
        evaluation: whether to print completions of an evaluation.
        worst: whether to print the lowest rewards first instead of the order in the files.
        number: maximum number of completions.

    Raises:
        ConfigError: the directory has no run.
        DataError: the run saved no such completions.
    """
    from rich.console import Console

    require_names(directory)
    steps = kept_steps(directory, evaluation)
    chosen_step = step if step is not None else steps[-1]
    if chosen_step not in steps:
        raise DataError(
            f"{directory}/rollouts: expected completions of {'an evaluation at ' * evaluation}step {chosen_step}, "
            f"found steps {format_steps(steps)}. `rollouts.every` selects the steps to save."
        )
    saved = 0

    def choose(summaries: list[CompletionRecord]) -> list[CompletionRecord]:
        nonlocal saved
        saved = len(summaries)
        return (sorted(summaries, key=by_reward) if worst else summaries)[:number]

    completions, console = read_completions(directory, chosen_step, evaluation, choose), Console(highlight=False)
    where = f"{'evaluation at ' * evaluation}step {chosen_step}"
    for completion in completions:
        console.print(conversation(completion, where, directory), soft_wrap=True)
    console.print(f"{len(completions)} of {saved} completions of {where}", soft_wrap=True)
    return 0


def plot(directories: Sequence[Path], metrics: Sequence[str], file: Path | None) -> int:
    """Plot metrics of runs, with one plot per metric.

    Args:
        directories: run directories.
        metrics: names in `metrics.jsonl`; if empty, the first of `FIRST_METRICS` that the runs recorded.
        file: PNG, SVG or PDF file, or None to plot in the terminal.

    Raises:
        ConfigError: a run, metric or file format does not exist, or matplotlib is not installed.
        DataError: a run has no records yet.
    """
    runs = {str(directory): _curves(directory) for directory in directories}
    available = sorted({name for curves in runs.values() for name in curves})
    chosen = list(metrics) or [name for name in FIRST_METRICS if name in available][:1] or available[:1]
    for name in chosen:
        if name not in available:
            near = ", ".join(difflib.get_close_matches(name, available, 5, 0.3)) or ", ".join(available)
            raise ConfigError(f"--metric: expected a metric of these runs, found {name}; similar: {near}.")
    curves_by_metric = {n: {run: curves[n] for run, curves in runs.items() if n in curves} for n in chosen}
    labels = _short_names([str(directory) for directory in directories])
    plots = {name: {labels[run]: curve for run, curve in curves.items()} for name, curves in curves_by_metric.items()}
    if file is not None:
        _to_file(plots, file)
        print(file)
    else:
        for name, curves in plots.items():
            _to_terminal(name, curves)
    return 0


def _curves(directory: Path) -> dict[str, Curve]:
    require_names(directory)
    curves = curves_of(read_records(directory), POINTS)
    if not curves:
        raise DataError(
            f"{directory}/metrics.jsonl: expected records of steps, found none so far; run `rl status` for the reason."
        )
    return curves


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Map each path to its last component, or to itself if the last components are not unique."""
    short = {name: Path(name).name for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in names}


def _to_terminal(name: str, curves: dict[str, Curve]) -> None:
    import plotext
    from rich.console import Console

    console = Console()
    plain = not (console.is_terminal and console.color_system)
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(*((console.width, min(SIZE[1], console.height - 2)) if console.is_terminal else SIZE))
    plotext.theme("clear" if plain else "pro")
    for label, (steps, values) in curves.items():
        plotext.plot(steps, values, label=label if len(curves) > 1 else None, marker="braille")
    first, last = (bound(step for steps, _ in curves.values() for step in steps) for bound in (min, max))
    plotext.xticks(sorted({first + (last - first) * i // 5 for i in range(6)}))
    plotext.title(f"{name} by step")
    picture = plotext.build()
    print(plotext.uncolorize(picture) if plain else picture)


def _to_file(plots: dict[str, dict[str, Curve]], file: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"-o {file}: this needs matplotlib, which is not installed. Run `pip install 'rl-apps[plot]'`, or in the "
            "repository `uv run --package rl-apps --extra plot rl plot ...`."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    suffix, kinds = file.suffix.removeprefix("."), FigureCanvasAgg(Figure()).get_supported_filetypes()
    require(suffix in kinds, "-o", f"a file name that ends with one of {', '.join(sorted(kinds))}", str(file))
    picture = Figure(figsize=(7, 3.2 * len(plots)), layout="constrained")
    axes: Any = picture.subplots(len(plots), squeeze=False)
    for ax, (name, curves) in zip(axes[:, 0], plots.items(), strict=True):
        for label, (steps, values) in curves.items():
            ax.plot(steps, values, label=label)
        ax.set(title=name, xlabel="step")
        ax.grid(alpha=0.3)
        if len(curves) > 1:
            ax.legend()
    try:
        picture.savefig(file, dpi=150)
    except OSError as error:
        raise ConfigError(f"-o {file} is not writable: {error}. Choose another file.") from error
