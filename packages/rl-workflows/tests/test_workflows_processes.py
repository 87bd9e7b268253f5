"""What only real processes show: exchange between heads, failures while others wait, and kill -9."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from rl_contracts.testing.processes import fork_script

PROGRAM = Path(__file__).with_name("rollout_process.py")
DEADLINE = 240


def _start(directory, *arguments):
    """The program, and the file of what it writes."""
    log = directory / f"log-{'-'.join(map(str, arguments))}"
    return fork_script(PROGRAM, [*map(str, arguments), str(directory)], log, {"OMP_NUM_THREADS": "1"}), log


def _exit_codes(started):
    try:
        for process, _ in started:
            process.join(DEADLINE)
        return [process.exitcode for process, _ in started]
    finally:
        for process, _ in started:
            process.kill()


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory):
    """What each of two ranks saw."""
    directory = tmp_path_factory.mktemp("heads")
    ranks = [_start(directory, "heads", rank) for rank in range(2)]
    assert _exit_codes(ranks) == [0, 0], [log.read_text()[-2000:] for _, log in ranks]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def _batches(two_heads):
    return [head["batches"] for head in two_heads]


def test_two_heads_share_every_row_once_and_every_minibatch(two_heads):
    steps = list(zip(*_batches(two_heads), strict=True))
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
    assert prompts == Counter([*range(4), *range(100, 103)] * 3)


def test_two_heads_end_together_with_one_smaller_batch_and_count_what_is_left_over(two_heads):
    sizes = [sum(len(share["prompt_ids"]) for share in step) for step in zip(*_batches(two_heads), strict=True)]
    assert sizes == [4 * 3, 3 * 3], "groups of three; the head with six prompts does not go on alone"
    for head in two_heads:
        assert head["figures"]["groups/left_over"] == 2
    endings = [ending for head in two_heads for ending in head["endings"]]
    assert sorted(ending["prompt_id"] for ending in endings) == [*range(6), *range(100, 103)]
    left = [ending for ending in endings if ending["ending"] == "left_over"]
    assert sorted(ending["prompt_id"] for ending in left) == [4, 5]


def test_two_heads_token_rewards_of_one_heads_rows_are_zero_in_those_of_the_other(two_heads):
    first, last = zip(*_batches(two_heads), strict=True)
    for share in first:
        expected = [n * (prompt == 100) for n, prompt in zip(share["trained"], share["prompt_ids"], strict=True)]
        assert share["token_rewards"] == expected
    assert [share["token_rewards"] for share in last] == [None, None]


def test_two_heads_balance_the_tokens_of_a_batch(two_heads):
    for step in zip(*_batches(two_heads), strict=True):
        tokens = [sum(share["lengths"]) for share in step]
        longest = max(length for share in step for length in share["lengths"])
        assert abs(tokens[0] - tokens[1]) <= 2 * longest, "at most a row's difference in each of two minibatches"


def test_two_heads_evaluate_each_a_share_of_the_rows(two_heads):
    assert [head["eval"] for head in two_heads] == [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]


def test_two_heads_figures_of_workflows_are_means_over_all_episodes_of_both(two_heads):
    prompts = [*range(4), *range(100, 103)]
    for head in two_heads:
        assert head["figures"]["prompt/mean"] == pytest.approx(sum(prompts) / 7), "not the mean of the heads' means"
        assert head["figures"]["episodes"] == 3 * 7
        assert head["figures"]["groups/accepted"] == 7
        assert head["eval_figures"] == {"prompt/mean": 2.0, "episodes": 10.0}


def test_head_that_fails_while_the_other_waits_ends_both_with_its_cause(two_heads):
    for head in two_heads:
        assert "collecting rollouts failed on 1 of 2 ranks. rank 1:" in head["error"]
        assert "planted on rank 1" in head["error"]


def test_head_whose_process_dies_ends_the_wait_of_the_other(tmp_path):
    ranks = [_start(tmp_path, "lost", rank) for rank in range(2)]
    assert _exit_codes(ranks) == [0, 9], [log.read_text()[-2000:] for _, log in ranks]
    error = json.loads((tmp_path / "0.json").read_text())["error"]
    assert "collective of 2 ranks" in error


@pytest.mark.slow
def test_rank_that_is_no_head_takes_part_without_ever_using_its_client(tmp_path):
    ranks = [_start(tmp_path, "replica", rank) for rank in range(2)]
    assert _exit_codes(ranks) == [0, 0], [log.read_text()[-2000:] for _, log in ranks]
    of_head, of_other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert of_head == [1, 12, 6]
    assert of_other == [0, 12, 6], "the rows of its replica"


def test_run_killed_at_any_moment_trains_on_every_prompt_exactly_once(tmp_path):
    process, log = _start(tmp_path, "lineage")
    deadline = time.monotonic() + DEADLINE
    while not log.exists() or int((log.read_text().split() or ["0"])[-1]) < 20:
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.join()
    assert not (tmp_path / "done.json").exists()

    assert _exit_codes([_start(tmp_path, "lineage")]) == [0]

    assert sorted(json.loads((tmp_path / "done.json").read_text())) == list(range(60))
