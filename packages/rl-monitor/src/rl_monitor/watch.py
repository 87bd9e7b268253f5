"""`rl watch`: follow a run, either with the live view of its command or with its conversations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rl_contracts.errors import ConfigError, DataError
from rl_monitor.completions import completion_files, conversation, format_steps, kept_steps
from rl_monitor.progress import METRICS, RunProgress, describe_stage
from rl_monitor.run_directory import last_record, read_config
from rl_monitor.status import read_new_lines, require_names, status_of, while_alive


def watch_steps(directory: Path) -> int:
    """Show the progress of a run until it ends: the live view in a terminal, otherwise one line per step.

    Raises:
        ConfigError: the directory has no run, or the run has not begun.
    """
    names, file = require_names(directory), directory / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{directory}: this run has not begun; `rl status` shows the reason.")
    steps = read_config(file).get("total_steps", 0)
    with RunProgress(directory / "metrics.jsonl", steps, METRICS, from_the_start=True) as progress:
        for _ in while_alive(names):
            progress.tick()
            if not last_record(directory) and not describe_stage(directory):
                progress.print_message(status_of(directory)["state"])
        progress.tick()
        progress.print_message(status_of(directory)["state"])
    return 0


def watch(directory: Path, step: int | None, evaluation: bool, prompt: int | None, number: int) -> int:
    """Print completions of a run as they are written, until the run ends. With `step`, print its saved completions.

    Args:
        directory: run directory.
        step: step to print, or None to follow the newest step and later ones.
        evaluation: whether to print completions of evaluations.
        prompt: index of an example of the data, or None for all.
        number: maximum completions per step.

    Raises:
        ConfigError: the directory has no run.
        DataError: the run saved no matching completion, and will save none.
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
                completion = json.loads(line)
                if prompt in (None, completion["prompt_id"]) and shown[at] < number:
                    shown[at] += 1
                    console.print(
                        conversation(completion, f"{'evaluation at ' * evaluation}step {at}", directory),
                        soft_wrap=True,
                    )
    if not shown:
        steps = kept_steps(directory, evaluation)
        to = "" if prompt is None else f" for prompt {prompt}"
        raise DataError(
            f"{directory}/rollouts: expected completions{to} of {'any step' if step is None else f'step {step}'}, "
            f"found none; saved steps: {format_steps(steps)}. `rollouts.every` selects the steps to save."
        )
    return 0
