"""Publishing from two ranks that each send half of the parameters, with real processes."""

import json
from pathlib import Path

import pytest

from rl_contracts.testing.processes import run_ranks


@pytest.fixture(scope="module", params=["shm", pytest.param("broadcast", marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """Observations of each of two ranks on a route."""
    out = tmp_path_factory.mktemp(request.param)
    run_ranks(Path(__file__).with_name("publish_ranks.py"), [request.param, str(out)], 2)
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_publish_two_ranks_merges_parts_receipts_and_rank_0_has_times(ranks):
    first, second = ranks
    assert first["published 1"]
    assert first["published 2"]
    assert first["record"] == [first["specs"], second["specs"]] == [["first", "last", "scale"], ["norm", "bias"]]
    assert first["times"]["time/stage"] > 0
    assert second["times"] == {"time/stage": 0, "time/paused": 0}


def test_publish_two_ranks_receivers_lost_both_resend(ranks):
    assert [observed["receivers lost"]["error"] for observed in ranks] == ["", ""]
    assert ranks[0]["receivers lost"]["right"]


def test_publish_two_ranks_rejected_before_rendezvous_both_raise(ranks):
    for observed in ranks:
        assert "rank 0: WeightUpdateError: the model has no parameter 'x'" in observed["rejected"]["error"]
        assert observed["rejected"]["seconds"] < 15
    assert "no parameter 'x'" in ranks[0]["rejected"]["cause"]


def test_publish_error_on_one_rank_all_raise_and_nothing_committed(ranks):
    for observed in ranks:
        assert "rank 1: OSError: no space left" in observed["failed on rank 1"]["error"]
        assert observed["failed on rank 1"]["seconds"] < 15
    assert ranks[1]["failed on rank 1"]["cause"] == "OSError('no space left')"
    assert ranks[0]["version"] == 3
    assert [observed["afterwards"]["error"] for observed in ranks] == ["", ""]
    assert ranks[0]["afterwards"]["right"]


def test_publisher_parameter_on_two_ranks_both_raise(ranks):
    for observed in ranks:
        assert "full_parameters of HalfEngine" in observed["duplicate parameters"]["error"]
