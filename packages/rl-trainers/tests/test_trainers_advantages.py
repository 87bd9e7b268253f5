"""Advantages over a whole batch, which do not depend on how its sequences are placed on replicas."""

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
from rl_trainers.run_log.run_log import batch_metrics

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
    "rewards normalized over batch": {
        "advantage": AdvantageConfig("return"),
        "reward": RewardConfig(normalize="batch", clip=0.8),
    },
    "rewards normalized over groups": {
        "advantage": AdvantageConfig("return"),
        "reward": RewardConfig(normalize="group", scale=2.0, bias=1.0),
    },
    "gae": {"advantage": AdvantageConfig("gae", lam=0.9, whiten=True)},
    "turns": {
        "advantage": AdvantageConfig("gae", unit="turn"),
        "reward": RewardConfig(overlong_max=12, overlong_cache=8),
    },
    "components": {"advantage": AdvantageConfig("gdpo", options={"weights": {"form": 0.5}})},
}
ONE_REPLICA = ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [])
TWO_REPLICAS = ([9, 0, 5, 2], [1, 8, 3, 4, 7, 6])
"""Indices of the sequences of each replica; every group is spread over both."""


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


def _merge_over_replicas(placement, compute):
    """Run `compute(rows, parallel) -> [B, T]` on replicas with the sequences of `placement`, and merge the results."""
    batch = _batch()
    replica_results = on_replicas(
        len(placement), lambda replica: compute(_sequences(batch, placement[replica.rank]), replica)
    )
    result = torch.zeros(10, batch["input_ids"].shape[1], dtype=replica_results[0].dtype)
    for rows, replica_result in zip(placement, replica_results, strict=True):
        result[list(rows), : replica_result.shape[1]] = replica_result
    return result


def _sequences(batch, rows):
    return select(batch, list(rows))


@pytest.mark.guarantee(
    "Groups are found by id: advantages do not depend on which rank holds a sequence.", area="prompts"
)
@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_any_placement_on_replicas_gives_the_same(name):
    config = AlgorithmConfig(**SETTINGS[name])

    def compute(rows, parallel):
        assign_credit(rows, config, parallel)
        return rows["advantages"]

    expected = compute(_batch(), ParallelContext())
    assert expected.abs().sum() > 0
    for placement in (ONE_REPLICA, TWO_REPLICAS):
        torch.testing.assert_close(_merge_over_replicas(placement, compute), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.01, 0.5])
def test_second_moment_mask_any_placement_on_replicas_gives_the_same(threshold):
    def compute(rows, parallel):
        rows["advantages"] = torch.where(rows["loss_mask"], (rows["rewards"] - 0.4)[:, None], 0.0)
        SecondMomentMask(threshold=threshold).prepare(rows, parallel)
        return rows["moment_dropped"].int()

    expected = compute(_batch(), ParallelContext())
    mask = _batch()["attention_mask"]
    for placement in (ONE_REPLICA, TWO_REPLICAS):
        assert torch.equal(_merge_over_replicas(placement, compute)[mask], expected[mask])


def _row(episode, reward, trained):
    """Return a sequence of one prompt token and four generated tokens, of which the first `trained` are trained."""
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


def test_second_moment_mask_exchanged_bytes_do_not_depend_on_tokens():
    def exchanged_bytes(rows):
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

    assert exchanged_bytes(8) == exchanged_bytes(80)


def _batch_of(rows, seed):
    batch = make_batch(rows, seed)
    batch["prox_logprobs"] = batch["logprobs"] + batch["advantages"]
    batch["minibatch"] = torch.arange(rows) % 2
    return batch


def test_episode_of_several_sequences_counts_once_in_group_not_in_loss():
    batch = stack([_row(0, 1.0, 4), _row(0, 1.0, 2), _row(0, 1.0, 0), _row(1, 0.0, 3)])
    mask = batch["loss_mask"]

    stats = assign_credit(batch, AlgorithmConfig(), ParallelContext())

    assert batch_metrics(batch, 0).results()["reward/mean"] == 0.75  # over sequences
    assert stats["reward/shaped"] == 0.5  # over episodes
    half = 0.5 / (0.5**0.5 + 1e-6)  # the group is two episodes: mean 1/2, sample std sqrt(1/2)
    expected = torch.tensor([half, half, half, -half])[:, None] * mask
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=0)
    kinds = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")
    # 4 + 2 + 3 trained tokens in three sequences; the fourth has none
    assert [float(denominator(mask, kind)) for kind in kinds] == [9.0, 3.0, 3.0, 3.0]
    weight_sums = [token_weights(mask, kind, constant_length=8).sum(-1).tolist() for kind in kinds]
    assert weight_sums == [[4, 2, 0, 3], [1, 1, 0, 1], [4, 2, 0, 3], [0.5, 0.25, 0, 0.375]]


def test_summary_is_the_same_on_every_replica():
    expected = batch_metrics(_batch(), 2).results()
    summaries = on_replicas(
        2,
        lambda replica: (
            batch_metrics(_sequences(_batch(), TWO_REPLICAS[replica.rank]), 2).over_replicas(replica).results()
        ),
    )
    assert summaries[0] == summaries[1] == pytest.approx(expected)
    assert expected["staleness/fraction_2"] == 1.0


def test_advantages_outcome_sums_kl_penalty_over_episode():
    batch = _batch()
    advantage = AdvantageConfig(std="none", leave_one_out=True)
    assign_credit(batch, AlgorithmConfig(advantage=advantage, kl=KLConfig("reward", 0.1, "k1")), ParallelContext())
    advantages, trained = batch["advantages"], batch["loss_mask"]
    penalty = -0.1 * torch.where(trained, batch["logprobs"] - batch["ref_logprobs"], 0.0).sum(-1)
    reward = batch["rewards"] + penalty
    for row in (0, 5, 9):
        rest_of_group = [r for r in range(10) if r // 4 == row // 4 and r != row]
        expected = reward[row] - reward[rest_of_group].mean()
        torch.testing.assert_close(
            advantages[row][trained[row]], expected.expand(int(trained[row].sum())), rtol=1e-4, atol=1e-5
        )


def test_advantages_truncated_completion_is_not_bootstrapped():
    returns = []
    for truncated in (True, False):
        batch = _batch()
        batch["truncated"][:] = truncated
        assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig("gae", lam=0.9)), ParallelContext())
        returns.append(batch["returns"])
    assert torch.equal(*returns)


def test_overlong_penalty_default_cache_is_fifth_of_maximum():
    advantages = []
    for cache in (0, 3):
        batch = _batch()
        batch["rewards"][:] = 0.0
        reward = RewardConfig(overlong_max=15, overlong_cache=cache)
        assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig("return"), reward=reward), ParallelContext())
        advantages.append(batch["advantages"])
    assert advantages[0].min() < 0
    assert torch.equal(*advantages)


def test_advantages_empty_batch_gives_empty_entries():
    batch = select(_batch(), [])
    assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig("gae")), ParallelContext())
    assert batch["advantages"].shape[0] == batch["returns"].shape[0] == 0


def test_maxrl_divides_by_group_mean_if_it_is_positive():
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.0, -1.0]
    batch = stack([_row(episode, reward, 2) for episode, reward in enumerate(rewards)])
    batch["group_ids"] = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])

    assign_credit(batch, AlgorithmConfig(advantage=AdvantageConfig(std="mean")), ParallelContext())

    # (r - p) / p with p = 1/4: 3 for the correct completion, -1 for the others; the other means are 0, 0 and -1/2
    advantages = [float(batch["advantages"][row][batch["loss_mask"][row]][0]) for row in range(10)]
    assert advantages[:4] == pytest.approx([3.0, -1.0, -1.0, -1.0], abs=1e-4)
    assert advantages[4:] == [0.0] * 6


def test_assign_credit_counts_groups_without_variance_and_of_one():
    batch = stack([_row(episode, reward, 2) for episode, reward in enumerate([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])])
    batch["group_ids"] = torch.tensor([0, 0, 1, 1, 2, 2, 3])

    counts = assign_credit(batch, AlgorithmConfig(), ParallelContext())

    assert (counts["groups/trained"], counts["groups/zero_variance"], counts["groups/singleton"]) == (4, 2, 1)


def test_gdpo_adds_separately_normalized_components():
    components = {"right": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], "length": [0.0, 0.0, 9.0, 7.0, 3.0, 3.0, 3.0, 3.0]}
    rows = [_row(episode, sum(values), 2) for episode, values in enumerate(zip(*components.values(), strict=True))]
    for row, values in zip(rows, zip(*components.values(), strict=True), strict=True):
        row.reward_components = dict(zip(components, values, strict=True))
    batch = stack(rows)
    batch["group_ids"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    advantage = AdvantageConfig("gdpo", options={"weights": {"length": 0.25}})

    assign_credit(batch, AlgorithmConfig(advantage=advantage), ParallelContext())

    total = 0.0
    for weight, values in zip((1.0, 0.25), components.values(), strict=True):
        groups = np.array(values).reshape(2, 4)
        total += weight * (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    expected = (total - total.mean()) / total.std(ddof=1)
    advantages = [float(batch["advantages"][row][batch["loss_mask"][row]][0]) for row in range(8)]
    assert advantages == pytest.approx(expected.ravel(), abs=1e-5)


@pytest.mark.parametrize("weights", [{}, {"form": 1.0}])
def test_gdpo_missing_reward_components_are_rejected(weights):
    batch = stack([_row(episode, 1.0, 2) for episode in range(2)])
    if weights:
        batch["reward_components/right"] = torch.ones(2)

    config = AlgorithmConfig(advantage=AdvantageConfig("gdpo", options={"weights": weights}))

    with pytest.raises(DataError, match="CompositeReward"):
        assign_credit(batch, config, ParallelContext())
