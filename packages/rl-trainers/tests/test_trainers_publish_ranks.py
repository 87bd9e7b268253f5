"""Publishing where two ranks each send half of the parameters, with real processes."""

import json
from pathlib import Path

import pytest

from rl_contracts.testing.processes import run_ranks


@pytest.fixture(
    scope="module", params=["shm", *(pytest.param(route, marks=pytest.mark.slow) for route in ("disk", "broadcast"))]
)
def ranks(request, tmp_path_factory):
    """What each of two ranks saw on a route."""
    out = tmp_path_factory.mktemp(request.param)
    run_ranks(Path(__file__).with_name("publish_ranks.py"), [request.param, str(out)], 2)
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_publish_from_two_ranks_merges_their_parts_and_receipts(ranks):
    first, second = ranks
    assert first["published 1"]
    assert first["published 2"]
    assert first["record"] == [first["specs"], second["specs"]] == [["first", "last", "scale"], ["norm", "bias"]]


def test_publish_from_two_ranks_servers_lost_in_the_middle_both_send_again(ranks):
    assert [seen["lost"]["error"] for seen in ranks] == ["", ""]
    assert ranks[0]["lost"]["right"]


def test_publish_from_two_ranks_refusal_before_anybody_met_is_raised_on_both_at_once(ranks):
    for seen in ranks:
        assert "rank 0: WeightUpdateError: the model has no parameter 'x'" in seen["refused"]["error"]
        assert seen["refused"]["seconds"] < 15
    assert "no parameter 'x'" in ranks[0]["refused"]["cause"]


def test_publish_error_on_one_rank_is_raised_on_all_with_its_cause_and_nothing_is_committed(ranks):
    for seen in ranks:
        assert "rank 1: OSError: no space left" in seen["failed on rank 1"]["error"]
        assert seen["failed on rank 1"]["seconds"] < 15
    assert ranks[1]["failed on rank 1"]["cause"] == "OSError('no space left')"
    assert ranks[0]["version"] == 3
    assert [seen["afterwards"]["error"] for seen in ranks] == ["", ""]
    assert ranks[0]["afterwards"]["right"]


def test_publish_parameter_of_two_ranks_is_refused_on_both(ranks):
    for seen in ranks:
        assert "expected each parameter on one rank" in seen["twice"]["error"]
