"""Settings of an algorithm: what cannot work is refused, with the fields named; parts are found by name."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from rl_contracts.errors import ConfigError
from rl_contracts.registry import available, load, load_component, load_components
from rl_trainers.algorithms.config import (
    AdvantageConfig,
    AggregationConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    LossConfig,
    MaskConfig,
    RewardConfig,
)
from rl_trainers.algorithms.objective import make_policy_loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proximal": "median"}, "algorithm.proximal: expected one of auto, recompute, current"),
        ({"entropy_coef": -1.0}, "algorithm.entropy_coef: expected 0"),
        (
            {"ratio": "sequence", "loss": LossConfig("reinforce")},
            "algorithm.ratio with .*: expected .* take algorithm.loss.kind=importance",
        ),
        ({"correction": CorrectionConfig("mask"), "proximal": "behaviour"}, "the ratio is 1 and nothing is masked"),
        ({"advantage": AdvantageConfig("gdpo"), "reward": RewardConfig(scale=2.0)}, "another than gdpo"),
        ({"advantage": AdvantageConfig(std="mean"), "reward": RewardConfig(overlong_max=9)}, "another than `mean`"),
        ({"mask": MaskConfig("ratio"), "proximal": "behaviour"}, "the ratio is 1 and nothing is masked"),
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
        (lambda: KLConfig("reward", 0.1, "k1", weighted=True), "kl.weighted with algorithm.kl.place=reward"),
        (lambda: KLConfig(estimator="k1"), "kl.estimator with algorithm.kl.place=none"),
        (lambda: RewardConfig(overlong_weight=2.0), "overlong_weight with algorithm.reward.overlong_max=0"),
        (lambda: RewardConfig(overlong_cache=4), "overlong_cache with algorithm.reward.overlong_max=0"),
        (lambda: RewardConfig(overlong_max=4, overlong_cache=9), "expected 0 .a fifth. to overlong_max"),
        (lambda: RewardConfig(clip=-1.0), "algorithm.reward.clip: expected 0 .off. or more, found -1.0"),
        (lambda: AdvantageConfig(mean="median"), "algorithm.advantage.mean: expected one of none, group, batch"),
        (lambda: AdvantageConfig("return", gamma=1.1), "algorithm.advantage.gamma"),
        (lambda: AdvantageConfig(mean="none", leave_one_out=True), "leave_one_out with algorithm.advantage.mean=none"),
        (lambda: LossConfig(clip_low=1.5), "algorithm.loss.clip_low"),
        (lambda: AggregationConfig(constant_length=9), "constant_length with algorithm.aggregation.kind=token_mean"),
        (lambda: AggregationConfig("mode"), "algorithm.aggregation.kind: expected one of token_mean"),
        (lambda: CorrectionConfig("plain", floor=0.5), "correction.floor with algorithm.correction.kind=plain"),
        (lambda: CorrectionConfig("mask", floor=6.0), r"below cap \(2\)"),
        (lambda: CorrectionConfig(cap=0.0), "kind=none leaves the weight out"),
        (lambda: MaskConfig("ratio", low=2.0), "algorithm.mask.low: expected 0 to algorithm.mask.high"),
    ],
)
def test_algorithm_parts_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("options", [{"estimator": "k9"}, {"over": "batch"}])
def test_divergence_mask_of_an_unknown_kind_is_refused_when_it_is_loaded(options):
    with pytest.raises(ConfigError, match=r"algorithm\.mask\.options"):
        load_component(MaskConfig("divergence", options={"bound": 0.1, **options}))


def test_policy_loss_mask_over_the_minibatch_needs_log_probs_from_before_it():
    config = AlgorithmConfig(loss=LossConfig("importance"), mask=MaskConfig("second_moment"), proximal="current")
    with pytest.raises(
        ConfigError, match=r"algorithm.proximal with algorithm.mask.kind=second_moment: expected `recomp"
    ):
        make_policy_loss(config, minibatches=1)


def test_resolve_proximal_auto_recomputes_with_several_minibatches_or_a_mask_over_the_whole():
    assert AlgorithmConfig().resolve_proximal(1) == "current"
    assert AlgorithmConfig().resolve_proximal(2) == "recompute"
    assert AlgorithmConfig().resolve_proximal(1, whole=True) == "recompute"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LossConfig, ("clip", "importance", "reinforce", "cispo", "sapo")),
        (AdvantageConfig, ("outcome", "return", "gae")),
        (CorrectionConfig, ("truncate", "mask", "plain")),
        (MaskConfig, ("ratio", "second_moment")),
    ],
)
def test_parts_of_this_package_are_installed_and_load(config, names):
    assert set(names) <= set(available(config.group))
    for name in names:
        load_component(config(name))


def test_parts_several_and_none():
    assert [type(part).__name__ for part in load_components(MaskConfig("ratio+second_moment"))] == [
        "partial",
        "SecondMomentMask",
    ]
    assert load_components(MaskConfig("none")) == []
    with pytest.raises(ConfigError, match=r"algorithm.loss.kind: expected one name, found 'clip\+sapo'"):
        load_component(LossConfig("clip+sapo"))


def test_settings_alone_do_not_import_torch():
    code = "import sys, rl_trainers.algorithms.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def flat_loss(terms, *, clip_high, sharpness, slope=1.0):
    """A loss of somebody else's, with a constant of ours and two of its own."""
    return -terms.ratio * sharpness * slope * clip_high * terms.advantages, {}


@pytest.fixture
def toy(monkeypatch):
    """A loss by its dotted path."""
    monkeypatch.setitem(sys.modules, "toy_losses", sys.modules[__name__])
    return "toy_losses:flat_loss"


def test_part_takes_constants_from_its_settings_and_from_options(toy):
    bound = load_component(LossConfig(toy, clip_high=0.3, options={"sharpness": 2.0, "slope": None}))
    assert bound.keywords == {"clip_high": 0.3, "sharpness": 2.0}
    with pytest.raises(ConfigError, match=r"the options \['sharpness'\]; set them with algorithm.loss.options"):
        load_component(LossConfig(toy))
    with pytest.raises(ConfigError, match=r"expected options of .*sharpness.*, found sharpnes\..*options.<name>=null"):
        load_component(LossConfig(toy, options={"sharpness": 2.0, "sharpnes": 2.0}))


def test_part_unknown_name_lists_what_is_installed():
    with pytest.raises(ConfigError, match="did you mean 'clip'"):
        load_component(LossConfig("clipp"))


READ_WITH_EVERY_KIND = {"whiten", "truncated"}
OTHERS = {
    "mean": "batch", "std": "batch", "leave_one_out": True, "gamma": 0.5, "lam": 0.5, "unit": "turn", "clip_low": 0.1,
    "clip_high": 0.1, "level": "sequence", "cap": 3.0, "floor": 0.1, "low": 0.1, "high": 3.0, "threshold": 0.5,
}  # fmt: skip
"""Another value than the default of each setting that only some kinds read."""


@pytest.mark.parametrize("config", [AdvantageConfig, LossConfig, CorrectionConfig, MaskConfig])
def test_setting_that_a_kind_does_not_read_is_refused(config):
    installed = {name: load(config.group, name) for name in available(config.group)}
    none = {} if config in (AdvantageConfig, LossConfig) else {"none": lambda: None}
    names = {item.name for item in fields(config)} - {"kind", "options"} - READ_WITH_EVERY_KIND

    for kind, part in (installed | none).items():
        for name in names:
            if name in inspect.signature(part).parameters:
                config(kind, **{name: OTHERS[name]})
            else:
                with pytest.raises(ConfigError, match=f"{name} with .*kind={kind}"):
                    config(kind, **{name: OTHERS[name]})
