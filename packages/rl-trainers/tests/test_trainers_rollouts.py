"""The writer of answers: what it writes, where, and what happens when the disk does not keep up."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import Trajectory
from rl_contracts.config import GenerationConfig
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.metrics import Metrics
from rl_trainers import CompletionEvaluation, EvaluationConfig, RolloutWriter
from rl_trainers.run_log import rollouts as module
from rl_trainers.run_log.rollouts import RolloutsConfig
from rl_trainers.run_log.run_log import reward_std


def _answer(tokens=4, **values):
    versions = np.arange(tokens, dtype=np.int32) - 1
    logprobs = np.linspace(-1, 0, tokens, dtype=np.float32)
    return Trajectory(np.arange(tokens), versions >= 0, logprobs, versions, info={"completion": "é"}, **values)


def _lines(path):
    return list(json_lines(path))


def test_training_steps_that_are_due_are_written_with_what_became_of_each_answer(tmp_path):
    writer = RolloutWriter(tmp_path, rank=3, config=RolloutsConfig(every=2))
    for step in (1, 2, 3, 4):
        writer.write_training(step, [_answer(reward=0.5, prompt_id=step)])
        writer.write_training(step, [_answer(reward=1.0)], "filter")
    writer.write("eval_step_3", [_answer()])
    writer.destroy()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval_step_3-3.jsonl",
        "step_2-3.jsonl",
        "step_4-3.jsonl",
    ]
    trained, rejected = _lines(tmp_path / "step_2-3.jsonl")
    assert (trained["rejected"], rejected["rejected"]) == (None, "filter")
    assert (trained["completion"], trained["reward"], trained["prompt_id"]) == ("é", 0.5, 2)
    assert (trained["version_first"], trained["version_last"]) == (0, 2)
    assert trained["token_ids"] == [1, 2, 3]
    assert trained["logprobs"] == [-0.66667, -0.33333, 0.0]
    assert trained["versions"] == [0, 1, 2]


def test_rollouts_numbers_that_are_not_finite_are_null(tmp_path):
    answer = _answer(reward=float("inf"))
    answer.logprobs[2], answer.info["score"] = np.nan, {"mean": np.float64("-inf")}
    writer = RolloutWriter(tmp_path)
    writer.write_training(1, [answer])
    writer.write_learned(1, _batch(advantages=torch.full((2, 4), torch.nan)))
    writer.destroy()

    for path in tmp_path.iterdir():
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    [line] = _lines(tmp_path / "step_1-0.jsonl")
    assert (line["reward"], line["logprobs"], line["score"]) == (None, [-0.66667, None, 0.0], {"mean": None})


def test_tokens_switched_off_leave_the_text_and_the_outcome(tmp_path):
    writer = RolloutWriter(tmp_path, config=RolloutsConfig(tokens=False))
    writer.write_training(1, [_answer(reward=1.0)])
    writer.destroy()
    writer.destroy()

    [line] = _lines(tmp_path / "step_1-0.jsonl")
    assert not {"token_ids", "logprobs", "versions"} & line.keys()
    assert (line["completion"], line["reward"], line["version_last"]) == ("é", 1.0, 2)


def _batch(**values):
    """Two rows of four tokens, of which the first is the prompt's, and the last one of row 1 is not trained."""
    versions = torch.tensor([[-1, 0, 0, 1], [-1, 2, 2, 2]], dtype=torch.int32)
    learn = (versions >= 0) & torch.tensor([[True] * 4, [True] * 3 + [False]])
    ids = {"group_ids": torch.tensor([7, 7]), "episode_ids": torch.tensor([0, 1])}
    return TensorDict({"versions": versions, "loss_mask": learn, **ids, **values}, batch_size=2)


def test_what_was_learned_from_rows_is_written_of_steps_that_are_due(tmp_path):
    writer = RolloutWriter(tmp_path, rank=1, config=RolloutsConfig(every=2))
    for step in (1, 2):
        writer.write_learned(step, _batch(advantages=torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.0, 1.0, 2.0, 0.0]])))
    writer.destroy()

    assert [path.name for path in tmp_path.iterdir()] == ["learned_step_2-1.jsonl"]
    assert _lines(tmp_path / "learned_step_2-1.jsonl") == [
        {"group_id": 7, "episode_id": 0, "tokens": 3, "advantage": 0.5},
        {"group_id": 7, "episode_id": 1, "tokens": 3, "advantage": 1.5, "advantages": [1.0, 2.0, None]},
    ]


@pytest.mark.parametrize("tokens", [True, False])
def test_log_probs_of_the_trainer_are_written_where_they_are_known_and_asked_for(tmp_path, tokens):
    writer = RolloutWriter(tmp_path, config=RolloutsConfig(tokens=tokens))
    writer.write_learned(1, _batch(advantages=torch.zeros(2, 4), prox_logprobs=torch.tensor([[0.0, -1, -2, -3]] * 2)))
    writer.destroy()

    found = [line.get("proximal") for line in _lines(tmp_path / "learned_step_1-0.jsonl")]
    assert found == ([[-1.0, -2.0, -3.0], [-1.0, -2.0, None]] if tokens else [None, None])


def test_row_of_which_nothing_is_trained_has_no_advantage(tmp_path):
    batch = _batch(advantages=torch.zeros(2, 4))
    batch["loss_mask"][0] = False
    writer = RolloutWriter(tmp_path)
    writer.write_learned(1, batch)
    writer.destroy()

    assert [line["advantage"] for line in _lines(tmp_path / "learned_step_1-0.jsonl")] == [None, 0.0]


def test_writing_happens_beside_the_caller_and_never_waits_for_the_disk(tmp_path, monkeypatch, caplog):
    released, started, writers = threading.Event(), threading.Event(), []
    as_json = module.to_record

    def slow(*given):
        writers.append(threading.current_thread().name)
        started.set()
        assert released.wait(60)
        return as_json(*given)

    monkeypatch.setattr(module, "to_record", slow)
    monkeypatch.setattr(module, "WAITING_TOKENS", 12)
    writer = RolloutWriter(tmp_path)
    writer.write_training(1, [_answer(tokens=40)])  # one more than may wait is written where nothing else waits
    assert started.wait(60)
    for step in (2, 3):
        writer.write_training(step, [_answer(), _answer()])
    assert writer.left_out == 4
    assert "the disk is too slow; 4 answers are not written" in caplog.text
    released.set()
    writer.destroy()
    assert set(writers) == {"rollout-writer"}
    assert [path.name for path in tmp_path.iterdir()] == ["step_1-0.jsonl"]


def test_answers_for_which_the_disk_has_no_room_are_written_when_it_has(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    writer = RolloutWriter(tmp_path)
    file = tmp_path / "step_1-0.jsonl"
    file.symlink_to("/dev/full")
    writer.write_training(1, [_answer()])
    while "cannot be written, and will be again" not in caplog.text:
        assert writer._thread.is_alive()
        time.sleep(0.01)
    file.unlink()
    writer.write_training(2, [_answer()])
    writer.destroy()
    assert [len(path.read_text().splitlines()) for path in (file, tmp_path / "step_2-0.jsonl")] == [1, 1]
    assert caplog.text.count("will be again") == 1


def test_answers_that_cannot_be_written_end_the_run_with_the_reason(tmp_path):
    writer = RolloutWriter(tmp_path / "rollouts")
    (tmp_path / "rollouts" / "step_1-0.jsonl").mkdir()
    writer.write_training(1, [_answer()])
    writer._thread.join(60)
    with pytest.raises(DataError, match=r"cannot be written to .*rollouts: IsADirectoryError.*rollouts\.every=0"):
        writer.write_training(2, [_answer()])
    writer.destroy()


def test_every_that_is_no_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match=r"rollouts.every"):
        RolloutsConfig(every=-1)


def test_answer_evaluation_gives_shares_and_means_and_none_without_answers(tmp_path):
    class Rollout:
        def evaluate(self, rows, generation, n):
            return [
                _answer(reward=row["reward"], group_id=i) for i, row in enumerate(rows) if row["reward"] is not None
            ]

    def figures(rewards):
        rows = [{"reward": reward} for reward in rewards]
        return CompletionEvaluation(Rollout(), rows, EvaluationConfig(), ParallelContext())(7)

    of_four = {"eval/length": 3.0, "eval/rows": 4.0, "eval/failed": 0.0}
    assert figures([1.0, 0.0, 0.0, 0.0]) == {"eval/accuracy": 0.25, "eval/reward": 0.25, **of_four}
    assert figures([1.0, 0.0, None, 1.0]) == {"eval/accuracy": 0.5, "eval/reward": 0.5, **of_four, "eval/failed": 1.0}
    none = dict.fromkeys(("eval/accuracy", "eval/reward", "eval/length"))
    assert figures([]) == {**none, "eval/rows": 0.0, "eval/failed": 0.0}
    assert GenerationConfig(temperature=0.0) == EvaluationConfig().generation


def test_answer_evaluation_counts_an_episode_of_several_rows_once():
    class Rollout:
        def evaluate(self, rows, generation, n):
            return [_answer(reward=1.0, group_id=0) for _ in range(3)]

    figures = CompletionEvaluation(Rollout(), [{}, {}], EvaluationConfig(), ParallelContext())(7)

    assert (figures["eval/accuracy"], figures["eval/failed"]) == (0.5, 1.0)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.5], [122.0], [-1.0, 1.0]])
def test_reward_that_is_not_0_or_1_is_not_called_accuracy(rewards):
    class Rollout:
        def evaluate(self, rows, generation, n):
            return [_answer(reward=reward, group_id=index) for index, reward in enumerate(rewards)]

    figures = CompletionEvaluation(Rollout(), [{}] * len(rewards), EvaluationConfig(), ParallelContext())(7)

    assert "eval/accuracy" not in figures
    assert figures["eval/reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_reward_std_is_the_sample_deviation_whatever_the_split():
    rewards = np.random.default_rng(0).normal(2.0, 3.0, 100)
    parts = [Metrics() for _ in range(3)]
    for number, reward in enumerate(rewards):
        parts[number % 3].add("mean", reward)
        parts[number % 3].add("square", reward**2)
        parts[number % 3].add("rows", 1, kind="sum")
    for part in parts[1:]:
        parts[0].merge(part)
    found = parts[0].results()
    assert reward_std(found["mean"], found["square"], found["rows"]) == pytest.approx(rewards.std(ddof=1))
    assert reward_std(1.0, 1.0, 1.0) is None


def test_answers_that_json_cannot_hold_name_another_remedy_than_a_disk(tmp_path):
    writer = RolloutWriter(tmp_path)
    answer = _answer()
    answer.info["note"] = {"a set"}
    writer.write_training(1, [answer])
    writer._thread.join(60)
    with pytest.raises(DataError, match="`info`"):
        writer.write_training(2, [_answer()])


def test_writer_of_half_a_character_replaces_it(tmp_path):
    writer = RolloutWriter(tmp_path)
    answer = _answer()
    answer.info["note"] = "half \ud83d"

    writer.write_training(1, [answer])
    writer.destroy()

    (row,) = _lines(tmp_path / "step_1-0.jsonl")
    assert row["note"] == "half ?"
