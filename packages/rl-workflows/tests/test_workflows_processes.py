"""What only real processes show: exchange between heads, failures while others wait, and kill -9."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("rollout_process.py")
DEADLINE = 240

pytestmark = pytest.mark.slow  # each process imports torch


def _start(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(PROGRAM), *map(str, arguments)], env=environment, **options)


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory):
    """What each of two ranks saw."""
    directory = tmp_path_factory.mktemp("heads")
    ranks = [_start("heads", rank, directory) for rank in range(2)]
    try:
        assert [rank.wait(DEADLINE) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_heads_share_every_row_once_and_every_minibatch(two_heads):
    steps = list(zip(*(head["batches"] for head in two_heads), strict=True))
    prompts: Counter = Counter()
    for step in steps:
        rows = [
            row
            for share in step
            for row in zip(share["group_ids"], share["episode_ids"], share["minibatch"], strict=True)
        ]
        assert len({row[:2] for row in rows}) == len(rows)
        ordered = sorted(rows)
        cut = [minibatch for _, _, minibatch in ordered]
        assert cut == sorted(cut), "minibatches are cut in global order"
        for share in step:
            assert list(zip(share["group_ids"], share["episode_ids"], strict=True)) == sorted(
                zip(share["group_ids"], share["episode_ids"], strict=True)
            )
            prompts.update(share["prompt_ids"])
    assert prompts == Counter([*range(6), *range(100, 103)] * 3)


def test_two_heads_balance_the_tokens_of_a_batch(two_heads):
    for step in zip(*(head["batches"] for head in two_heads), strict=True):
        tokens = [sum(share["lengths"]) for share in step]
        longest = max(length for share in step for length in share["lengths"])
        assert abs(tokens[0] - tokens[1]) <= 2 * longest, "at most a row's difference in each of two minibatches"


def test_two_heads_evaluate_each_a_share_of_the_rows(two_heads):
    assert [head["eval"] for head in two_heads] == [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]


def test_two_heads_figures_of_workflows_are_means_over_all_episodes_of_both(two_heads):
    prompts = [*range(6), *range(100, 103)]
    for head in two_heads:
        assert head["figures"]["prompt/mean"] == pytest.approx(sum(prompts) / 9), "not the mean of the heads' means"
        assert head["figures"]["episodes"] == 3 * 9
        assert head["figures"]["groups/accepted"] == 9
        assert head["eval_figures"] == {"prompt/mean": 2.0, "episodes": 10.0}


def test_head_that_fails_while_the_other_waits_ends_both_with_its_cause(two_heads):
    for head in two_heads:
        assert "collecting rollouts failed on 1 of 2 ranks. rank 1:" in head["error"]
        assert "planted on rank 1" in head["error"]


def test_head_whose_process_dies_ends_the_wait_of_the_other(tmp_path):
    ranks = [_start("lost", rank, tmp_path) for rank in range(2)]
    try:
        assert [rank.wait(DEADLINE) for rank in ranks] == [0, 9]
    finally:
        for rank in ranks:
            rank.kill()
    error = json.loads((tmp_path / "0.json").read_text())["error"]
    assert "an exchange between 2 ranks failed: another rank ended, or did not come" in error


def test_run_killed_at_any_moment_trains_on_every_prompt_exactly_once(tmp_path):
    for kill_after in (20, None):
        process = _start("lineage", tmp_path, stdout=subprocess.PIPE, text=True)
        try:
            for line in process.stdout:
                if kill_after is not None and int(line) >= kill_after:
                    process.send_signal(signal.SIGKILL)
                    break
            process.wait(DEADLINE)
        finally:
            process.kill()
            process.stdout.close()
    assert sorted(json.loads((tmp_path / "done.json").read_text())) == list(range(60))
