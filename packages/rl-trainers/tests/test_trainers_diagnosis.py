"""From evidence to causes: each pattern gets its name, and nothing is diagnosed where nothing is off."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_trainers.gap.diagnosis import Evidence, Gap, Receipts, diagnose
from rl_trainers.gap.divergence import fresh_mask, gap_sums

OFF = Gap(100, mean_abs=0.4, max_abs=2.5, bias=0.05, far=0.2, near_mean=0.3)
SAME = Gap(100, mean_abs=1e-6, max_abs=1e-5)
ROUNDED = Gap(100, mean_abs=0.03, max_abs=0.2, bias=0.001, near_mean=0.03)
ALL_RIGHT = Receipts("rollout-0", 20, ())
SCORES = Evidence(0.02, score=OFF, receipts=ALL_RIGHT, score_older=OFF, score_temperature=(1.1, OFF))
TOKENS = Evidence(0.02, score=SAME, fresh=OFF, fresh_temperature=(1.1, OFF), fresh_older=OFF, seen_prompt=OFF)


def names(evidence):
    return [cause.name for cause in diagnose(evidence)]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "stale fused copy"),
        ({"score_older": SAME}, "stale fused copy"),
        ({"receipts": Receipts("rollout-0", 20, ("norm.weight",))}, "one tensor wrong"),
        ({"receipts": Receipts("rollout-0", 20, ("a", "b", "c"))}, "tensors wrong"),
        ({"receipts": Receipts("rollout-0", 4, ("a", "b", "c"))}, "weights not received"),
        ({"receipts": None, "score_older": SAME}, "weights not received"),
        ({"receipts": None}, "weights or architecture"),
        ({"score_temperature": (1.0, SAME)}, "temperature"),
        ({"score": replace(OFF, far=0.05, near_mean=0.001)}, "tokenizer or special tokens"),
        ({"score": ROUNDED, "low_precision": True}, "dtype"),
        ({"score": ROUNDED}, "stale fused copy"),
    ],
)
def test_diagnose_scores_that_are_off(changes, name):
    assert names(replace(SCORES, **changes)) == [name]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fresh_temperature": (1.3, SAME)}, "temperature"),
        ({"fresh_older": SAME}, "version stamped late"),
        ({"fresh": replace(OFF, bias=-0.4, ours_higher=0.0)}, "truncated sampling"),
        ({"fresh": replace(OFF, far=0.05, near_mean=0.001)}, "tokenizer or special tokens"),
        ({"fresh": ROUNDED, "low_precision": True}, "dtype"),
        ({"new_prompt": SAME}, "stale prefix cache"),
        ({"new_prompt": OFF}, "decode path"),
        ({"seen_prompt": None}, "stale prefix cache"),
        ({"seen_prompt": SAME, "new_prompt": SAME}, "stale prefix cache"),
        ({"score": OFF, "receipts": ALL_RIGHT}, "stale fused copy"),
    ],
)
def test_diagnose_recorded_logprobs_that_are_off(changes, name):
    assert names(replace(TOKENS, **changes)) == [name]


def test_diagnose_says_which_tensor_and_which_temperature():
    wrong = replace(SCORES, receipts=Receipts("rollout-3", 20, ("norm.weight",)))
    assert "1 of 20 live tensors of rollout-3" in str(diagnose(wrong)[0])
    assert "norm.weight" in str(diagnose(wrong)[0])
    assert "at temperature 0.7 instead" in str(diagnose(replace(TOKENS, fresh_temperature=(0.7, SAME)))[0])


def test_diagnose_nothing_off_finds_nothing():
    assert diagnose(Evidence(0.02, score=SAME, fresh=SAME)) == []
    assert diagnose(Evidence(0.02)) == []


def test_diagnose_nan_is_off():
    assert diagnose(Evidence(0.02, score=replace(OFF, mean_abs=float("nan")))) != []


@given(st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(0, 3))
def test_fresh_mask_takes_tokens_whose_generated_prefix_all_has_the_version(rows, version):
    found = fresh_mask(torch.tensor(rows, dtype=torch.int32), version).tolist()
    for row, marks in zip(rows, found, strict=True):
        for t, marked in enumerate(marks):
            generated = [v for v in row[: t + 1] if v >= 0]
            assert marked == (row[t] >= 0 and set(generated) == {version})


def test_gap_of_sums_describes_the_differences():
    ours, theirs = torch.tensor([[-1.0, -2.0, -3.0, -9.0]]), torch.tensor([[-1.5, -2.0, -1.0, 0.0]])
    gap = Gap.of(*[x.tolist() if x.numel() > 1 else x.item() for x in gap_sums(ours, theirs, ours > -9)])
    assert (gap.tokens, gap.max_abs) == (3, 2.0)
    assert gap.mean_abs == pytest.approx(2.5 / 3)
    assert gap.bias == pytest.approx(-0.5)
    assert (gap.ours_higher, gap.far, gap.near_mean) == pytest.approx((1 / 3, 1 / 3, 0.25))
    assert Gap.of([0.0] * 7, 0.0) is None
