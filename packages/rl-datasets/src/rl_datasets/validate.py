"""Check, without a model, that the gold answers of a data set score 1.0 and its images can be read.

    python -m rl_datasets.validate gsm8k path/to/gsm8k

A policy learns nothing, or wrong answers, from an example that fails this check.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import DataError, RLError
from rl_datasets.rows import Rows

if TYPE_CHECKING:
    from rl_contracts.reward import RewardFunction


@dataclass(frozen=True)
class ValidationFailure:
    """Example whose gold answer does not score 1.0."""

    index: int
    """Index of the example in the data set."""
    reason: str
    """Score, or the error."""
    completion: str
    """Gold answer that was scored; empty if the example cannot be read."""

    def __str__(self) -> str:
        ending = f"; its answer ends with {self.completion[-60:]!r}" if self.completion else ""
        return f"example {self.index}: {self.reason}{ending}"


@dataclass(frozen=True)
class ValidationReport:
    """Result of `validate`."""

    rows: int
    """Number of examples that were scored."""
    failures: tuple[ValidationFailure, ...]
    """Examples that did not score 1.0, in order."""

    @property
    def ok(self) -> bool:
        """True if every gold answer scored 1.0."""
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{self.rows - len(self.failures)} of {self.rows} gold answers score 1.0"]
        lines += [f"  {failure}" for failure in self.failures[:20]]
        if len(self.failures) > 20:
            lines.append(f"  and {len(self.failures) - 20} more")
        return "\n".join(lines)


def validate(rows: Sequence[dict[str, Any]], reward_fn: RewardFunction) -> ValidationReport:
    """Score the gold answer of each example as if a model had written it.

    Args:
        rows: a data set in RL form: each example has `messages` and `answer`.
        reward_fn: a reward function, plain or async.

    Raises:
        DataError: there are no examples, or one has no `answer` (in SFT form, for example).
    """
    if not len(rows):
        raise DataError("validate: expected examples, found none; check the data set and its split")
    with asyncio.Runner() as runner:
        failures = [
            failure for index in range(len(rows)) if (failure := _failure(index, rows, reward_fn, runner)) is not None
        ]
    return ValidationReport(len(rows), tuple(failures))


def _failure(
    index: int, rows: Sequence[dict[str, Any]], reward_fn: RewardFunction, runner: asyncio.Runner
) -> ValidationFailure | None:
    try:
        row = rows[index]
    except DataError as error:  # data sets with images find broken images on access
        return ValidationFailure(index, f"DataError: {error}", "")
    if "answer" not in row:
        raise DataError(
            f"validate: expected an 'answer' in example {index}, found only {', '.join(row)}; "
            "load the data with form='rl'"
        )
    completion = rows.gold_completion(row) if isinstance(rows, Rows) else str(row["answer"])
    reason = _failure_reason(row, completion, reward_fn, runner)
    return ValidationFailure(index, reason, completion) if reason else None


def _failure_reason(
    row: dict[str, Any], completion: str, reward_fn: RewardFunction, runner: asyncio.Runner
) -> str | None:
    prompt = row["messages"][-1]["content"] if row.get("messages") else ""
    if isinstance(prompt, list):
        prompt = "".join(part.get("text", "") for part in prompt)
    data = {key: value for key, value in row.items() if key not in ("messages", "prompt_id")}
    try:
        score = reward_fn(prompt, completion, [], [], **data)
        value = runner.run(_awaited(score)) if inspect.isawaitable(score) else score
    except Exception as error:  # noqa: BLE001 (a boundary: the report records it)
        return f"{type(error).__name__}: {error}"
    return None if value == 1.0 else f"scores {value}"


async def _awaited(score: Any) -> float:
    value: float = await score
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return 0 if all gold answers score 1.0, 1 if not, 2 if they cannot be scored."""
    parser = argparse.ArgumentParser(prog="python -m rl_datasets.validate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", help="data set: a registered name (gsm8k, word-problems) or a dotted path")
    parser.add_argument("path", nargs="?", help="hub id, directory or file, for data that is not generated")
    parser.add_argument("--split", nargs="+", default=["train", "test"], help="splits to check (default: train test)")
    parser.add_argument("--reward", default="gsm8k", help="reward: a registered name or a dotted path (default: gsm8k)")
    parser.add_argument("--seed", type=int, default=0, help="seed of generated problems")
    parser.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="FIELD=COLUMN",
        help="columns of the file, for example question=problem",
    )
    options = parser.parse_args(arguments)
    dataset_arguments: dict[str, Any] = {} if options.path is None else {"path": options.path}
    if "" not in sys.path:
        sys.path.append("")  # so that dotted paths find modules in the current directory
    try:
        dataset_arguments |= {"columns": _columns(options.columns)} if options.columns else {}
        reward_fn = registry.load("rl.rewards", options.reward)
        dataset = registry.load("rl.datasets", options.name)
        reports = {
            split: validate(dataset(split=split, form="rl", seed=options.seed, **dataset_arguments), reward_fn)
            for split in options.split
        }
    except RLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    for split, report in reports.items():
        sys.stdout.write(f"{options.name} {split}: {report}\n")
    return 0 if all(report.ok for report in reports.values()) else 1


def _columns(arguments: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in arguments]
    for pair in pairs:
        require(all(pair), "--columns", "FIELD=COLUMN, for example question=problem", "".join(pair))
    return {name: column for name, _, column in pairs}


if __name__ == "__main__":
    sys.exit(main())
