"""Conformance suite on several ranks, compared with the reference engine in one process."""

import json
from pathlib import Path

import pytest

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.testing.processes import run_ranks

RANKS = Path(__file__).parent / "megatron_conformance_ranks.py"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600), pytest.mark.usefixtures("device")]
# CI runs tests/megatron/test_megatron_against_fsdp.py instead


def run_suite(shared, monkeypatch, layout, settings=None, seconds=480):
    monkeypatch.setenv("LAYOUT", json.dumps(layout))
    monkeypatch.setenv("SETTINGS", json.dumps(settings or {}))
    monkeypatch.setenv("SHARED", str(shared))
    world = ParallelStrategy(**layout).world_size
    for output in run_ranks(RANKS, [], world, seconds):
        assert " passed" in output
        assert " failed" not in output


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param({"tensor": 2}, {"sequence_parallel": True, "max_logits": 1000}, id="t2-sequence-parallel"),
        pytest.param({"pipeline": 2}, {}, id="p2"),
        pytest.param({"data": 2}, {}, id="d2"),
        pytest.param({"context": 2}, {}, id="c2"),
        pytest.param({"data": 2, "expert": 2}, {"recompute": "full"}, id="d2e2-recompute"),
        pytest.param({"tensor": 2, "pipeline": 2}, {"sequence_parallel": True}, id="t2p2"),
        pytest.param({"context": 2, "tensor": 2}, {"sequence_parallel": True}, id="t2c2"),
        pytest.param({"data": 2, "pipeline": 2}, {}, id="d2p2"),
        pytest.param({"pipeline": 2, "tensor": 2}, {"interleaved": 2, "recompute": "full"}, id="p2t2-interleaved"),
        pytest.param({"data": 4, "expert": 2}, {}, id="d4e2"),
        pytest.param({"data": 2, "tensor": 2, "expert": 2}, {"sequence_parallel": True}, id="d2t2e2"),
        pytest.param({"tensor": 2, "pipeline": 2, "expert": 2}, {"sequence_parallel": True}, id="t2p2e2"),
    ],
)
def test_conformance_on_several_ranks(tmp_path, monkeypatch, layout, settings):
    run_suite(tmp_path, monkeypatch, layout, settings)
