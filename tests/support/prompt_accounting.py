"""Check that a finished run trained on each prompt once per epoch, or recorded another outcome for it.

    python tests/support/prompt_accounting.py RUN PROMPTS EPOCHS

Checks a run whose prompts have the ids 0 to PROMPTS - 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rl_contracts.runtime.json_lines import json_lines

OUTCOMES = ("trained", "rejected", "failed", "left_over")
MAX_LISTED = 20
"""Maximum number of problems that the error lists."""


def check_accounting(run_dir: Path, prompts: Iterable[int], epochs: int) -> Counter[str]:
    """Check the outcomes in `groups.jsonl` against the data, the steps and the saved batches of a run.

    Args:
        run_dir: directory of a run that ended because its data was exhausted. Batches are compared only if the run
            saved them (`checkpoint.save_batches=true`).
        prompts: ids of all prompts.
        epochs: passes over the prompts.

    Returns:
        number of (prompt, epoch) pairs per outcome.

    Raises:
        AssertionError: a prompt is missing, repeated or inconsistent; the message lists the prompts.
    """
    records = list(json_lines(run_dir / "groups.jsonl"))
    problems = [*_check_prompts(records, {(prompt, epoch) for prompt in prompts for epoch in range(epochs)})]
    problems += _check_steps(run_dir, records)
    hidden = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
    assert not problems, "\n".join([f"{run_dir}: inconsistent prompts:", *problems[:MAX_LISTED], *hidden])
    return Counter(record["outcome"] for record in records)


def _check_prompts(records: list[dict[str, Any]], expected: set[tuple[int, int]]) -> Iterable[str]:
    """Yield a message for each prompt without exactly one outcome per epoch, and each group of several prompts."""
    by_prompt, group_sizes = defaultdict(list), Counter(r["group_id"] for r in records if r["group_id"] is not None)
    for record in records:
        by_prompt[record["prompt_id"], record["epoch"]].append(record)
    for prompt, epoch in sorted(expected | by_prompt.keys()):
        outcomes, name = by_prompt[prompt, epoch], f"prompt {prompt} of epoch {epoch}"
        if (prompt, epoch) not in expected:
            yield f"{name} is not in the data"
        elif not outcomes:
            yield f"{name} was lost"
        elif len(outcomes) > 1:
            where = ", ".join(f"{r['outcome']} in step {r['step']} (group {r['group_id']})" for r in outcomes)
            yield f"{name} was used {len(outcomes)} times: {where}"
        elif outcomes[0]["outcome"] not in OUTCOMES:
            yield f"{name} has the unknown outcome {outcomes[0]['outcome']!r}"
    yield from (f"group {group} has {prompts} prompts" for group, prompts in group_sizes.items() if prompts > 1)


def _check_steps(run_dir: Path, records: list[dict[str, Any]]) -> Iterable[str]:
    """Yield a message for each gap in the steps, and each step whose batch contradicts its recorded prompts."""
    metrics = list(json_lines(run_dir / "metrics.jsonl"))
    steps = [
        record["step"] for record in metrics if "sequences" in record
    ]  # records of an evaluation alone have no rows
    if steps != [*range(1, len(steps) + 1)]:
        yield f"metrics.jsonl: expected the steps 1 to {len(steps)}, found {steps}"
    trained = defaultdict(list)
    for record in records:
        if record["outcome"] == "trained":
            trained[record["step"]].append((record["group_id"], record["prompt_id"]))
    yield from (f"step {step} has trained prompts but no metrics" for step in sorted(trained.keys() - {*steps}))
    for step in steps if (run_dir / "batches").is_dir() else ():
        files = [*(run_dir / "batches").glob(f"step_{step}-version_*.safetensors")]
        if len(files) != 1:
            yield f"step {step}: expected its batch, found {[file.name for file in files]}"
            continue
        with safe_open(files[0], "pt") as batch:
            ids = [batch.get_tensor(name).tolist() for name in ("group_ids", "prompt_ids", "episode_ids")]
        sequences = Counter(zip(*ids, strict=True))
        yield from (
            f"step {step}: sequence {sequence} (group, prompt, episode) is in its batch twice"
            for sequence in sequences - Counter({*sequences})
        )
        groups = {(group, prompt) for group, prompt, _ in sequences}
        for problem, pairs in (
            ("in its batch but not recorded", groups - {*trained[step]}),
            ("recorded but not in its batch", {*trained[step]} - groups),
        ):
            yield from (f"step {step}: prompt {prompt} (group {group}) is {problem}" for group, prompt in sorted(pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("prompts", type=int)
    parser.add_argument("epochs", type=int)
    arguments = parser.parse_args()
    try:
        counts = check_accounting(arguments.run_dir, range(arguments.prompts), arguments.epochs)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
