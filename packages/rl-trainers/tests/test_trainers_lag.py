"""The test for servers that are behind: how rarely it accuses a healthy one, and how soon a late one."""

import copy
import math

import numpy as np
import pytest
import torch

from rl_contracts.testing.models import make_tiny_model
from rl_trainers.weight_sync.gap.lag import LIMIT, LagTest, signed_z_score


def _rows(server, after, before):
    """What a look takes, of log-probs [B, T] of one row each of B groups."""
    pairs = ((server, after), (server, before), (after, before))
    return torch.stack([(x - y).double().square().sum(-1) for x, y in pairs], -1).tolist()


def _noise(rng, scale, heavy, shared):
    """Noise of 4 rows of 30 tokens: heavy tails, and a part that all tokens of a row share."""
    drawn = rng.standard_t(3, (4, 30)) if heavy else rng.normal(size=(4, 30))
    return torch.from_numpy(scale * (drawn + shared * rng.normal(size=(4, 1))))


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("shared", [0.0, 3.0])
@pytest.mark.parametrize("move", [0.0, 0.1, 1.0, 100.0])
def test_lag_healthy_server_is_never_accused_whatever_the_noise(move, heavy, shared):
    rng, test, worst = np.random.default_rng(0), LagTest(), 0.0
    for _ in range(1000):
        before = torch.zeros(4, 30, dtype=torch.float64)
        after = before + move * torch.from_numpy(rng.normal(size=(4, 30)))
        found = [x + _noise(rng, 1.0, heavy, shared) for x in (after, after, before)]
        worst = max(worst, test.add(_rows(*found)) or 0.0)
    assert worst < LIMIT


@pytest.mark.parametrize(("move", "looks"), [(100.0, 2), (10.0, 3), (2.0, 8), (1.0, 60)])
def test_lag_server_that_is_behind_is_named_the_sooner_the_clearer(move, looks):
    rng, late = np.random.default_rng(1), []
    for _ in range(50):
        test = LagTest()
        for look in range(1, 100):
            after = move * torch.from_numpy(rng.normal(size=(4, 30)))
            before = torch.zeros_like(after)
            found = [x + _noise(rng, 1.0, False, 0.0) for x in (before, after, before)]
            if (test.add(_rows(*found)) or 0.0) > LIMIT:
                late.append(look)
                break
    assert len(late) == 50
    assert max(late) <= looks


def test_lag_exactly_equal_scores_are_the_strongest_evidence_and_finite():
    test, after, before = LagTest(), torch.ones(2, 5), torch.zeros(2, 5)
    assert test.add(_rows(before, after, before)) is None, "one look is not enough"
    assert LIMIT < test.add(_rows(before, after, before)) < math.inf
    assert test.add(_rows(after, after, before)) == 0.0, "it caught up"


@pytest.mark.parametrize("first", [1, 4])
def test_lag_server_that_stays_at_an_old_version_is_named_within_three_looks(first):
    rng, test = np.random.default_rng(0), LagTest()
    first = torch.zeros(4, 30, dtype=torch.float64)
    direction, z = torch.from_numpy(rng.normal(size=(4, 30))), None
    for version in (first, first + 4, first + 8):  # one of four servers: every fourth update
        before, after = first + (version - 1) * direction, first + version * direction
        z = test.add(_rows(first + _noise(rng, 1e-3, False, 0.0), after, before))
    assert z > LIMIT


def test_lag_a_single_group_says_nothing():
    test, after, before = LagTest(), torch.ones(1, 5), torch.zeros(1, 5)
    assert [test.add(_rows(before, after, before)) for _ in range(5)] == [None] * 5


def test_lag_reference_that_hardly_moves_says_nothing():
    test, drift = LagTest(), torch.full((4, 30), 0.01)
    noise = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 30)))
    assert [test.add(_rows(noise, drift, 0 * drift)) for _ in range(30)] == [None] * 30
    assert test.add(_rows(noise, noise, noise)) is None


def test_lag_kernels_that_differ_by_a_tenth_of_their_noise_in_one_direction_accuse_nobody():
    rng, test, worst = np.random.default_rng(0), LagTest(), 0.0
    for move in (0.02, 0.1, 0.3, 1.0):
        for _ in range(500):
            before, after = torch.zeros(4, 30), torch.full((4, 30), move)  # all updates go one way
            found = test.add(_rows(after + _noise(rng, 1.0, False, 0.0) - 0.1, after, before))
            worst = max(worst, found or 0.0)
    assert worst < LIMIT


def test_lag_a_single_look_is_not_enough_however_clear():
    test, after, before = LagTest(), torch.ones(8, 50), torch.zeros(8, 50)
    noise = torch.from_numpy(np.random.default_rng(2).normal(size=(8, 50)))
    assert test.add(_rows(noise, noise, noise)) is None
    assert test.add(_rows(before, after, before)) < LIMIT


def test_lag_server_whose_own_scores_never_move_is_named_at_the_second_look_that_says_something():
    test = LagTest()
    assert [test.add_self_comparison(still) for still in (True, False, False)] == [None] * 3
    assert test.add_self_comparison(True) < LIMIT < test.add_self_comparison(True)
    assert [test.add_self_comparison(False) for _ in range(20)] == [None] * 20
    assert test.add_self_comparison(True) < LIMIT, "the old looks are forgotten"


def test_surprise_is_the_normal_quantile_of_students_t():
    values = np.array([0.5, 0.1, 0.9, 0.4, 0.6, 0.3, 0.8, 0.2])
    t = values.mean() / (values.std(ddof=1) / math.sqrt(8))
    assert t == pytest.approx(4.785, abs=0.02), "of 7 degrees of freedom, exceeded with probability 0.001"
    assert signed_z_score(values.tolist()) == pytest.approx(3.09, abs=0.02)
    assert signed_z_score((-values).tolist()) == -signed_z_score(values.tolist())


def _score(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def _take(model, parameters):
    for mine, other in zip(model.parameters(), parameters, strict=True):
        mine.data.copy_(other)


@pytest.mark.nightly
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lag_no_alarm_in_a_thousand_healthy_updates_of_a_model(tmp_path, lr, dtype):
    """float32 against the trainer, bfloat16 against a trainer that computes alike by other kernels, and against a
    peer."""
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    learner = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer, server = copy.deepcopy(learner).to(dtype), copy.deepcopy(learner).to(dtype)
    server.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(learner.parameters(), lr=lr, weight_decay=0.0)
    tests = {kind: LagTest() for kind in ("trainer", "peer")}
    worst, generator = dict.fromkeys(tests, 0.0), torch.Generator().manual_seed(0)
    for _ in range(250):
        ids = torch.randint(5, 250, (4, 24), generator=generator)
        advantages = torch.randn(4, 1, generator=generator)
        before, peer_before = _score(trainer, ids), _score(server, ids)
        loss = -(torch.log_softmax(learner(input_ids=ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0])
        optimizer.zero_grad()
        (loss * advantages).mean().backward()
        optimizer.step()
        _take(trainer, learner.parameters())
        _take(server, learner.parameters())
        after, scores = _score(trainer, ids), _score(server, ids)
        for kind, rows in (("trainer", (scores, after, before)), ("peer", (scores, scores, peer_before))):
            worst[kind] = max(worst[kind], tests[kind].add(_rows(*rows)) or 0.0)
    assert max(worst.values()) < LIMIT
