"""Settings of an algorithm: what cannot work is refused, with the fields named; losses are found by name."""

import pytest

from rl_contracts.errors import ConfigError
from rl_contracts.registry import available
from rl_trainers.algorithm import AlgorithmConfig
from rl_trainers.algorithm_parts import KLConfig, RewardConfig
from rl_trainers.objective import load_policy_loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baseline": "median"}, "algorithm.baseline: expected one of"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip: expected 0 .off. or more than 1"),
        ({"dual_clip": 2.0, "policy_loss": "sapo"}, "dual_clip with algorithm.policy_loss=sapo"),
        ({"ratio_level": "sequence", "policy_loss": "reinforce"}, "take policy_loss=importance"),
        ({"correction_floor": 0.5}, "correction_floor with algorithm.correction=truncate"),
        ({"correction": "mask", "correction_floor": 6.0}, r"below correction_cap \(5\)"),
        ({"correction": "mask", "correction_cap": 0.0}, r"below correction_cap \(0\)"),
        ({"correction": "mask", "proximal": "behaviour"}, "the ratio is 1 and nothing is masked"),
        ({"row_mask": "sequence", "proximal": "behaviour"}, "the ratio is 1 and nothing is masked"),
        ({"second_moment": 0.04, "proximal": "current"}, "algorithm.proximal with algorithm.second_moment"),
        ({"row_mask": "geometric", "row_mask_low": 2.0}, "row_mask_low: expected 0 to row_mask_high"),
        ({"gamma": 1.1}, "algorithm.gamma"),
    ],
)
def test_algorithm_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLConfig("none", 0.1), "kl.coef with algorithm.kl.place=none: expected 0"),
        (lambda: KLConfig("loss", 0.0, "k3"), "kl.coef with algorithm.kl.place=loss: expected more than 0"),
        (lambda: KLConfig("loss", 0.1, "k1"), "gradient of k1 alone is zero in the mean"),
        (lambda: KLConfig("reward", 0.1, "k1", weighted=True), "only a KL in the loss can be weighted"),
        (lambda: RewardConfig(overlong_cache=4), "overlong_cache with algorithm.reward.overlong_max=0"),
        (lambda: RewardConfig(overlong_max=4, overlong_cache=9), "expected 1 to overlong_max"),
        (lambda: RewardConfig(clip=-1.0), "reward.clip"),
    ],
)
def test_algorithm_parts_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_resolve_proximal_second_moment_recomputes_even_with_one_minibatch():
    config = AlgorithmConfig(policy_loss="importance", correction="plain", second_moment=0.04)
    assert config.resolve_proximal(1) == "recompute"
    assert AlgorithmConfig().resolve_proximal(1) == "current"


def test_policy_losses_of_this_package_are_installed_and_load():
    names = available("rl.policy_losses")
    assert {"clip", "importance", "reinforce", "cispo", "sapo"} <= set(names)
    for name in ("clip", "importance", "reinforce", "cispo", "sapo"):
        load_policy_loss(AlgorithmConfig(policy_loss=name))


def flat_loss(terms, *, clip_high, sharpness, slope=1.0):
    """A loss of somebody else's, with a constant of ours and two of its own."""
    return -terms.ratio * sharpness * slope * clip_high * terms.advantages, {}


def test_policy_loss_takes_constants_from_the_settings_and_from_options(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "toy_losses", sys.modules[__name__])
    bound = load_policy_loss(
        AlgorithmConfig(policy_loss="toy_losses:flat_loss", clip_high=0.3, options={"sharpness": 2.0})
    )
    assert bound.keywords == {"clip_high": 0.3, "sharpness": 2.0}
    with pytest.raises(ConfigError, match=r"needs the constants \['sharpness'\]; give them as algorithm.options"):
        load_policy_loss(AlgorithmConfig(policy_loss="toy_losses:flat_loss"))
    with pytest.raises(ConfigError, match=r"\['sharpnes'\] are no constants of .*sharpness"):
        load_policy_loss(AlgorithmConfig(policy_loss="toy_losses:flat_loss", options={"sharpnes": 2.0}))


def test_policy_loss_unknown_name_lists_what_is_installed():
    with pytest.raises(ConfigError, match="did you mean 'clip'"):
        load_policy_loss(AlgorithmConfig(policy_loss="clipp"))
