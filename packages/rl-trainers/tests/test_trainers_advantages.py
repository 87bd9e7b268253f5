"""Advantages over a whole batch: groups may lie on several replicas, and no placement of the rows matters."""

import pytest
import torch
from policy_toys import on_replicas

from rl_contracts.parallel import ParallelContext
from rl_contracts.testing.batches import make_batch
from rl_contracts.trajectory import select
from rl_trainers.advantages import compute_advantages
from rl_trainers.algorithm import AlgorithmConfig
from rl_trainers.algorithm_parts import KLConfig, RewardConfig
from rl_trainers.summary import summarise
from rl_trainers.trust_region import second_moment_mask

SETTINGS = {
    "group_mean_std": {},
    "leave_one_out": {"baseline": "leave_one_out", "kl": KLConfig("reward", 0.1, "k1")},
    "batch std": {"baseline": "group_mean_batch_std"},
    "batch norm": {"baseline": "group_mean", "advantage_norm": "batch"},
    "reward to go": {"baseline": "none", "gamma": 0.9, "kl": KLConfig("reward", 0.1, "k2")},
    "normalised rewards": {"baseline": "none", "reward": RewardConfig(normalise="batch", clip=0.8)},
    "rewards of groups": {"baseline": "none", "reward": RewardConfig(normalise="group", scale=2.0, bias=1.0)},
    "gae": {"baseline": "gae", "gae_lambda": 0.9, "advantage_norm": "batch"},
    "turns": {"baseline": "gae", "gae_unit": "turn", "reward": RewardConfig(overlong_max=12, overlong_cache=8)},
}
PLACES = ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [])
SPLIT = ([9, 0, 5, 2], [1, 8, 3, 4, 7, 6])
"""Rows of each replica; no group lies on one of them alone."""


def _batch():
    batch = make_batch(10).exclude("advantages")
    generator = torch.Generator().manual_seed(0)
    for name in ("values", "ref_logprobs", "prox_logprobs"):
        batch[name] = torch.randn(batch["input_ids"].shape, generator=generator)
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
        return compute_advantages(rows, config, parallel)[0]

    alone = compute(_batch(), ParallelContext())
    assert alone.abs().sum() > 0
    for parts in (PLACES, SPLIT):
        torch.testing.assert_close(_everywhere(parts, compute), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.01, 0.5, 2.0, 1e9])
def test_second_moment_mask_is_the_same_whatever_replica_has_which_row(threshold):
    def compute(rows, parallel):
        rows["advantages"] = torch.where(rows["loss_mask"], (rows["rewards"] - 0.4)[:, None], 0.0)
        return second_moment_mask(rows, threshold, 2, parallel).int()

    alone = compute(_batch(), ParallelContext())
    mask = _batch()["attention_mask"]
    for parts in (PLACES, SPLIT):
        assert torch.equal(_everywhere(parts, compute)[mask], alone[mask])


def test_summary_is_the_same_on_every_replica():
    alone = summarise(_batch(), 2, ParallelContext())
    found = on_replicas(2, lambda replica: summarise(_padded(_batch(), SPLIT[replica.rank]), 2, replica))
    assert found[0] == found[1] == pytest.approx(alone)
    assert alone["staleness/share_2"] == 1.0


def test_advantages_kl_in_the_reward_of_a_group_baseline_is_summed_over_the_episode():
    batch = _batch()
    config = AlgorithmConfig(baseline="leave_one_out", kl=KLConfig("reward", 0.1, "k1"))
    found = compute_advantages(batch, config, ParallelContext())[0]
    learn = batch["loss_mask"]
    penalty = -0.1 * torch.where(learn, batch["logprobs"] - batch["ref_logprobs"], 0.0).sum(-1)
    reward = batch["rewards"] + penalty
    for row in (0, 5, 9):
        others = [r for r in range(10) if r // 4 == row // 4 and r != row]
        expected = reward[row] - reward[others].mean()
        torch.testing.assert_close(found[row][learn[row]], expected.expand(int(learn[row].sum())), rtol=1e-4, atol=1e-5)


def test_advantages_of_an_empty_share_are_empty():
    batch = select(_batch(), [])
    advantages, returns, *_ = compute_advantages(batch, AlgorithmConfig(baseline="gae"), ParallelContext())
    assert advantages.shape[0] == returns.shape[0] == 0
