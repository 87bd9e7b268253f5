"""`rl watch`: a run that goes on, by the view that its command has, or by what its model was told and what it said."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rl_contracts.errors import ConfigError, DataError
from rl_monitor.completions import completion_files, conversation, format_steps, kept_steps
from rl_monitor.progress import FIGURES, RunProgress
from rl_monitor.run_directory import last_record, read_config
from rl_monitor.status import read_new_lines, require_names, status_of, while_alive


def watch_steps(directory: Path) -> int:
    """Show how a run comes on until it is over: the live view in a terminal, a line for each of its steps elsewhere.

    Raises:
        ConfigError: there is no run, or it has not begun.
    """
    names, file = require_names(directory), directory / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{directory}: this run has not begun; `rl status` says what it waits for.")
    steps = read_config(file).get("total_steps", 0)
    with RunProgress(directory / "metrics.jsonl", steps, FIGURES, from_the_start=True) as progress:
        for _ in while_alive(names):
            progress.tick()
            if not last_record(directory):
                progress.say(status_of(directory)["state"])
        progress.tick()
        progress.say(status_of(directory)["state"])
    return 0


def watch(directory: Path, step: int | None, evaluation: bool, prompt: int | None, number: int) -> int:
    """Print answers of a run as they are written, until it is over; of one step, those that are there.

    Args:
        directory: of the run.
        step: the only one; None: from the newest one on.
        evaluation: whether it is about evaluations.
        prompt: the only row of the data; None: any.
        number: of each step, at most.

    Raises:
        ConfigError: there is no run.
        DataError: it has kept no such answer, and will keep none.
    """
    from rich.console import Console

    names, console, shown = require_names(directory), Console(highlight=False), Counter[int]()
    read: dict[Path, int] = {}
    newest = max((at for at, _ in completion_files(directory, evaluation)), default=0) if step is None else step
    for _ in while_alive(names) if step is None else [None]:
        for at, path in completion_files(directory, evaluation):
            if at < newest or step not in (None, at):
                continue
            for line in filter(None, read_new_lines(path, read).split("\n")):
                answer = json.loads(line)
                if prompt in (None, answer["prompt_id"]) and shown[at] < number:
                    shown[at] += 1
                    console.print(conversation(answer, f"{'evaluation at ' * evaluation}step {at}"), soft_wrap=True)
    if not shown:
        there = kept_steps(directory, evaluation)
        to = "" if prompt is None else f" to prompt {prompt}"
        raise DataError(
            f"{directory}/rollouts: expected answers{to} of {'any step' if step is None else f'step {step}'}, found "
            f"none; kept are those of the steps {format_steps(there)}. `rollouts.every` says which are."
        )
    return 0
