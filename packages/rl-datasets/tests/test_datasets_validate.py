import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rl_contracts.errors import DataError, RewardError
from rl_datasets import GSM8K
from rl_datasets.validate import main, validate

GOOD = {"question": "How many?", "answer": "3 + 4 = 7\n#### 7"}
BAD = {"question": "How many?", "answer": "I forgot"}


def ending_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **_):
    """Return 1.0 if the text after `####` equals that of the answer, else 0.0."""
    if "####" not in answer:
        raise RewardError("no gold answer")
    return float(completions.split("####")[1] == answer.split("####")[1])


async def async_reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return ending_reward_fn(prompt, completions, prompt_ids, completion_ids, **data)


def half_reward_fn(prompt, completions, prompt_ids, completion_ids, **_):
    return 0.5


def dataset(tmp_path: Path, rows: list[dict[str, str]], form: str = "rl") -> GSM8K:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GSM8K(tmp_path, "train", form)


@pytest.mark.parametrize("reward_fn", [ending_reward_fn, async_reward_fn])
def test_validate_invalid_example_is_reported(tmp_path, reward_fn):
    report = validate(dataset(tmp_path, [GOOD, BAD, GOOD]), reward_fn)

    assert not report.ok
    assert [(o.index, o.reason) for o in report.failures] == [(1, "RewardError: no gold answer")]
    assert "2 of 3 gold answers" in str(report)
    assert "example 1: RewardError: no gold answer; its answer ends with 'I forgot'" in str(report)


def test_validate_reward_below_one_lists_all_and_prints_some(tmp_path):
    report = validate(dataset(tmp_path, [GOOD] * 25), half_reward_fn)

    assert len(report.failures) == 25
    assert report.failures[0].reason == "scores 0.5"
    assert "and 5 more" in str(report)


def test_validate_without_answers_or_examples_is_rejected(tmp_path):
    with pytest.raises(DataError, match="expected an 'answer' in example 0, found only prompt_id, messages"):
        validate(dataset(tmp_path, [GOOD], "sft"), ending_reward_fn)
    with pytest.raises(DataError, match="found none"):
        validate([], ending_reward_fn)


def test_validate_command_reports_both_splits(tmp_path):
    dataset(tmp_path, [GOOD, GOOD])
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "rl_datasets.validate", "gsm8k", str(tmp_path)]
    (tmp_path / "my_rewards.py").write_text(
        "def one(prompt, completions, prompt_ids, completion_ids, **_):\n    return 1.0\n"
    )

    done = subprocess.run(
        [*command, "--reward", "my_rewards:one"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "gsm8k train: 2 of 2 gold answers score 1.0\ngsm8k test: 2 of 2 gold answers score 1.0\n"


def test_validate_command_with_failing_examples_lists_them(tmp_path, capsys):
    dataset(tmp_path, [GOOD])
    (tmp_path / "my_zero.py").write_text(
        "def zero(prompt, completions, prompt_ids, completion_ids, **_):\n    return 0.0\n"
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        code = main(["gsm8k", str(tmp_path), "--reward", "my_zero:zero", "--split", "test"])

    assert code == 1
    assert "0 of 1 gold answers score 1.0\n  example 0: scores 0.0" in capsys.readouterr().out


def test_validate_command_prints_why_it_cannot_run(tmp_path, capsys):
    assert main(["gsm9k", str(tmp_path), "--reward", "json:dumps"]) == 2
    assert "unknown name 'gsm9k'" in capsys.readouterr().err
    assert main(["gsm8k", str(tmp_path / "none"), "--reward", "json:dumps"]) == 2
    assert "found nothing there" in capsys.readouterr().err


@pytest.mark.skipif(bool(entry_points(group="rl.rewards", name="gsm8k")), reason="rl-rewards is installed")
def test_validate_command_without_rl_rewards_names_it(tmp_path, capsys):
    dataset(tmp_path, [GOOD])

    assert main(["gsm8k", str(tmp_path)]) == 2
    assert "Install rl-rewards" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not entry_points(group="rl.rewards", name="gsm8k"), reason="rl-rewards is not installed")
def test_validate_command_of_generated_problems_succeeds(capsys):
    assert main(["word-problems", "--seed", "5"]) == 0
    assert "word-problems test: 512 of 512 gold answers score 1.0" in capsys.readouterr().out
