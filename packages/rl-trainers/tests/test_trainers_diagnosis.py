"""Diagnosis of log-prob gaps: the cause of each pattern of evidence, and none without a gap."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.data import WeightReceipt
from rl_trainers.weight_sync.gap.diagnosis import Evidence, Receipts, diagnose
from rl_trainers.weight_sync.gap.divergence import LogprobGap, current_version_mask

LARGE_GAP = LogprobGap(100, mean_abs=0.4, max_abs=2.5, bias=0.05, far=0.2, near_mean=0.3)
NO_GAP = LogprobGap(100, mean_abs=1e-6, max_abs=1e-5)
ROUNDING_GAP = LogprobGap(100, mean_abs=0.03, max_abs=0.2, bias=0.001, near_mean=0.03)
MATCHING = Receipts("rollout-0", 20)
SCORE_EVIDENCE = Evidence(0.02, False, LARGE_GAP, receipts=MATCHING, older=LARGE_GAP, temperature=(1.1, LARGE_GAP))
RECORDED_EVIDENCE = Evidence(
    0.02, False, LARGE_GAP, recorded=True, temperature=(1.1, LARGE_GAP), older=LARGE_GAP, seen_prompt=LARGE_GAP
)


def cause_name(evidence):
    cause = diagnose(evidence)
    return cause and cause.name


SCORE_CAUSES = [
    ({}, "stale fused copy"),
    ({"older": NO_GAP}, "stale fused copy"),
    ({"receipts": Receipts("rollout-0", 20, ("norm.weight",))}, "one tensor wrong"),
    ({"receipts": Receipts("rollout-0", 20, ("a", "b", "c"))}, "tensors wrong"),
    ({"receipts": Receipts("rollout-0", 4, ("a", "b", "c"))}, "weights not received"),
    ({"receipts": Receipts("rollout-0", 20, ("a",), older=True)}, "weights not received"),
    ({"gap": NO_GAP, "receipts": Receipts("rollout-0", 20, ("a",), older=True)}, "weights not received"),
    ({"receipts": None, "older": NO_GAP}, "weights not received"),
    ({"receipts": None}, "weights or architecture"),
    ({"gap": NO_GAP, "behind": True, "receipts": None}, "weights not received"),
    ({"gap": NO_GAP, "behind": True}, "stale fused copy"),
    ({"gap": NO_GAP, "behind": True, "receipts": Receipts("rollout-0", 20, ("a",))}, "weights not received"),
    ({"gap": ROUNDING_GAP, "low_precision": True, "behind": True, "receipts": None}, "weights not received"),
    ({"base": NO_GAP}, "adapter not applied"),
    ({"base": NO_GAP, "older": NO_GAP, "behind": True, "receipts": None}, "adapter not applied"),
    ({"base": LARGE_GAP}, "stale fused copy"),
    ({"temperature": (1.0, NO_GAP)}, "temperature"),
    ({"gap": replace(LARGE_GAP, far=0.05, near_mean=0.001)}, "tokenizer or special tokens"),
    ({"gap": ROUNDING_GAP, "low_precision": True}, "dtype"),
    ({"gap": ROUNDING_GAP}, "stale fused copy"),
    ({"gap": replace(ROUNDING_GAP, tokens=10000, bias=0.02), "low_precision": True}, "stale fused copy"),
    ({"gap": replace(ROUNDING_GAP, tokens=36, bias=0.02), "low_precision": True}, "dtype"),
]
RECORDED_CAUSES = [
    ({"temperature": (1.3, NO_GAP)}, "temperature"),
    ({"older": NO_GAP}, "version stamped late"),
    ({"gap": replace(LARGE_GAP, bias=-0.4, trainer_higher=0.0)}, "truncated sampling"),
    ({"gap": replace(LARGE_GAP, far=0.05, near_mean=0.001)}, "tokenizer or special tokens"),
    ({"gap": ROUNDING_GAP, "low_precision": True}, "dtype"),
    ({"new_prompt": NO_GAP}, "stale prefix cache"),
    ({"new_prompt": LARGE_GAP}, "decode path"),
    ({"seen_prompt": None}, "stale prefix cache"),
    ({"seen_prompt": NO_GAP, "new_prompt": NO_GAP}, "stale prefix cache"),
]


@pytest.mark.parametrize(
    ("evidence", "table"),
    [(SCORE_EVIDENCE, SCORE_CAUSES), (RECORDED_EVIDENCE, RECORDED_CAUSES)],
    ids=["scores", "recorded"],
)
def test_diagnose_evidence_returns_cause(evidence, table):
    causes = [(changes, cause_name(replace(evidence, **changes))) for changes, _ in table]

    assert causes == table


def test_diagnose_names_tensor_and_temperature():
    cause = diagnose(replace(SCORE_EVIDENCE, receipts=Receipts("rollout-3", 20, ("norm.weight",))))
    assert "1 of 20 live tensors of rollout-3" in cause.why
    assert "norm.weight" in cause.why
    assert "temperature 0.7" in diagnose(replace(RECORDED_EVIDENCE, temperature=(0.7, NO_GAP))).why


def test_diagnose_without_gap_returns_none_and_nan_returns_cause():
    assert diagnose(Evidence(0.02, False, NO_GAP)) is None
    assert diagnose(Evidence(0.02, True, NO_GAP, receipts=MATCHING, recorded=True)) is None
    assert diagnose(Evidence(0.02, False, replace(LARGE_GAP, mean_abs=float("nan")))) is not None


def test_receipts_from_pair_list_differences_and_previous_version():
    previous, sent = (WeightReceipt("trainer", v, {"a": v, "b": 7, "c": v}) for v in (1, 2))
    live = WeightReceipt("rollout-1", 2, {"a": 1, "b": 7, "c": 1})
    assert Receipts.from_pair(live, sent, previous) == Receipts("rollout-1", 3, ["a", "c"], older=True)
    assert not Receipts.from_pair(live, sent, None).older
    assert Receipts.from_pair(replace(live, checksums={"a": 2, "b": 7, "c": 1}), sent, previous) == Receipts(
        "rollout-1", 3, ["c"]
    )
    assert Receipts.from_pair(replace(live, checksums=sent.checksums), sent, previous) == Receipts("rollout-1", 3, [])


@given(st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(0, 3))
def test_current_version_mask_requires_version_in_whole_prefix(sequences, version):
    mask = current_version_mask(torch.tensor(sequences, dtype=torch.int32), version).tolist()
    for sequence, marks in zip(sequences, mask, strict=True):
        for t, marked in enumerate(marks):
            generated = [v for v in sequence[: t + 1] if v >= 0]
            assert marked == (sequence[t] >= 0 and set(generated) == {version})


def test_logprob_gap_summarizes_differences():
    trainer, server = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -1.0])
    gap = LogprobGap.from_differences((trainer - server).double())
    assert (gap.tokens, gap.max_abs) == (3, 2.0)
    assert gap.mean_abs == pytest.approx(2.5 / 3)
    assert gap.bias == pytest.approx(-0.5)
    assert (gap.trainer_higher, gap.far, gap.near_mean) == pytest.approx((1 / 3, 1 / 3, 0.25))
    assert LogprobGap.from_differences(torch.zeros(0)) is None
