"""Simulation of `rl plan`: servers with given rates, and the real admission of the runtime on a simulated clock."""

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
    decode_seconds_per_completion=0.001,
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


def test_step_of_one_completion_takes_the_sum_of_its_stages() -> None:
    outcome = simulate(ONE)
    assert outcome.wait_seconds == pytest.approx(50 / 1000 + 100 * 0.011)
    assert outcome.train_seconds == pytest.approx(150 / 500)
    assert outcome.step_seconds == pytest.approx(outcome.wait_seconds + outcome.train_seconds + 1.0 + 0.5)
    assert outcome.tokens_per_s == pytest.approx(150 / outcome.step_seconds)


@pytest.mark.parametrize(
    ("rates", "group_size", "generation_seconds"),
    [
        ({"decode_seconds_per_context_token": 1e-4}, 1, 100 * 0.011 + 1e-4 * (50 * 100 + 100**2 / 2)),
        ({}, 8, 100 * (0.01 + 8 * 0.001)),  # the group shares the prefill and the passes
        ({"max_running": 4}, 8, 2 * 100 * 0.014),
        ({"episode_seconds": 3.0}, 1, 3.0 + 100 * 0.011),
    ],
)
def test_wait_of_a_group_has_the_seconds_of_its_passes(
    rates: dict[str, float], group_size: int, generation_seconds: float
) -> None:
    outcome = simulate(replace(ONE, group_size=group_size, rates=replace(RATES, **rates)))
    assert outcome.wait_seconds == pytest.approx(0.05 + generation_seconds, rel=0.001)


def test_simulation_without_progress_raises_stalled_error() -> None:
    with pytest.raises(StalledError, match="stuck stage: generation"):
        simulate(replace(ONE, rates=replace(RATES, max_running=0)))


def test_interrupt_recompute_slows_down_updates_compared_with_keep() -> None:
    slow = replace(ONE, rates=replace(RATES, prefill_tokens_per_s=100.0, lengths=(1000,)), max_staleness=1)
    recompute, keep = (simulate(replace(slow, interrupt=interrupt)) for interrupt in ("recompute", "keep"))
    assert recompute.step_seconds > 1.1 * keep.step_seconds


def test_shared_devices_do_not_generate_during_training() -> None:
    separate, shared = (simulate(replace(MANY, shared=shared)) for shared in (False, True))
    assert shared.step_seconds > separate.step_seconds
    assert shared.servers_busy * shared.step_seconds + shared.train_seconds <= 1.01 * shared.step_seconds


@pytest.mark.parametrize("staleness", [0, 4])
def test_staleness_stays_within_the_bound_and_more_is_not_slower(staleness: int) -> None:
    outcome, less = (simulate(replace(MANY, max_staleness=max(s, 0))) for s in (staleness, staleness - 1))
    assert outcome.staleness <= staleness
    assert outcome.most_in_flight <= (staleness + 1) * 16 * 4
    assert outcome.tokens_per_s >= 0.98 * less.tokens_per_s


def test_admission_uses_the_staleness_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessManager, "capacity", property(lambda manager: int(manager.outstanding < 8)))
    assert simulate(MANY).most_in_flight == 2 * 8 * 4


def test_rejected_groups_cost_generation_and_are_replaced() -> None:
    outcome = simulate(replace(MANY, rates=replace(MANY.rates, rejected_fraction=0.5)))
    assert outcome.trained_tokens == pytest.approx(simulate(MANY).trained_tokens, rel=0.1)
    assert outcome.generated_tokens == pytest.approx(2 * simulate(MANY).generated_tokens, rel=0.2)


def test_simulate_same_setup_gives_the_same_outcome() -> None:
    assert simulate(MANY) == simulate(MANY)


def test_miniature_has_the_throughput_of_the_full_size() -> None:
    lengths = lognormal_lengths(100, 0.4, 1000)
    large = replace(MANY, batch_size=64, servers=10, replicas=4, rates=replace(MANY.rates, lengths=lengths))
    small = miniature(large, 4)
    assert (small.batch_size, small.servers, small.replicas, small.trainer_devices) == (16, 2, 1, 2)
    assert 4 * simulate(small).tokens_per_s == pytest.approx(simulate(large).tokens_per_s, rel=0.1)


@pytest.mark.parametrize(("train", "trainers"), [(50.0, 4), (1e5, 1)])
def test_search_gives_devices_to_the_slower_role(train: float, trainers: int) -> None:
    rates = replace(MANY.rates, train_tokens_per_s=train, publish_seconds=0.01, other_seconds=0.0)
    setup = replace(MANY, batch_size=4, rates=rates)
    splits = {str(n): replace(setup, servers=6 - n, replicas=n, trainer_devices=n) for n in (1, 2, 4)}
    candidates = search(splits)
    best = preferred(candidates)
    assert best.setup.trainer_devices == trainers
    assert best.tokens_per_s >= 0.98 * max(candidate.tokens_per_s for candidate in candidates)
    assert {each.allocation for each in candidates} == {"1", "2", "4"}


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"train_tokens_per_s": 50.0}, "training"),
        ({"publish_seconds": 1000.0}, "publishing"),
        ({"decode_seconds": 1.0}, "generation"),
    ],
)
def test_limit_names_the_slowest_stage(changes: dict[str, float], stage: str) -> None:
    assert simulate(replace(MANY, rates=replace(MANY.rates, **changes))).limit.startswith(stage)


@pytest.mark.nightly  # takes a minute on an idle core
def test_simulate_1024_gpus_and_100000_completions_under_a_minute(
    record_property: Callable[[str, object], None],
) -> None:
    rates = replace(RATES, max_running=256, train_tokens_per_s=9000.0, lengths=lognormal_lengths(6000, 0.8, 16384))
    began = time.process_time()
    outcome = simulate(Setup(rates, 784, 16, 7, servers=768, replicas=112, trainer_devices=256))
    seconds = time.process_time() - began
    record_property("seconds of processor", seconds)
    assert outcome.most_in_flight == 8 * 784 * 16 > 100_000
    assert seconds < 60


@pytest.mark.parametrize("sigma", [0.0, 1.5])
def test_lognormal_lengths_have_the_requested_mean_after_the_cap(sigma: float) -> None:
    lengths = lognormal_lengths(300, sigma, 1000)
    assert mean(lengths) == pytest.approx(300, rel=0.01)
    assert max(lengths) <= 1000
