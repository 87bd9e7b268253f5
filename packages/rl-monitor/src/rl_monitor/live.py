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
"""Redraws per second."""
COMPLETION_SECONDS = 10.0
"""Seconds for which a completion is shown."""
COMPLETION_LINES = 12
"""Maximum lines of the completion."""
RECENT = 20
"""Number of recent steps whose mean duration gives the estimate of the remaining time."""
FRAME_LINES = 4
"""Lines of the frame, of the empty line above the completion, and of the cursor."""
BLOCKS = "▁▂▃▄▅▆▇█"
STAGES = {"rollout_wait": "yellow", "train": "green", "publish": "blue", "gap": "magenta", "sleep": "cyan"}
"""Color of each stage of a step."""


@dataclass
class RunView:
    """State of a run as a rich renderable."""

    name: str
    """Title of the panel, usually the run directory."""
    total_steps: int
    metrics: Mapping[str, tuple[str, str]]
    """Metrics to show: label to (name in metrics.jsonl, format). Metrics that the run does not record are omitted."""
    stage: str = "starting"
    """Current stage of the run."""
    records: list[dict[str, Any]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    """Newest warning of each kind, the most recent kind last."""
    completion: Text | None = None

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of a step. Remove records of later steps, which a run repeats after a resume."""
        while self.records and self.records[-1]["step"] > record["step"]:
            self.records.pop()
        self.records.append(record)

    def warn(self, kind: str, text: str) -> None:
        """Show a warning, and replace the previous one of its kind."""
        self.warnings.pop(kind, None)
        self.warnings[kind] = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        panel_width = options.max_width - 2  # leave space for the ^C that a terminal prints after the last line
        width, plain = panel_width - 4, options.ascii_only
        parts: list[RenderableType] = [
            self._progress_row(width),
            *self._metrics_table(width, plain),
            *self._stage_times(width, plain),
        ]
        parts += [Text(f"warning: {text}", style="yellow") for text in list(self.warnings.values())[-3:]]
        if self.completion is not None:
            others = len(console.render_lines(Group(*parts), options.update_width(max(1, width)))) + FRAME_LINES
            parts += [Text(), *self._completion_lines(console, width, console.size.height - others)]
        name = Text(self.name)
        name.truncate(max(1, panel_width - 6), overflow="ellipsis")  # a long title would widen the panel
        yield Panel(Group(*parts), title=name, title_align="left", border_style="dim", width=panel_width)

    def _completion_lines(self, console: Console, width: int, available: int) -> list[Text]:
        """Return the wrapped lines of the completion that fit. The last line counts the omitted ones."""
        assert self.completion is not None
        lines = [*self.completion.wrap(console, max(1, width))]
        number = max(1, min(COMPLETION_LINES, available))
        if len(lines) > number:
            lines[number - 1 :] = [Text(f"[... {len(lines) - number + 1} more lines; see rl show]", style="dim")]
        return lines

    def _progress_row(self, width: int) -> Table:
        """Return stage, bar and remaining time. The bar leaves space for the stage with its seconds."""
        done = self.records[-1]["step"] if self.records else 0
        durations = [record["time/step"] for record in self.records[-RECENT:] if record.get("time/step")]
        remaining = sum(durations) / len(durations) * (self.total_steps - done) if durations else None
        steps = f"{done}/{self.total_steps}"
        left = "" if remaining is None else f"{timedelta(seconds=round(remaining))} left"
        bar_width = max(4, min(24, width - len(self.stage + steps + left) - 7))  # 7: spaces between the columns
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(self.stage, style="bold", no_wrap=True, overflow="ellipsis"),
            ProgressBar(total=self.total_steps, completed=done, width=bar_width),
            steps,
            left,
        )
        return row

    def _metrics_table(self, width: int, plain: bool) -> list[Table]:
        """Return a table with two metrics per line, each with its sparkline."""
        held_out = [record for record in self.records if record.get("eval/reward") is not None]
        has_graded_rewards = any(record.get("eval/accuracy") is None for record in held_out)
        hidden = "eval/accuracy" if has_graded_rewards else "eval/reward"  # hide the redundant one
        cells: list[tuple[str, str, list[float]]] = []
        for label, (name, form) in self.metrics.items():
            values = [record[name] for record in self.records if record.get(name) is not None]
            if values and name != hidden:
                cells.append((label, f"{values[-1]:{form}}", values))
        half = (len(cells) + 1) // 2
        halves = cells[:half], cells[half:]
        texts = sum(max((len(cell[column]) for cell in cells), default=0) for cells in halves for column in (0, 1))
        sparkline_width = 0 if plain else max(0, min(24, (width - texts - 7) // 2))  # 7: spaces between the columns
        rows = [
            (Text(label, "dim"), value, Text(sparkline(values, sparkline_width), "cyan"))
            for label, value, values in cells
        ]
        table = Table.grid(padding=(0, 1))
        for left, right in zip_longest(rows[:half], rows[half:], fillvalue=("", "", "")):
            table.add_row(*left, " ", *right)
        return [table] if cells else []

    def _stage_times(self, width: int, plain: bool) -> list[Text]:
        """Return a bar with the time per stage of the last step, and its legend."""
        record = next((record for record in reversed(self.records) if record.get("time/step")), None)
        if record is None:
            return []
        seconds = record["time/step"]
        fractions = {stage: record[f"time/{stage}"] / seconds for stage in STAGES if record.get(f"time/{stage}")}
        fractions["other"] = max(0.0, 1 - sum(fractions.values()))
        bar, legend = Text(), Text(f"step {seconds:.2f} s: ", style="dim")
        for stage, fraction in fractions.items():
            color = STAGES.get(stage, "bright_black")
            bar.append(("#" if plain else "█") * round(fraction * (width - 1)), style=color)
            legend.append(f"{stage.removeprefix('rollout_')} {fraction:.0%}  ", style=color)
        for line in (bar, legend):
            line.no_wrap, line.overflow = True, "crop"
        return [bar, legend]


def sparkline(values: list[float], width: int) -> str:
    """Return a sparkline of the last `width` values, scaled from their minimum to their maximum."""
    recent = values[-width:] if width else []
    if not recent:
        return ""
    low, span = min(recent), max(recent) - min(recent)
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1)) if span else 0] for value in recent)


class Screen:
    """Keep a view of a run at the bottom of a terminal, below other output.

    Use as a context manager, which restores the terminal and leaves the last drawing.

    Args:
        view: view to draw.
        directory: run directory with the completions.
        console: console of the terminal.
    """

    def __init__(self, view: RunView, directory: Path, console: Console) -> None:
        self.view, self._directory, self._console = view, directory, console
        self._size, self._next_update = console.size, 0.0
        self._live = Live(
            console=console, refresh_per_second=REFRESHES, vertical_overflow="crop", get_renderable=self._current_view
        )

    def __enter__(self) -> Screen:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update_completion(self) -> None:
        """Show the newest completion if the last one was shown long enough."""
        if time.monotonic() < self._next_update:
            return
        self._next_update = time.monotonic() + COMPLETION_SECONDS
        for step, path in reversed(list(completion_files(self._directory, evaluation=False))):
            lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
            if lines:
                self.view.completion = conversation(json.loads(lines[-1]), f"step {step}", self._directory, short=True)
                self.view.completion.rstrip()
                return

    def _current_view(self) -> RunView:
        """Return the view. Clear the screen first if the terminal size changed, since that wraps the old drawing."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._console.control(Control.clear(), Control.home())
        return self.view
