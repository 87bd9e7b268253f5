"""The account of a run: that in what survived of it each prompt was trained on once per epoch, or was recorded as
rejected, failed or left over.

python tests/support/prompt_accounting.py RUN PROMPTS EPOCHS    for a run over the prompts 0 to PROMPTS - 1 that came to its end
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
"""Faults that an error lists."""


def check_accounting(run_dir: Path, prompts: Iterable[int], epochs: int) -> Counter[str]:
    """Compare what a run says of its prompts (`groups.jsonl`) with what it should have used, and with the batches that
    it trained on, where it saved them (`checkpoint.save_batches=true`).

    Args:
        run_dir: of a run that came to the end of its data.
        prompts: ids of all rows.
        epochs: passes over them.

    Returns:
        how many of (prompt, epoch) had which ending.

    Raises:
        AssertionError: the account does not hold; names the prompts.
    """
    told = list(json_lines(run_dir / "groups.jsonl"))
    faults = [*_of_prompts(told, {(prompt, epoch) for prompt in prompts for epoch in range(epochs)})]
    faults += _of_steps(run_dir, told)
    hidden = [f"and {len(faults) - MAX_LISTED} more"] if len(faults) > MAX_LISTED else []
    assert not faults, "\n".join([f"{run_dir}: the account does not hold:", *faults[:MAX_LISTED], *hidden])
    return Counter(ending["ending"] for ending in told)


def _of_prompts(told: list[dict[str, Any]], expected: set[tuple[int, int]]) -> Iterable[str]:
    """Whether each prompt and epoch has one ending, and each group one prompt."""
    of_prompt, of_group = defaultdict(list), Counter(e["group_id"] for e in told if e["group_id"] is not None)
    for ending in told:
        of_prompt[ending["prompt_id"], ending["epoch"]].append(ending)
    for prompt, epoch in sorted(expected | of_prompt.keys()):
        endings, name = of_prompt[prompt, epoch], f"prompt {prompt} of epoch {epoch}"
        if (prompt, epoch) not in expected:
            yield f"{name} is none of the data"
        elif not endings:
            yield f"{name} was lost"
        elif len(endings) > 1:
            where = ", ".join(f"{e['ending']} in step {e['step']} (group {e['group_id']})" for e in endings)
            yield f"{name} was used {len(endings)} times: {where}"
        elif endings[0]["ending"] not in OUTCOMES:
            yield f"{name} ended as {endings[0]['ending']!r}"
    yield from (f"group {group} stands for {times} prompts" for group, times in of_group.items() if times > 1)


def _of_steps(run_dir: Path, told: list[dict[str, Any]]) -> Iterable[str]:
    """Whether the steps follow each other, and each trained on the prompts that it is said to have."""
    records = list(json_lines(run_dir / "metrics.jsonl"))
    steps = [record["step"] for record in records if "rows" in record]  # and not those of an evaluation alone
    if steps != [*range(1, len(steps) + 1)]:
        yield f"metrics.jsonl: expected the steps 1 to {len(steps)}, found {steps}"
    said = defaultdict(list)
    for ending in told:
        if ending["ending"] == "trained":
            said[ending["step"]].append((ending["group_id"], ending["prompt_id"]))
    yield from (f"step {step} is said to have trained, and has no record" for step in sorted(said.keys() - {*steps}))
    for step in steps if (run_dir / "batches").is_dir() else ():
        files = [*(run_dir / "batches").glob(f"step_{step}-version_*.safetensors")]
        if len(files) != 1:
            yield f"step {step}: expected its batch, found {[file.name for file in files]}"
            continue
        with safe_open(files[0], "pt") as batch:
            ids = [batch.get_tensor(name).tolist() for name in ("group_ids", "prompt_ids", "episode_ids")]
        rows = Counter(zip(*ids, strict=True))
        yield from (
            f"step {step}: row {row} (group, prompt, episode) is in its batch twice" for row in rows - Counter({*rows})
        )
        groups = {(group, prompt) for group, prompt, _ in rows}
        for what, found in (
            ("in its batch, and not told", groups - {*said[step]}),
            ("told, and not in its batch", {*said[step]} - groups),
        ):
            yield from (f"step {step}: prompt {prompt} (group {group}) is {what}" for group, prompt in sorted(found))


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("prompts", type=int)
    parser.add_argument("epochs", type=int)
    arguments = parser.parse_args()
    try:
        found = check_accounting(arguments.run_dir, range(arguments.prompts), arguments.epochs)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{ending} {found[ending]}" for ending in OUTCOMES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
