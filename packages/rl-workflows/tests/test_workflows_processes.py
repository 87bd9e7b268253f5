"""Behavior that needs real processes: exchange between leaders, failures while others wait, and kill -9."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from rl_contracts.testing.processes import fork_script

PROGRAM = Path(__file__).with_name("rollout_process.py")
DEADLINE = 240


def _start(directory, *arguments):
    """Start the program; return its process and its log file."""
    log = directory / f"log-{'-'.join(map(str, arguments))}"
    return fork_script(PROGRAM, [*map(str, arguments), str(directory)], log, {"OMP_NUM_THREADS": "1"}), log


def _exit_codes(processes):
    try:
        for process, _ in processes:
            process.join(DEADLINE)
        return [process.exitcode for process, _ in processes]
    finally:
        for process, _ in processes:
            process.kill()


@pytest.fixture(scope="module")
def two_leaders(tmp_path_factory):
    """Return the results of both ranks."""
    directory = tmp_path_factory.mktemp("leaders")
    ranks = [_start(directory, "leaders", rank) for rank in range(2)]
    assert _exit_codes(ranks) == [0, 0], [log.read_text()[-2000:] for _, log in ranks]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def _batches(two_leaders):
    return [leader["batches"] for leader in two_leaders]


def test_two_leaders_distribute_each_sequence_once_per_minibatch(two_leaders):
    steps = list(zip(*_batches(two_leaders), strict=True))
    prompts: Counter = Counter()
    for step in steps:
        sequences = [
            sequence
            for shard in step
            for sequence in zip(shard["group_ids"], shard["episode_ids"], shard["minibatch"], strict=True)
        ]
        assert len({sequence[:2] for sequence in sequences}) == len(sequences)
        ordered = sorted(sequences)
        minibatches = [minibatch for _, _, minibatch in ordered]
        assert minibatches == sorted(minibatches), "minibatches follow the global order"
        for shard in step:
            assert list(zip(shard["group_ids"], shard["episode_ids"], strict=True)) == sorted(
                zip(shard["group_ids"], shard["episode_ids"], strict=True)
            )
            prompts.update(shard["prompt_ids"])
    assert prompts == Counter([*range(4), *range(100, 103)] * 3)


def test_two_leaders_end_together_with_smaller_batch_and_leftovers(two_leaders):
    sizes = [sum(len(shard["prompt_ids"]) for shard in step) for step in zip(*_batches(two_leaders), strict=True)]
    assert sizes == [4 * 3, 3 * 3], "groups of three; the leader with six prompts does not continue alone"
    for leader in two_leaders:
        assert leader["metrics"]["groups/left_over"] == 2
    outcomes = [outcome for leader in two_leaders for outcome in leader["outcomes"]]
    assert sorted(outcome["prompt_id"] for outcome in outcomes) == [*range(6), *range(100, 103)]
    left_over = [outcome for outcome in outcomes if outcome["outcome"] == "left_over"]
    assert sorted(outcome["prompt_id"] for outcome in left_over) == [4, 5]


def test_two_leaders_missing_token_rewards_become_zero(two_leaders):
    first, last = zip(*_batches(two_leaders), strict=True)
    for shard in first:
        expected = [n * (prompt == 100) for n, prompt in zip(shard["trained"], shard["prompt_ids"], strict=True)]
        assert shard["token_rewards"] == expected
    assert [shard["token_rewards"] for shard in last] == [None, None]


def test_two_leaders_balance_tokens_of_batch(two_leaders):
    for step in zip(*_batches(two_leaders), strict=True):
        tokens = [sum(shard["lengths"]) for shard in step]
        longest = max(length for shard in step for length in shard["lengths"])
        assert abs(tokens[0] - tokens[1]) <= 2 * longest, "a difference of at most one sequence per minibatch"


def test_two_leaders_evaluate_disjoint_examples(two_leaders):
    assert [leader["eval"] for leader in two_leaders] == [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]


def test_two_leaders_workflow_metrics_average_over_all_episodes(two_leaders):
    prompts = [*range(4), *range(100, 103)]
    for leader in two_leaders:
        assert leader["metrics"]["prompt/mean"] == pytest.approx(sum(prompts) / 7), (
            "not the mean of the means per leader"
        )
        assert leader["metrics"]["episodes"] == 3 * 7
        assert leader["metrics"]["groups/accepted"] == 7
        assert leader["eval_metrics"] == {"prompt/mean": 2.0, "episodes": 10.0}


def test_leader_failure_while_other_waits_raises_on_both(two_leaders):
    for leader in two_leaders:
        assert "collecting rollouts failed on 1 of 2 ranks. rank 1:" in leader["error"]
        assert "injected on rank 1" in leader["error"]


def test_leader_process_dies_ends_wait_of_other(tmp_path):
    ranks = [_start(tmp_path, "lost", rank) for rank in range(2)]
    assert _exit_codes(ranks) == [0, 9], [log.read_text()[-2000:] for _, log in ranks]
    error = json.loads((tmp_path / "0.json").read_text())["error"]
    assert "collective of 2 ranks" in error


@pytest.mark.slow
def test_rank_that_is_no_leader_never_uses_its_client(tmp_path):
    ranks = [_start(tmp_path, "replica", rank) for rank in range(2)]
    assert _exit_codes(ranks) == [0, 0], [log.read_text()[-2000:] for _, log in ranks]
    leader_sizes, other_sizes = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert leader_sizes == [1, 12, 6]
    assert other_sizes == [0, 12, 6], "the sequences of its replica"


def test_run_killed_and_resumed_trains_on_each_prompt_once(tmp_path):
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
