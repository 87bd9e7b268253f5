"""Advantages over a whole batch: groups may lie on several replicas, and no placement of the rows matters."""

import numpy as np
import pytest
import torch
from policy_toys import on_replicas

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import Trajectory, select, stack
from rl_contracts.errors import DataError
from rl_contracts.testing.batches import make_batch
from rl_trainers.algorithms.components import SecondMomentMask
from rl_trainers.algorithms.config import AdvantageConfig, AlgorithmConfig, KLConfig, RewardConfig
from rl_trainers.algorithms.credit import assign_credit
from rl_trainers.algorithms.functional.aggregation import denominator, token_weights
from rl_trainers.run_log.run_log import summarise

SETTINGS = {
    "group mean and std": {},
    "leave one out": {
        "advantage": AdvantageConfig(std="none", leave_one_out=True),
        "kl": KLConfig("reward", 0.1, "k1"),
    },
    "batch std": {"advantage": AdvantageConfig(std="batch")},
    "batch mean, group std": {"advantage": AdvantageConfig(mean="batch", std="group")},
    "whitened": {"advantage": AdvantageConfig(std="none", whiten=True)},
    "return": {"advantage": AdvantageConfig("return", gamma=0.9), "kl": KLConfig("reward", 0.1, "k2")},
    "normalised rewards": {
        "advantage": AdvantageConfig("return"),
        "reward": RewardConfig(normalise="batch", clip=0.8),
    },
    "rewards of groups": {
        "advantage": AdvantageConfig("return"),
        "reward": RewardConfig(normalise="group", scale=2.0, bias=1.0),
    },
    "gae": {"advantage": AdvantageConfig("gae", lam=0.9, whiten=True)},
    "turns": {
        "advantage": AdvantageConfig("gae", unit="turn"),
        "reward": RewardConfig(overlong_max=12, overlong_cache=8),
    },
    "parts": {"advantage": AdvantageConfig("gdpo", options={"weights": {"form": 0.5}})},
}
PLACES = ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [])
SPLIT = ([9, 0, 5, 2], [1, 8, 3, 4, 7, 6])
"""Rows of each replica; no group lies on one of them alone."""


def _batch():
    batch = make_batch(10).exclude("advantages")
    generator = torch.Generator().manual_seed(0)
    for name in ("values", "ref_logprobs", "prox_logprobs"):
        batch[name] = torch.randn(batch["input_ids"].shape, generator=generator)
    for name in ("form", "right"):
        batch[f"reward_components/{name}"] = torch.randn(10, generator=generator)
    batch["loss_mask"][3] = False
    batch["minibatch"] = torch.arange(10) % 2
    return batch


def _everywhere(parts, compute):
    """`compute(rows, parallel) -> [B, T]` on replicas that hold these rows, put back together."""
    batch = _batch()
    found = on_replicas(len(parts), lambda replica: compute(_padded(batch, parts[replica.rank]), replica))
    result = torch.zeros(10, batch["input_ids"].shape[1], dtype=found[0].dtype)
    for rows, part in zip(parts, found, strict=True):
        result[list(rows), : part.shape[1]] = part
    return result


def _padded(batch, rows):
    return select(batch, list(rows))


@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_are_the_same_whatever_replica_has_which_row(name):
    config = AlgorithmConfig(**SETTINGS[name])

    def compute(rows, parallel):
        assign_credit(rows, config, parallel)
        return rows["advantages"]

    alone = compute(_batch(), ParallelContext())
    assert alone.abs().sum() > 0
    for parts in (PLACES, SPLIT):
        torch.testing.assert_close(_everywhere(parts, compute), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.01, 0.5, 2.0, 1e9])
def test_second_moment_mask_is_the_same_whatever_replica_has_which_row(threshold):
    def compute(rows, parallel):
        rows["advantages"] = torch.where(rows["loss_mask"], (rows["rewards"] - 0.4)[:, None], 0.0)
        SecondMomentMask(threshold=threshold).prepare(rows, parallel)
        return rows["moment_dropped"].int()

    alone = compute(_batch(), ParallelContext())
    mask = _batch()["attention_mask"]
    for parts in (PLACES, SPLIT):
        assert torch.equal(_everywhere(parts, compute)[mask], alone[mask])


def _row(episode, reward, trained):
    """A row of a prompt token and four generated ones, of which the first `trained` are learnt from."""
    generated = np.arange(5) >= 1
    return Trajectory(
        input_ids=np.arange(1, 6),
        loss_mask=generated & (np.arange(5) <= trained),
        logprobs=np.where(generated, -1.0, 0.0).astype(np.float32),
        versions=np.where(generated, 0, -1).astype(np.int32),
        reward=reward,
        temperature=1.0,
        truncated=False,
        prompt_id=0,
        group_id=0,
        episode_id=episode,
    )


def test_second_moment_mask_exchanges_as_much_for_many_tokens_as_for_few():
    def exchanged(rows):
        sizes = []

        def work(parallel):
            batch = _batch_of(rows, parallel.rank)
            gather = parallel.gather_tensors
            parallel.gather_tensors = lambda tensors, **more: (
                sizes.append(sum(value.nbytes for value in tensors.values())) or gather(tensors, **more)
            )
            SecondMomentMask(threshold=0.5).prepare(batch, parallel)
            return int(batch["moment_dropped"].sum())

        assert sum(on_replicas(2, work)) > 0
        return sum(sizes)

    assert exchanged(8) == exchanged(80)


def _batch_of(rows, seed):
    batch = make_batch(rows, seed)
    batch["prox_logprobs"] = batch["logprobs"] + batch["advantages"]
    batch["minibatch"] = torch.arange(rows) % 2
    return batch


def test_episode_of_several_rows_counts_once_in_its_group_and_by_rows_in_sequences_and_means():
    batch = stack([_row(0, 1.0, 4), _row(0, 1.0, 2), _row(0, 1.0, 0), _row(1, 0.0, 3)])
    mask = batch["loss_mask"]

    stats = assign_credit(batch, AlgorithmConfig(), ParallelContext())

    assert summarise(batch, 0).results()["reward/mean"] == 0.75  # over rows
    assert stats["reward/shaped"] == 0.5  # over episodes
    half = 0.5 / (0.5**0.5 + 1e-6)  # the group is two episodes: mean 1/2, sample std sqrt(1/2)
    expected = torch.tensor([half, half, half, -half])[:, None] * mask
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=0)
    kinds = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")
    # 4 + 2 + 3 trained tokens; the three rows that have one
    assert [float(denominator(mask, kind)) for kind in kinds] == [9.0, 3.0, 3.0, 3.0]
    found = [token_weights(mask, kind, constant_length=8).sum(-1).tolist() for kind in kinds]
    assert found == [[4, 2, 0, 3], [1, 1, 0, 1], [4, 2, 0, 3], [0.5, 0.25, 0, 0.375]]


def test_summary_is_the_same_on_every_replica():
    alone = summarise(_batch(), 2).results()
    found = on_replicas(
        2, lambda replica: summarise(_padded(_batch(), SPLIT[replica.rank]), 2).over_replicas(replica).results()
    )
    assert found[0] == found[1] == pytest.approx(alone)
    assert alone["staleness/fraction_2"] == 1.0


def test_advantages_kl_in_the_reward_of_an_outcome_is_summed_over_the_episode():
    batch = _batch()
    advantage = AdvantageConfig(std="none", leave_one_out=True)
    assign_credit(batch, AlgorithmConfig(advantage=advantage, kl=KLConfig("reward", 0.1, "k1")), ParallelContext())
    found, learn = batch["advantages"], batch["loss_mask"]
    penalty = -0.1 * torch.where(learn, batch["logprobs"] - batch["ref_logprobs"], 0.0).sum(-1)
    reward = batch["rewards"] + penalty
    for row in (0, 5, 9):
        others = [r for r in range(10) if r // 4 == row // 4 and r != row]
        expected = reward[row] - reward[others].mean()
        torch.testing.assert_close(found[row][learn[row]], expected.expand(int(learn[row].sum())), rtol=1e-4, atol=1e-5)


def test_advantages_of_an_answer_that_the_length_limit_ended_are_those_of_one_that_ended_itself():
    found = []
    for truncated in (True, False):
        batch = _batch()
        batch["truncated"][:] = truncated
        assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig("gae", lam=0.9)), ParallelContext())
        found.append(batch["returns"])
    assert torch.equal(*found)


def test_overlong_penalty_begins_at_a_fifth_of_the_length_unless_told():
    found = []
    for cache in (0, 3):
        batch = _batch()
        batch["rewards"][:] = 0.0
        reward = RewardConfig(overlong_max=15, overlong_cache=cache)
        assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig("return"), reward=reward), ParallelContext())
        found.append(batch["advantages"])
    assert found[0].min() < 0
    assert torch.equal(*found)


def test_advantages_of_an_empty_share_are_empty():
    batch = select(_batch(), [])
    assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig("gae")), ParallelContext())
    assert batch["advantages"].shape[0] == batch["returns"].shape[0] == 0


def test_maxrl_divides_by_the_mean_of_the_group():
    batch = stack([_row(episode, reward, 2) for episode, reward in enumerate([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])])
    batch["group_ids"] = torch.tensor([0, 0, 0, 0, 1, 1])

    assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig(std="mean")), ParallelContext())

    # (r - p) / p with p = 1/4: 3 for the right answer, -1 for the others; a group without a right one teaches nothing
    found = [float(batch["advantages"][row][batch["loss_mask"][row]][0]) for row in range(6)]
    assert found == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0], abs=1e-4)


@pytest.mark.parametrize("rewards", [[1.0, -1.0], [0.0, -1.0], [0.0, 0.0]])
def test_maxrl_without_a_positive_mean_has_no_advantage(rewards):
    batch = stack([_row(episode, reward, 2) for episode, reward in enumerate(rewards)])

    assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig(std="mean")), ParallelContext())

    assert not batch["advantages"].any()


def test_gdpo_adds_parts_that_are_normalized_separately():
    parts = {"right": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], "length": [0.0, 0.0, 9.0, 7.0, 3.0, 3.0, 3.0, 3.0]}
    rows = [_row(episode, sum(values), 2) for episode, values in enumerate(zip(*parts.values(), strict=True))]
    for row, values in zip(rows, zip(*parts.values(), strict=True), strict=True):
        row.reward_components = dict(zip(parts, values, strict=True))
    batch = stack(rows)
    batch["group_ids"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    advantage = AdvantageConfig("gdpo", options={"weights": {"length": 0.25}})

    assign_credit(batch, AlgorithmConfig(advantage=advantage), ParallelContext())

    total = 0.0
    for weight, values in zip((1.0, 0.25), parts.values(), strict=True):
        groups = np.array(values).reshape(2, 4)
        total += weight * (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    expected = (total - total.mean()) / total.std(ddof=1)
    found = [float(batch["advantages"][row][batch["loss_mask"][row]][0]) for row in range(8)]
    assert found == pytest.approx(expected.ravel(), abs=1e-5)


@pytest.mark.parametrize("weights", [{}, {"form": 1.0}])
def test_gdpo_without_the_parts_that_it_weighs_is_refused(weights):
    batch = stack([_row(episode, 1.0, 2) for episode in range(2)])
    if weights:
        batch["reward_components/right"] = torch.ones(2)

    config = AlgorithmConfig(advantage=AdvantageConfig("gdpo", options={"weights": weights}))

    with pytest.raises(DataError, match="CompositeReward"):
        assign_credit(batch, config, ParallelContext())
