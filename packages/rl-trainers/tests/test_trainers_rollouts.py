"""The rollout writer: its files, and slow or full disks; and the evaluation by rewards."""

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
from rl_contracts.images import Image
from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.metrics import Metrics, collect, record
from rl_trainers import CompletionEvaluation, EvaluationConfig, RolloutWriter
from rl_trainers.recovery.lookup import RecoverConfig, truncate_to_checkpoint
from rl_trainers.run_log import rollouts as module
from rl_trainers.run_log.rollouts import RolloutsConfig
from rl_trainers.run_log.run_log import reward_std


def _trajectory(tokens=4, **values):
    versions = np.arange(tokens, dtype=np.int32) - 1
    logprobs = np.linspace(-1, 0, tokens, dtype=np.float32)
    return Trajectory(np.arange(tokens), versions >= 0, logprobs, versions, info={"completion": "é"}, **values)


def _lines(path):
    return list(json_lines(path))


def test_write_training_scheduled_steps_have_completions_and_outcomes(tmp_path):
    writer = RolloutWriter(tmp_path, rank=3, config=RolloutsConfig(every=2))
    for step in (1, 2, 3, 4):
        writer.write_training(step, [_trajectory(reward=0.5, prompt_id=step)])
        writer.write_training(step, [_trajectory(reward=1.0)], "filter")
    writer.write("eval_step_3", [_trajectory()])
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


PNG, JPEG = Image(b"\x89PNG of a circle", 20, 30), Image(b"JPEG of a square", 40, 50)
FILES = [f"images/{PNG.key}.png", f"images/{JPEG.key}.jpeg"]


def _write_once(directory, *trajectories, step=1, rank=0, **options):
    writer = RolloutWriter(directory, rank, **options)
    writer.write_training(step, trajectories)
    writer.destroy()


def test_rollout_writer_keeps_each_image_once_over_ranks_and_resumes(tmp_path):
    both, one = _trajectory(images=(PNG, JPEG)), _trajectory(images=(JPEG,))
    _write_once(tmp_path, both, one, one)
    written = {file: (tmp_path / file).stat().st_mtime_ns for file in FILES}

    for rank in (0, 1):
        _write_once(tmp_path, one, both, _trajectory(), step=2, rank=rank)

    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(file[7:] for file in FILES)
    assert {file: (tmp_path / file).stat().st_mtime_ns for file in FILES} == written
    assert [(tmp_path / file).read_bytes() for file in FILES] == [PNG.data, JPEG.data]
    png, jpeg = {"file": FILES[0], "width": 20, "height": 30}, {"file": FILES[1], "width": 40, "height": 50}
    assert [line.get("images") for line in _lines(tmp_path / "step_2-1.jsonl")] == [[jpeg], [png, jpeg], None]


def test_rollout_records_have_no_image_data(tmp_path):
    trajectory = _trajectory(images=(PNG,))
    parts = [{"type": "image_url", "image_url": {"url": PNG.data_url}}, {"type": "text", "text": "shape?"}]
    trajectory.info["conversation"] = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a circle"}]

    _write_once(tmp_path, trajectory)

    [line] = _lines(tmp_path / "step_1-0.jsonl")
    user, assistant = line["conversation"]
    assert user == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "shape?"}]}
    assert assistant == {"role": "assistant", "content": "a circle"}


def test_rollout_writer_replaces_partial_image(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / FILES[0]).write_bytes(PNG.data[:4])

    _write_once(tmp_path, _trajectory(images=(PNG,)))

    assert (tmp_path / FILES[0]).read_bytes() == PNG.data


def test_truncate_to_checkpoint_of_run_without_steps_removes_images(tmp_path):
    _write_once(tmp_path / "rollouts", _trajectory(images=(PNG,)))

    truncate_to_checkpoint(tmp_path, RecoverConfig(every=1))

    assert [*(tmp_path / "rollouts").iterdir()] == []


def test_rollout_writer_replaces_non_finite_numbers_and_surrogates(tmp_path):
    trajectory = _trajectory(reward=float("inf"))
    trajectory.info["note"] = "half \ud83d"
    trajectory.logprobs[2], trajectory.info["score"] = np.nan, {"mean": np.float64("-inf")}
    writer = RolloutWriter(tmp_path)
    writer.write_training(1, [trajectory])
    writer.write_learned(1, _batch(advantages=torch.full((2, 4), torch.nan)))
    writer.destroy()

    for path in tmp_path.iterdir():
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    [line] = _lines(tmp_path / "step_1-0.jsonl")
    assert (line["reward"], line["logprobs"], line["score"]) == (None, [-0.66667, None, 0.0], {"mean": None})
    assert line["note"] == "half ?"


def test_rollout_writer_without_tokens_keeps_text_and_outcome(tmp_path):
    writer = RolloutWriter(tmp_path, config=RolloutsConfig(tokens=False))
    writer.write_training(1, [_trajectory(reward=1.0)])
    writer.write_learned(1, _learned())
    writer.destroy()
    writer.destroy()

    [line] = _lines(tmp_path / "step_1-0.jsonl")
    assert not {"token_ids", "logprobs", "versions"} & line.keys()
    assert (line["completion"], line["reward"], line["version_last"]) == ("é", 1.0, 2)
    assert not any("proximal" in line for line in _lines(tmp_path / "learned_step_1-0.jsonl"))


def _batch(**values):
    """Two sequences of four tokens. The first token is the prompt; the last one of sequence 1 is not trained."""
    versions = torch.tensor([[-1, 0, 0, 1], [-1, 2, 2, 2]], dtype=torch.int32)
    trained = (versions >= 0) & torch.tensor([[True] * 4, [True] * 3 + [False]])
    ids = {"group_ids": torch.tensor([7, 7]), "episode_ids": torch.tensor([0, 1])}
    return TensorDict({"versions": versions, "loss_mask": trained, **ids, **values}, batch_size=2)


def _learned():
    return _batch(advantages=torch.zeros(2, 4), prox_logprobs=torch.tensor([[0.0, -1, -2, -3]] * 2))


def test_write_learned_scheduled_steps_have_a_record_per_sequence(tmp_path):
    writer = RolloutWriter(tmp_path, rank=1, config=RolloutsConfig(every=2))
    for step in (1, 2):
        writer.write_learned(step, _batch(advantages=torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.0, 1.0, 2.0, 0.0]])))
    writer.destroy()

    assert [path.name for path in tmp_path.iterdir()] == ["learned_step_2-1.jsonl"]
    assert _lines(tmp_path / "learned_step_2-1.jsonl") == [
        {"group_id": 7, "episode_id": 0, "tokens": 3, "advantage": 0.5},
        {"group_id": 7, "episode_id": 1, "tokens": 3, "advantage": 1.5, "advantages": [1.0, 2.0, None]},
    ]


def test_write_learned_with_tokens_has_trainer_logprobs(tmp_path):
    writer = RolloutWriter(tmp_path)
    writer.write_learned(1, _learned())
    writer.destroy()

    logprobs = [line["proximal"] for line in _lines(tmp_path / "learned_step_1-0.jsonl")]
    assert logprobs == [[-1.0, -2.0, -3.0], [-1.0, -2.0, None]]


def test_write_learned_untrained_sequence_has_no_advantage(tmp_path):
    batch = _batch(advantages=torch.zeros(2, 4))
    batch["loss_mask"][0] = False
    writer = RolloutWriter(tmp_path)
    writer.write_learned(1, batch)
    writer.destroy()

    assert [line["advantage"] for line in _lines(tmp_path / "learned_step_1-0.jsonl")] == [None, 0.0]


def test_rollout_writer_with_slow_disk_drops_records_without_blocking(tmp_path, monkeypatch, caplog):
    may_write, started, thread_names = threading.Event(), threading.Event(), []
    to_record = module.to_record

    def to_record_when_allowed(*arguments):
        thread_names.append(threading.current_thread().name)
        started.set()
        assert may_write.wait(60)
        return to_record(*arguments)

    monkeypatch.setattr(module, "to_record", to_record_when_allowed)
    monkeypatch.setattr(module, "MAX_QUEUED_TOKENS", 12)
    writer = RolloutWriter(tmp_path)
    writer.write_training(1, [_trajectory(tokens=40)])  # above the limit, but accepted since nothing else waits
    assert started.wait(60)
    for step in (2, 3):
        writer.write_training(step, [_trajectory(), _trajectory()])
    assert writer.dropped == 4
    assert caplog.records[-1].args == (4,)
    may_write.set()
    writer.destroy()
    assert set(thread_names) == {"rollout-writer"}
    assert [path.name for path in tmp_path.iterdir()] == ["step_1-0.jsonl"]


def test_rollout_writer_with_slow_disk_counts_bytes_of_waiting_images(tmp_path, monkeypatch):
    may_write, started = threading.Event(), threading.Event()

    def wait(*_):
        started.set()
        assert may_write.wait(60)

    monkeypatch.setattr(RolloutWriter, "_write_image", wait)
    monkeypatch.setattr(module, "MAX_QUEUED_TOKENS", 20)
    large = _trajectory(images=(Image(bytes(20 * module.TOKEN_BYTES), 1, 1),))
    writer = RolloutWriter(tmp_path)
    for trajectory in (_trajectory(images=(PNG,)), large):
        writer.write_training(1, [trajectory])
        assert started.wait(60)
    assert writer.dropped == 1
    may_write.set()
    writer.destroy()


def test_rollout_writer_with_full_disk_retries_until_it_has_room(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    writer = RolloutWriter(tmp_path)
    file = tmp_path / "step_1-0.jsonl"
    file.symlink_to("/dev/full")
    writer.write_training(1, [_trajectory()])
    while "retrying" not in caplog.text:
        assert writer._thread.is_alive()
        time.sleep(0.01)
    file.unlink()
    writer.write_training(2, [_trajectory()])
    writer.destroy()
    assert [len(path.read_text().splitlines()) for path in (file, tmp_path / "step_2-0.jsonl")] == [1, 1]
    assert caplog.text.count("retrying") == 1


def test_rollout_write_error_is_raised_by_next_write(tmp_path):
    writer = RolloutWriter(tmp_path / "rollouts")
    (tmp_path / "rollouts" / "step_1-0.jsonl").mkdir()
    writer.write_training(1, [_trajectory()])
    writer._thread.join(60)
    with pytest.raises(DataError, match=r"rollouts: IsADirectoryError.*rollouts\.every=0"):
        writer.write_training(2, [_trajectory()])
    writer.destroy()


def test_rollouts_every_negative_is_rejected():
    with pytest.raises(ConfigError, match=r"rollouts.every"):
        RolloutsConfig(every=-1)


def test_evaluation_returns_means_and_none_without_completions(tmp_path):
    class Rollout:
        def evaluate(self, rows, generation, n, workflow=None):
            return [
                _trajectory(reward=row["reward"], group_id=i) for i, row in enumerate(rows) if row["reward"] is not None
            ]

    def evaluate(rewards):
        rows = [{"reward": reward} for reward in rewards]
        return CompletionEvaluation(Rollout(), rows, EvaluationConfig(), GenerationConfig(), ParallelContext())(7)

    means = {"eval/length": 3.0, "eval/truncated": 0.0, "eval/examples": 4.0, "eval/failed": 0.0}
    quarter = {"eval/accuracy": 0.25, "eval/reward": 0.25, "eval/standard_error": 0.25, **means}
    assert evaluate([1.0, 0.0, 0.0, 0.0]) == quarter
    half = {"eval/accuracy": 0.5, "eval/reward": 0.5, "eval/standard_error": pytest.approx(12**-0.5)}
    assert evaluate([1.0, 0.0, None, 1.0]) == {**half, **means, "eval/failed": 1.0}
    names = ("accuracy", "reward", "standard_error", "length", "truncated")
    none = dict.fromkeys(f"eval/{name}" for name in names)
    assert evaluate([]) == {**none, "eval/examples": 0.0, "eval/failed": 0.0}


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        (EvaluationConfig(), GenerationConfig(temperature=0.0, max_new_tokens=40, min_new_tokens=20, stop=["#"])),
        (
            EvaluationConfig(temperature=0.5, max_new_tokens=9),
            GenerationConfig(temperature=0.5, max_new_tokens=9, min_new_tokens=9, stop=["#"]),
        ),
    ],
)
def test_evaluation_sampling_differs_in_temperature_and_length(config, sampling):
    requested = []

    class Rollout:
        def evaluate(self, rows, generation, n, workflow=None):
            requested.append(generation)
            return []

    training = GenerationConfig(max_new_tokens=40, min_new_tokens=20, stop=["#"])
    CompletionEvaluation(Rollout(), [{}], config, training, ParallelContext())(7)

    assert requested == [sampling]


def test_evaluation_counts_episode_of_several_sequences_once():
    class Rollout:
        def evaluate(self, rows, generation, n, workflow=None):
            return [_trajectory(reward=1.0, group_id=0) for _ in range(3)]

    metrics = CompletionEvaluation(Rollout(), [{}, {}], EvaluationConfig(), GenerationConfig(), ParallelContext())(7)

    assert (metrics["eval/accuracy"], metrics["eval/failed"]) == (0.5, 1.0)


def test_evaluation_majority_reads_last_message_of_each_episode():
    replies = {0: ["7", "8", "7"], 1: ["8", None, "8"]}

    class Rollout:
        def evaluate(self, rows, generation, n, workflow=None):
            trajectories = []
            for group, answers in replies.items():
                for episode, answer in enumerate(answers):
                    trajectory = _trajectory(reward=float(answer == "7"), group_id=group, episode_id=episode)
                    trajectory.info = {"conversation": [{"content": "1"}, {"role": "assistant", "content": answer}]}
                    trajectories.append(trajectory)
            return trajectories

    config = EvaluationConfig(n=3, temperature=1.0)
    evaluation = CompletionEvaluation(
        Rollout(), [{}, {}], config, GenerationConfig(), ParallelContext(), extract_answer=lambda text: text or None
    )
    metrics = evaluation(7)

    assert (metrics["eval/maj@3"], metrics["eval/pass@3"]) == (0.5, 0.5)
    assert metrics["eval/accuracy"] == pytest.approx(1 / 3)


def test_evaluation_of_named_set_has_its_metrics_file_and_workflow(tmp_path):
    workflows = []

    class Rollout:
        def evaluate(self, rows, generation, n, workflow=None):
            workflows.append(workflow)
            record("turns", 3)
            return [_trajectory(reward=1.0, group_id=0)]

    writer = RolloutWriter(tmp_path)
    parts = (Rollout(), [{}], EvaluationConfig(), GenerationConfig(), ParallelContext(), writer)
    with collect() as recorded:
        metrics = CompletionEvaluation(*parts, name="math", workflow="of the set")(7)
    writer.destroy()

    assert metrics["eval/math/accuracy"] == 1.0
    assert all(name.startswith("eval/math/") for name in metrics)
    assert recorded.results() == {"math/turns": 3.0}
    assert workflows == ["of the set"]
    assert [line["set"] for line in _lines(tmp_path / "eval_math_step_7-0.jsonl")] == ["math"]


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.5], [-1.0, 1.0]])
def test_evaluation_with_graded_rewards_has_no_accuracy(rewards):
    class Rollout:
        def evaluate(self, rows, generation, n, workflow=None):
            return [_trajectory(reward=reward, group_id=index) for index, reward in enumerate(rewards)]

    metrics = CompletionEvaluation(
        Rollout(), [{}] * len(rewards), EvaluationConfig(), GenerationConfig(), ParallelContext()
    )(7)

    assert "eval/accuracy" not in metrics
    assert metrics["eval/reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_reward_std_equals_sample_deviation_for_any_split():
    rewards = np.random.default_rng(0).normal(2.0, 3.0, 100)
    shards = [Metrics() for _ in range(3)]
    for number, reward in enumerate(rewards):
        shards[number % 3].add("mean", reward)
        shards[number % 3].add("square", reward**2)
        shards[number % 3].add("sequences", 1, kind="sum")
    for shard in shards[1:]:
        shards[0].merge(shard)
    results = shards[0].results()
    assert reward_std(results["mean"], results["square"], results["sequences"]) == pytest.approx(rewards.std(ddof=1))
    assert reward_std(1.0, 1.0, 1.0) is None


def test_rollout_value_that_json_rejects_raises_error_naming_info(tmp_path):
    writer = RolloutWriter(tmp_path)
    trajectory = _trajectory()
    trajectory.info["note"] = {"a set"}
    writer.write_training(1, [trajectory])
    writer._thread.join(60)
    with pytest.raises(DataError, match="`info`"):
        writer.write_training(2, [_trajectory()])
