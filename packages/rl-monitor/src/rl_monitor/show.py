"""What a run did, for people: `rl show` prints answers, `rl plot` draws curves, `rl report` writes a page."""

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
from rl_monitor.report.samples import Answer, by_reward, read_answers
from rl_monitor.status import require_names

POINTS = 400
"""Points of a curve in a picture at most."""
COMPARISON = "comparison.html"
"""Page of several runs, in the current directory where nothing else is said."""
FIRST_FIGURES = ("reward/mean", "loss/train", "eval/accuracy")
"""What is drawn where nothing is said: the first of them that there is."""
SIZE = (100, 22)
"""Columns and lines of a curve that is not drawn on a terminal."""


def report(directories: Sequence[Path], file: Path | None) -> int:
    """Write the page of a run, or of several beside each other.

    Args:
        directories: of the runs.
        file: None: `report.html` in the directory of an only run, else `comparison.html` in the current one.

    Raises:
        ConfigError: there is no such run, or no place for the page.
    """
    for directory in directories:
        require_names(directory)
    file = file or (directories[0] / REPORT_FILE if len(directories) == 1 else Path(COMPARISON).absolute())
    size = write_report(directories, file)
    print(f"{file} ({size / 1e6:.1f} MB)")
    return 0


def show(directory: Path, step: int | None, evaluation: bool, worst: bool, number: int) -> int:
    """Print answers of a step: what was asked and answered, rewards, and advantages where they are known.

    Args:
        directory: of the run.
        step: None: the newest one.
        evaluation: whether those of an evaluation.
        worst: those with the least rewards first; else in the order in which they were written.
        number: how many.

    Raises:
        ConfigError: there is no run.
        DataError: it has kept no such answers.
    """
    from rich.console import Console

    require_names(directory)
    there = kept_steps(directory, evaluation)
    wanted = step if step is not None else there[-1]
    if wanted not in there:
        raise DataError(
            f"{directory}/rollouts: expected answers of {'an evaluation at ' * evaluation}step {wanted}, found those "
            f"of the steps {format_steps(there)}. `rollouts.every` says which are kept."
        )
    kept = 0

    def choose(heads: list[Answer]) -> list[Answer]:
        nonlocal kept
        kept = len(heads)
        return (sorted(heads, key=by_reward) if worst else heads)[:number]

    answers, console = read_answers(directory, wanted, evaluation, choose), Console(highlight=False)
    where = f"{'evaluation at ' * evaluation}step {wanted}"
    for answer in answers:
        console.print(conversation(answer, where), soft_wrap=True)
    console.print(f"{len(answers)} of {kept} answers of {where}", soft_wrap=True)
    return 0


def plot(directories: Sequence[Path], figures: Sequence[str], file: Path | None) -> int:
    """Draw figures of runs, one picture for each figure.

    Args:
        directories: of the runs.
        figures: names in `metrics.jsonl`; none: the first of `FIRST_FIGURES` that the runs have.
        file: a picture (PNG, SVG, PDF); None: into the terminal.

    Raises:
        ConfigError: there is no such run, figure or format, or the extra that draws files is missing.
        DataError: nothing was recorded yet.
    """
    runs = {str(directory): _curves(directory) for directory in directories}
    known = sorted({name for curves in runs.values() for name in curves})
    chosen = list(figures) or [name for name in FIRST_FIGURES if name in known][:1] or known[:1]
    for name in chosen:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 5, 0.3)) or ", ".join(known)
            raise ConfigError(f"--figure: expected a figure of these runs, found {name}; near it: {near}.")
    lines = {n: {run: curves[n] for run, curves in runs.items() if n in curves} for n in chosen}
    short = _short_names([str(directory) for directory in directories])
    named = {name: {short[run]: curve for run, curve in curves.items()} for name, curves in lines.items()}
    if file is not None:
        _to_file(named, file)
        print(file)
    else:
        for name, curves in named.items():
            _to_terminal(name, curves)
    return 0


def _curves(directory: Path) -> dict[str, Curve]:
    require_names(directory)
    found = curves_of(read_records(directory), POINTS)
    if not found:
        raise DataError(
            f"{directory}/metrics.jsonl: expected records of steps, found none so far; `rl status` says why."
        )
    return found


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Last parts of paths where these differ, else the paths."""
    last = {name: Path(name).name for name in names}
    return last if len(set(last.values())) == len(last) else {name: name for name in last}


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
    first, last = (of(step for steps, _ in curves.values() for step in steps) for of in (min, max))
    plotext.xticks(sorted({first + (last - first) * i // 5 for i in range(6)}))
    plotext.title(f"{name} by step")
    picture = plotext.build()
    print(plotext.uncolorize(picture) if plain else picture)


def _to_file(figures: dict[str, dict[str, Curve]], file: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"-o {file}: pictures need matplotlib, which is not installed: pip install 'rl-apps[plot]', or in the "
            "repository uv run --package rl-apps --extra plot rl plot ..."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    suffix, kinds = file.suffix.removeprefix("."), FigureCanvasAgg(Figure()).get_supported_filetypes()
    require(suffix in kinds, "-o", f"a file that ends with one of {', '.join(sorted(kinds))}", str(file))
    picture = Figure(figsize=(7, 3.2 * len(figures)), layout="constrained")
    axes: Any = picture.subplots(len(figures), squeeze=False)
    for ax, (name, curves) in zip(axes[:, 0], figures.items(), strict=True):
        for label, (steps, values) in curves.items():
            ax.plot(steps, values, label=label)
        ax.set(title=name, xlabel="step")
        ax.grid(alpha=0.3)
        if len(curves) > 1:
            ax.legend()
    try:
        picture.savefig(file, dpi=150)
    except OSError as error:
        raise ConfigError(f"-o {file}: the picture cannot be written: {error}. Choose another place.") from error
