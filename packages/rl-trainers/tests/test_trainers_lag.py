"""Test for servers that are behind: false alarms for healthy servers, and time to detection."""

import copy
import math

import numpy as np
import pytest
import torch

from rl_contracts.testing.models import make_tiny_model
from rl_trainers.weight_sync.gap.lag import LIMIT, LagTest, signed_z_score


def _groups(server, after, before):
    """Return the argument of `LagTest.add` for log-probs [B, T] of B groups with one sequence each."""
    pairs = ((server, after), (server, before), (after, before))
    return torch.stack([(x - y).double().square().sum(-1) for x, y in pairs], -1).tolist()


def _noise(rng, scale, heavy, shared):
    """Return noise of 4 sequences of 30 tokens.

    `heavy` gives it heavy tails; `shared` scales a component that all tokens of a sequence share.
    """
    drawn = rng.standard_t(3, (4, 30)) if heavy else rng.normal(size=(4, 30))
    return torch.from_numpy(scale * (drawn + shared * rng.normal(size=(4, 1))))


@pytest.mark.parametrize(
    ("move", "heavy", "shared"), [(0.0, False, 0.0), (0.1, True, 3.0), (1.0, True, 0.0), (100.0, False, 3.0)]
)
def test_lag_healthy_server_raises_no_alarm_with_any_noise(move, heavy, shared):
    rng, test, worst = np.random.default_rng(0), LagTest(), 0.0
    for _ in range(1000):
        before = torch.zeros(4, 30, dtype=torch.float64)
        after = before + move * torch.from_numpy(rng.normal(size=(4, 30)))
        logprobs = [x + _noise(rng, 1.0, heavy, shared) for x in (after, after, before)]
        worst = max(worst, test.add(_groups(*logprobs)) or 0.0)
    assert worst < LIMIT


@pytest.mark.parametrize(("move", "limit"), [(100.0, 2), (2.0, 8), (1.0, 60)])
def test_lag_server_behind_is_detected_within_limit(move, limit):
    rng, detected = np.random.default_rng(1), []
    for _ in range(50):
        test = LagTest()
        for comparison in range(1, 100):
            after = move * torch.from_numpy(rng.normal(size=(4, 30)))
            before = torch.zeros_like(after)
            logprobs = [x + _noise(rng, 1.0, False, 0.0) for x in (before, after, before)]
            if (test.add(_groups(*logprobs)) or 0.0) > LIMIT:
                detected.append(comparison)
                break
    assert len(detected) == 50
    assert max(detected) <= limit


def test_lag_equal_scores_give_finite_result_above_limit():
    test, after, before = LagTest(), torch.ones(2, 5), torch.zeros(2, 5)
    assert test.add(_groups(before, after, before)) is None, "one comparison is not enough"
    assert LIMIT < test.add(_groups(before, after, before)) < math.inf
    assert test.add(_groups(after, after, before)) == 0.0, "the server has caught up"


def test_lag_server_at_old_version_is_detected_in_three_comparisons():
    rng, test = np.random.default_rng(0), LagTest()
    old = torch.zeros(4, 30, dtype=torch.float64)
    direction, z = torch.from_numpy(rng.normal(size=(4, 30))), None
    for version in (1, 5, 9):  # one of four servers, compared at every fourth update
        before, after = old + (version - 1) * direction, old + version * direction
        z = test.add(_groups(old + _noise(rng, 1e-3, False, 0.0), after, before))
    assert z > LIMIT


def test_lag_single_group_or_reference_that_barely_moves_gives_none():
    test, after, before = LagTest(), torch.ones(1, 5), torch.zeros(1, 5)
    assert [test.add(_groups(before, after, before)) for _ in range(5)] == [None] * 5
    test, drift = LagTest(), torch.full((4, 30), 0.01)
    noise = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 30)))
    assert [test.add(_groups(noise, drift, 0 * drift)) for _ in range(30)] == [None] * 30
    assert test.add(_groups(noise, noise, noise)) is None


def test_lag_small_systematic_kernel_difference_raises_no_alarm():
    rng, test, worst = np.random.default_rng(0), LagTest(), 0.0
    for move in (0.02, 0.1, 0.3, 1.0):
        for _ in range(500):
            before, after = torch.zeros(4, 30), torch.full((4, 30), move)  # all updates go in one direction
            z = test.add(_groups(after + _noise(rng, 1.0, False, 0.0) - 0.1, after, before))
            worst = max(worst, z or 0.0)
    assert worst < LIMIT


def test_lag_single_clear_comparison_stays_below_limit():
    test, after, before = LagTest(), torch.ones(8, 50), torch.zeros(8, 50)
    noise = torch.from_numpy(np.random.default_rng(2).normal(size=(8, 50)))
    assert test.add(_groups(noise, noise, noise)) is None
    assert test.add(_groups(before, after, before)) < LIMIT


def test_lag_unchanged_own_scores_are_detected_at_second_comparison():
    test = LagTest()
    assert [test.add_self_comparison(unchanged) for unchanged in (True, False, False)] == [None] * 3
    assert test.add_self_comparison(True) < LIMIT < test.add_self_comparison(True)
    assert [test.add_self_comparison(False) for _ in range(20)] == [None] * 20
    assert test.add_self_comparison(True) < LIMIT, "comparisons outside the window do not count"


def test_signed_z_score_is_normal_quantile_of_students_t():
    values = np.array([0.5, 0.1, 0.9, 0.4, 0.6, 0.3, 0.8, 0.2])
    t = values.mean() / (values.std(ddof=1) / math.sqrt(8))
    assert t == pytest.approx(4.785, abs=0.02), "t with 7 degrees of freedom, exceeded with probability 0.001"
    assert signed_z_score(values.tolist()) == pytest.approx(3.09, abs=0.02)
    assert signed_z_score((-values).tolist()) == -signed_z_score(values.tolist())


def _score(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def _copy_parameters(model, parameters):
    for target, source in zip(model.parameters(), parameters, strict=True):
        target.data.copy_(source)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("lr", "dtype"),
    [(1e-6, torch.float32), (1e-5, torch.bfloat16), (1e-4, torch.float32), (1e-3, torch.bfloat16)],
)
def test_lag_healthy_model_updates_raise_no_alarm(tmp_path, lr, dtype):
    """Compare a server with a trainer of the same dtype that uses other kernels, and with a peer."""
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
        _copy_parameters(trainer, learner.parameters())
        _copy_parameters(server, learner.parameters())
        after, scores = _score(trainer, ids), _score(server, ids)
        for kind, logprobs in (("trainer", (scores, after, before)), ("peer", (scores, scores, peer_before))):
            worst[kind] = max(worst[kind], tests[kind].add(_groups(*logprobs)) or 0.0)
    assert max(worst.values()) < LIMIT
