"""From evidence to causes: each pattern gets its name, and nothing is diagnosed where nothing is off."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.data import WeightReceipt
from rl_trainers.weight_sync.gap.diagnosis import Evidence, Receipts, diagnose
from rl_trainers.weight_sync.gap.divergence import LogprobGap, current_version_mask

OFF = LogprobGap(100, mean_abs=0.4, max_abs=2.5, bias=0.05, far=0.2, near_mean=0.3)
SAME = LogprobGap(100, mean_abs=1e-6, max_abs=1e-5)
ROUNDED = LogprobGap(100, mean_abs=0.03, max_abs=0.2, bias=0.001, near_mean=0.03)
ALL_RIGHT = Receipts("rollout-0", 20)
SCORES = Evidence(0.02, False, OFF, receipts=ALL_RIGHT, older=OFF, temperature=(1.1, OFF))
TOKENS = Evidence(0.02, False, OFF, recorded=True, temperature=(1.1, OFF), older=OFF, seen_prompt=OFF)


def name(evidence):
    cause = diagnose(evidence)
    return cause and cause.name


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "stale fused copy"),
        ({"older": SAME}, "stale fused copy"),
        ({"receipts": Receipts("rollout-0", 20, ("norm.weight",))}, "one tensor wrong"),
        ({"receipts": Receipts("rollout-0", 20, ("a", "b", "c"))}, "tensors wrong"),
        ({"receipts": Receipts("rollout-0", 4, ("a", "b", "c"))}, "weights not received"),
        ({"receipts": Receipts("rollout-0", 20, ("a",), older=True)}, "weights not received"),
        ({"gap": SAME, "receipts": Receipts("rollout-0", 20, ("a",), older=True)}, "weights not received"),
        ({"receipts": None, "older": SAME}, "weights not received"),
        ({"receipts": None}, "weights or architecture"),
        ({"gap": SAME, "behind": True, "receipts": None}, "weights not received"),
        ({"gap": SAME, "behind": True}, "stale fused copy"),
        ({"gap": SAME, "behind": True, "receipts": Receipts("rollout-0", 20, ("a",))}, "weights not received"),
        ({"gap": ROUNDED, "low_precision": True, "behind": True, "receipts": None}, "weights not received"),
        ({"base": SAME}, "adapter not applied"),
        ({"base": SAME, "older": SAME, "behind": True, "receipts": None}, "adapter not applied"),
        ({"base": OFF}, "stale fused copy"),
        ({"temperature": (1.0, SAME)}, "temperature"),
        ({"gap": replace(OFF, far=0.05, near_mean=0.001)}, "tokenizer or special tokens"),
        ({"gap": ROUNDED, "low_precision": True}, "dtype"),
        ({"gap": ROUNDED}, "stale fused copy"),
        ({"gap": replace(ROUNDED, tokens=10000, bias=0.02), "low_precision": True}, "stale fused copy"),
        ({"gap": replace(ROUNDED, tokens=36, bias=0.02), "low_precision": True}, "dtype"),
    ],
)
def test_diagnose_scores_that_are_off(changes, cause):
    assert name(replace(SCORES, **changes)) == cause


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"temperature": (1.3, SAME)}, "temperature"),
        ({"older": SAME}, "version stamped late"),
        ({"gap": replace(OFF, bias=-0.4, ours_higher=0.0)}, "truncated sampling"),
        ({"gap": replace(OFF, far=0.05, near_mean=0.001)}, "tokenizer or special tokens"),
        ({"gap": ROUNDED, "low_precision": True}, "dtype"),
        ({"new_prompt": SAME}, "stale prefix cache"),
        ({"new_prompt": OFF}, "decode path"),
        ({"seen_prompt": None}, "stale prefix cache"),
        ({"seen_prompt": SAME, "new_prompt": SAME}, "stale prefix cache"),
    ],
)
def test_diagnose_recorded_logprobs_that_are_off(changes, cause):
    assert name(replace(TOKENS, **changes)) == cause


def test_diagnose_says_which_tensor_and_which_temperature():
    wrong = diagnose(replace(SCORES, receipts=Receipts("rollout-3", 20, ("norm.weight",))))
    assert "1 of 20 live tensors of rollout-3" in wrong.why
    assert "norm.weight" in wrong.why
    assert "at temperature 0.7 instead" in diagnose(replace(TOKENS, temperature=(0.7, SAME))).why


def test_diagnose_nothing_off_finds_nothing():
    assert diagnose(Evidence(0.02, False, SAME)) is None
    assert diagnose(Evidence(0.02, True, SAME, receipts=ALL_RIGHT, recorded=True)) is None


def test_diagnose_nan_is_off():
    assert diagnose(Evidence(0.02, False, replace(OFF, mean_abs=float("nan")))) is not None


def test_receipts_say_what_differs_and_whether_it_is_all_of_the_version_before():
    before, sent = (WeightReceipt("trainer", v, {"a": v, "b": 7, "c": v}) for v in (1, 2))
    live = WeightReceipt("rollout-1", 2, {"a": 1, "b": 7, "c": 1})
    assert Receipts.from_pair(live, sent, before) == Receipts("rollout-1", 3, ["a", "c"], older=True)
    assert not Receipts.from_pair(live, sent, None).older
    assert Receipts.from_pair(replace(live, checksums={"a": 2, "b": 7, "c": 1}), sent, before) == Receipts(
        "rollout-1", 3, ["c"]
    )
    assert Receipts.from_pair(replace(live, checksums=sent.checksums), sent, before) == Receipts("rollout-1", 3, [])


@given(st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(0, 3))
def test_fresh_mask_takes_tokens_whose_generated_prefix_all_has_the_version(rows, version):
    found = current_version_mask(torch.tensor(rows, dtype=torch.int32), version).tolist()
    for row, marks in zip(rows, found, strict=True):
        for t, marked in enumerate(marks):
            generated = [v for v in row[: t + 1] if v >= 0]
            assert marked == (row[t] >= 0 and set(generated) == {version})


def test_gap_describes_the_differences():
    ours, theirs = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -1.0])
    gap = LogprobGap.from_differences((ours - theirs).double())
    assert (gap.tokens, gap.max_abs) == (3, 2.0)
    assert gap.mean_abs == pytest.approx(2.5 / 3)
    assert gap.bias == pytest.approx(-0.5)
    assert (gap.ours_higher, gap.far, gap.near_mean) == pytest.approx((1 / 3, 1 / 3, 0.25))
    assert LogprobGap.from_differences(torch.zeros(0)) is None
