"""Live view of a run in a terminal, redrawn twice a second: progress, metrics with sparklines, time per stage,
warnings, and a completion."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_monitor.completions import completion_files, conversation

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

REFRESHES = 2.0
"""Drawings a second."""
COMPLETION_SECONDS = 10.0
"""Seconds for which an answer is shown."""
ANSWER_LINES = 6
RECENT = 20
"""Steps whose mean duration says how long the rest takes."""
BLOCKS = "▁▂▃▄▅▆▇█"
STAGES = {"rollout_wait": "yellow", "train": "green", "publish": "blue", "gap": "magenta", "sleep": "cyan"}
"""Stages of a step and their colours."""
SMALL = 24
"""Lines of a terminal below which no answer is shown."""


@dataclass
class RunView:
    """What is known of a run, as rich draws it."""

    name: str
    """Of the run."""
    total_steps: int
    figures: Mapping[str, tuple[str, str]]
    """What is shown of a record: label to (name in metrics.jsonl, format); what a run does not record is left out."""
    stage: str = "starting"
    """What it does."""
    records: list[dict[str, Any]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    """The newest of each kind, the newest kind last."""
    answer: Text | None = None

    def add(self, record: dict[str, Any]) -> None:
        """A step's record; where a run went on from a recover point, the later ones are no longer true."""
        while self.records and self.records[-1]["step"] > record["step"]:
            self.records.pop()
        self.records.append(record)

    def warn(self, kind: str, text: str) -> None:
        """A warning, which replaces the one of its kind."""
        self.warnings.pop(kind, None)
        self.warnings[kind] = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        outside = options.max_width - 2  # there is room for the ^C that a terminal writes behind the last line
        width, plain = outside - 4, options.ascii_only
        parts: list[RenderableType] = [self._how_far(), *self._figures(width, plain), *self._times(width, plain)]
        parts += [Text(f"warning: {text}", style="yellow") for text in list(self.warnings.values())[-3:]]
        if self.answer is not None and console.size.height >= SMALL:
            parts += [Text(), *self.answer.split("\n")[:ANSWER_LINES]]
        name = Text(self.name)
        name.truncate(max(1, outside - 6), overflow="ellipsis")  # else it widens the panel
        yield Panel(Group(*parts), title=name, title_align="left", border_style="dim", width=outside)

    def _how_far(self) -> Table:
        done = self.records[-1]["step"] if self.records else 0
        durations = [record["time/step"] for record in self.records[-RECENT:] if record.get("time/step")]
        left = sum(durations) / len(durations) * (self.total_steps - done) if durations else None
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(self.stage, style="bold", no_wrap=True, overflow="ellipsis"),
            ProgressBar(total=self.total_steps, completed=done, width=24),
            f"{done}/{self.total_steps}",
            "" if left is None else f"{timedelta(seconds=round(left))} left",
        )
        return row

    def _figures(self, width: int, plain: bool) -> list[Table]:
        """Two figures a line, each with its course."""
        curve = 0 if plain else max(0, min(24, width // 2 - 34))
        held_out = [record for record in self.records if record.get("eval/reward") is not None]
        graded = any(record.get("eval/accuracy") is None for record in held_out)
        told = "eval/accuracy" if graded else "eval/reward"  # by the other one
        cells = []
        for label, (name, form) in self.figures.items():
            values = [record[name] for record in self.records if record.get(name) is not None]
            if values and name != told:
                cells.append((Text(label, style="dim"), f"{values[-1]:{form}}", Text(sparkline(values, curve), "cyan")))
        table = Table.grid(padding=(0, 1))
        half = (len(cells) + 1) // 2
        for left, right in zip_longest(cells[:half], cells[half:], fillvalue=("", "", "")):
            table.add_row(*left, " ", *right)
        return [table] if cells else []

    def _times(self, width: int, plain: bool) -> list[Text]:
        """Where the time of the last step went: a bar, and what its colours mean."""
        record = next((record for record in reversed(self.records) if record.get("time/step")), None)
        if record is None:
            return []
        whole = record["time/step"]
        taken = {stage: record[f"time/{stage}"] / whole for stage in STAGES if record.get(f"time/{stage}")}
        taken["other"] = max(0.0, 1 - sum(taken.values()))
        bar, legend = Text(), Text(f"step {whole:.2f} s: ", style="dim")
        for stage, fraction in taken.items():
            colour = STAGES.get(stage, "bright_black")
            bar.append(("#" if plain else "█") * round(fraction * (width - 1)), style=colour)
            legend.append(f"{stage.removeprefix('rollout_')} {fraction:.0%}  ", style=colour)
        for line in (bar, legend):
            line.no_wrap, line.overflow = True, "crop"
        return [bar, legend]


def sparkline(values: list[float], width: int) -> str:
    """The course of the last `width` values, from the lowest of them to the highest."""
    recent = values[-width:] if width else []
    if not recent:
        return ""
    low, span = min(recent), max(recent) - min(recent)
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1)) if span else 0] for value in recent)


class Screen:
    """Keeps a view of a run at the bottom of a terminal; what is printed meanwhile stands above it. A context manager,
    which leaves the terminal as it was, with the last drawing.

    Args:
        view: of the run.
        directory: of the run, where its answers are.
        console: of the terminal.
    """

    def __init__(self, view: RunView, directory: Path, console: Console) -> None:
        self.view, self._directory, self._console = view, directory, console
        self._size, self._due = console.size, 0.0
        self._live = Live(
            console=console, refresh_per_second=REFRESHES, vertical_overflow="crop", get_renderable=self._current_view
        )

    def __enter__(self) -> Screen:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update_completion(self) -> None:
        """Take another answer, if it is time for one."""
        if time.monotonic() < self._due or not self.view.records:
            return
        self._due = time.monotonic() + COMPLETION_SECONDS
        for step, path in reversed(list(completion_files(self._directory, evaluation=False))):
            lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
            if lines:
                self.view.answer = conversation(json.loads(lines[-1]), f"step {step}")
                self.view.answer.no_wrap, self.view.answer.overflow = True, "ellipsis"
                return

    def _current_view(self) -> RunView:
        """The view; in a terminal of another size it is begun anew, for what was drawn has wrapped to other places."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._console.control(Control.clear(), Control.home())
        return self.view
