"""The account of a run reports injected faults and names their prompts, groups or steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_accounting import check_accounting
from safetensors.torch import save_file

Line = dict[str, Any]


def make_run(directory: Path, change: Callable[[list[Line]], object] = lambda lines: None) -> Path:
    """Write the files of a run over six prompts for two epochs, with three prompts per step.

    Prompt 4 is rejected, and prompt 5 fails in the second epoch. `change` edits the lines of groups.jsonl, but not the
    batches.
    """
    lines: list[Line] = []
    for group, (epoch, prompt) in enumerate((epoch, prompt) for epoch in range(2) for prompt in range(6)):
        outcome = {(0, 4): "rejected", (1, 4): "rejected", (1, 5): "failed"}.get((epoch, prompt), "trained")
        lines.append({"prompt_id": prompt, "epoch": epoch, "group_id": group, "outcome": outcome, "reason": None})
    trained = [line for line in lines if line["outcome"] == "trained"]
    (directory / "batches").mkdir(parents=True)
    for step in range(1, 4):
        batch = trained[3 * step - 3 : 3 * step]
        sequences = [line for line in batch for _ in range(2)]
        ids = {name: torch.tensor([line[name[:-1]] for line in sequences]) for name in ("group_ids", "prompt_ids")}
        ids["episode_ids"] = torch.tensor([0, 1] * len(batch))
        save_file(ids, directory / "batches" / f"step_{step}-version_{step - 1}.safetensors")
        for line in batch:
            line["step"] = step
    for line in lines:
        line.setdefault("step", 2)
    change(lines)
    (directory / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [{"step": 0, "eval/accuracy": 0.5}, *({"step": step, "sequences": 6.0} for step in (1, 2, 3))]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def test_account_of_a_correct_run_counts_outcomes(tmp_path: Path) -> None:
    assert check_accounting(make_run(tmp_path), range(6), 2) == {"trained": 9, "rejected": 2, "failed": 1}


def repeat_first(lines: list[Line], **changes: object) -> None:
    lines.append(lines[0] | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.pop(4), "prompt 4 of epoch 0 was lost"),
        (lambda lines: lines.pop(11), "prompt 5 of epoch 1 was lost"),
        (lambda lines: lines.pop(0), r"step 1: prompt 0 \(group 0\) is in its batch"),
        (
            lambda lines: repeat_first(lines, step=3, group_id=99),
            r"prompt 0 of epoch 0 was used 2 times: trained in step 1 \(group 0\), trained in step 3 \(group 99\)",
        ),
        (
            lambda lines: repeat_first(lines, step=3, group_id=9),
            r"step 3: prompt 0 \(group 9\) .* not in its batch",
        ),
        (lambda lines: repeat_first(lines, outcome="rejected", group_id=99), r"prompt 0 of epoch 0 was used 2 times"),
        (lambda lines: repeat_first(lines, prompt_id=6), "prompt 6 of epoch 0 is not in the data"),
        (lambda lines: repeat_first(lines, epoch=2), "prompt 0 of epoch 2 is not in the data"),
        (lambda lines: lines[1].update(group_id=0), "group 0 has 2 prompts"),
        (lambda lines: lines[1].update(step=4), "step 4 has trained prompts but no metrics"),
        (lambda lines: lines[4].update(outcome="dropped"), "prompt 4 of epoch 0 has the unknown outcome 'dropped'"),
    ],
)  # fmt: skip
def test_account_of_an_inconsistent_run_names_the_prompt(
    change: Callable[[list[Line]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_accounting(make_run(tmp_path, change), range(6), 2)


def test_account_with_a_duplicate_sequence_or_step_reports_both(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    sequences = {"group_ids": [0, 0, 1, 2], "prompt_ids": [0, 0, 1, 2], "episode_ids": [1, 1, 0, 0]}
    file = run / "batches" / "step_1-version_0.safetensors"
    save_file({name: torch.tensor(ids) for name, ids in sequences.items()}, file)
    with (run / "metrics.jsonl").open("a") as records:
        records.write('{"step": 3, "sequences": 6.0}\n')

    with pytest.raises(AssertionError) as error:
        check_accounting(run, range(6), 2)

    assert r"sequence (0, 0, 1) (group, prompt, episode) is in its batch twice" in str(error.value)
    assert "expected the steps 1 to 4, found [1, 2, 3, 3]" in str(error.value)
