"""What `rl plan` simulates: servers by their rates, and the runtime's own admission on a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from rl_apps.plan.rates import Rates, lognormal_lengths
from rl_apps.plan.search import miniature, preferred, search
from rl_apps.plan.simulation import Setup, simulate
from rl_contracts.errors import StalledError
from rl_workflows import StalenessManager

RATES = Rates(
    decode_seconds=0.01,
    decode_seconds_per_answer=0.001,
    decode_seconds_per_context_token=0.0,
    prefill_tokens_per_s=1000.0,
    max_running=64,
    episode_seconds=0.0,
    train_tokens_per_s=500.0,
    publish_seconds=1.0,
    other_seconds=0.5,
    prompt_tokens=50,
    rejected_fraction=0.0,
    lengths=(100,),
)
ONE = Setup(RATES, batch_size=1, group_size=1, max_staleness=0, servers=1, replicas=1, trainer_devices=1)
MANY = Setup(
    replace(RATES, lengths=lognormal_lengths(100, 0.8, 1000)),
    batch_size=16,
    group_size=4,
    max_staleness=2,
    servers=4,
    replicas=2,
    trainer_devices=8,
)


def test_one_answer_takes_its_prompt_and_its_passes_and_a_step_what_comes_after() -> None:
    found = simulate(ONE)
    assert found.wait_seconds == pytest.approx(50 / 1000 + 100 * 0.011)
    assert found.train_seconds == pytest.approx(150 / 500)
    assert found.step_seconds == pytest.approx(found.wait_seconds + found.train_seconds + 1.0 + 0.5)
    assert found.tokens_per_s == pytest.approx(150 / found.step_seconds)


def test_passes_take_longer_with_the_context_of_what_is_written() -> None:
    found = simulate(replace(ONE, rates=replace(RATES, decode_seconds_per_context_token=1e-4)))
    assert found.wait_seconds == pytest.approx(0.05 + 100 * 0.011 + 1e-4 * (50 * 100 + 100**2 / 2))


def test_answers_of_a_group_share_their_prompt_and_slow_each_other_down() -> None:
    found = simulate(replace(ONE, group_size=8))
    assert found.wait_seconds == pytest.approx(0.05 + 100 * (0.01 + 8 * 0.001))
    assert found.running == pytest.approx(8, rel=0.01)


def test_answers_that_find_no_place_wait_for_one() -> None:
    found = simulate(replace(ONE, group_size=8, rates=replace(RATES, max_running=4)))
    assert found.wait_seconds == pytest.approx(0.05 + 2 * 100 * 0.014, rel=0.001)


def test_a_simulation_in_which_nothing_can_move_ends_with_an_error() -> None:
    with pytest.raises(StalledError, match="stuck stage: generation"):
        simulate(replace(ONE, rates=replace(RATES, max_running=0)))


def test_episodes_take_what_they_do_beside_their_answers() -> None:
    found = simulate(replace(ONE, rates=replace(RATES, episode_seconds=3.0)))
    assert found.wait_seconds == pytest.approx(3.05 + 100 * 0.011)


@pytest.mark.parametrize("interrupt", ["keep", "recompute"])
def test_context_is_read_again_at_an_update_where_that_is_asked_for(interrupt: str) -> None:
    slow = replace(RATES, prefill_tokens_per_s=100.0, lengths=(1000,))
    found = simulate(replace(ONE, rates=slow, max_staleness=1, interrupt=interrupt))
    kept = simulate(replace(ONE, rates=slow, max_staleness=1))
    assert (found.step_seconds > 1.1 * kept.step_seconds) == (interrupt == "recompute")


def test_servers_on_the_trainers_devices_generate_nothing_while_it_learns() -> None:
    apart, shared = (simulate(replace(MANY, shared=shared)) for shared in (False, True))
    assert shared.step_seconds > apart.step_seconds
    assert shared.servers_busy * shared.step_seconds + shared.train_seconds <= 1.01 * shared.step_seconds


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_batch_is_older_than_allowed_and_more_of_it_is_no_slower(staleness: int) -> None:
    found, less = (simulate(replace(MANY, max_staleness=max(s, 0))) for s in (staleness, staleness - 1))
    assert found.staleness <= staleness
    assert found.most_in_flight <= (staleness + 1) * 16 * 4
    assert found.tokens_per_s >= 0.98 * less.tokens_per_s


def test_admission_is_that_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessManager, "capacity", property(lambda manager: int(manager.outstanding < 8)))
    assert simulate(MANY).most_in_flight == 2 * 8 * 4


def test_groups_that_are_rejected_cost_generation_and_are_replaced() -> None:
    half = simulate(replace(MANY, rates=replace(MANY.rates, rejected_fraction=0.5)))
    assert half.trained_tokens == pytest.approx(simulate(MANY).trained_tokens, rel=0.1)
    assert half.generated_tokens == pytest.approx(2 * simulate(MANY).generated_tokens, rel=0.2)


def test_the_same_setup_gives_the_same_figures() -> None:
    assert simulate(MANY) == simulate(MANY)


def test_a_run_in_miniature_is_as_fast_for_its_size() -> None:
    lengths = lognormal_lengths(100, 0.4, 1000)
    large = replace(MANY, batch_size=64, servers=10, replicas=4, rates=replace(MANY.rates, lengths=lengths))
    small = miniature(large, 4)
    assert (small.batch_size, small.servers, small.replicas, small.trainer_devices) == (16, 2, 1, 2)
    assert 4 * simulate(small).tokens_per_s == pytest.approx(simulate(large).tokens_per_s, rel=0.1)


@pytest.mark.parametrize(("train", "trainers"), [(50.0, 4), (1e5, 1)])
def test_search_gives_devices_to_whoever_is_slow(train: float, trainers: int) -> None:
    rates = replace(MANY.rates, train_tokens_per_s=train, publish_seconds=0.01, other_seconds=0.0)
    setup = replace(MANY, batch_size=4, rates=rates)
    found = search(setup, devices=6, server_devices=1, replica_devices=1)
    best = preferred(found)
    assert best.setup.trainer_devices == trainers
    assert best.tokens_per_s >= 0.98 * max(each.tokens_per_s for each in found)
    assert {each.setup.servers + each.setup.trainer_devices for each in found} == {6}


def test_search_leaves_out_what_does_not_fit() -> None:
    found = search(replace(MANY, batch_size=4), 6, 1, 1, fits=lambda replicas: replicas > 1)
    assert {each.setup.replicas for each in found} == {2, 4}


@pytest.mark.nightly  # a minute of an idle core
def test_a_thousand_gpus_with_100000_answers_in_flight_take_less_than_a_minute(
    record_property: Callable[[str, object], None],
) -> None:
    rates = replace(RATES, max_running=256, train_tokens_per_s=9000.0, lengths=lognormal_lengths(6000, 0.8, 16384))
    began = time.process_time()
    found = simulate(Setup(rates, 784, 16, 7, servers=768, replicas=112, trainer_devices=256))
    seconds = time.process_time() - began
    record_property("seconds of processor", seconds)
    assert found.most_in_flight == 8 * 784 * 16 > 100_000
    assert seconds < 60


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.5])
def test_lengths_have_the_mean_that_was_asked_for_after_the_cut(sigma: float) -> None:
    lengths = lognormal_lengths(300, sigma, 1000)
    assert mean(lengths) == pytest.approx(300, rel=0.01)
    assert max(lengths) <= 1000
