"""Settings of an algorithm: invalid values are rejected with the field's name, and components are loaded by name."""

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
    ("build", "message"),
    [
        (lambda: AlgorithmConfig(proximal="median"), "algorithm.proximal: expected one of auto, recompute, current"),
        (lambda: AlgorithmConfig(entropy_coef=-1.0), "algorithm.entropy_coef: expected 0"),
        (
            lambda: AlgorithmConfig(ratio="sequence", loss=LossConfig("reinforce")),
            "algorithm.ratio with algorithm.loss.kind=reinforce: expected `token`",
        ),
        (
            lambda: AlgorithmConfig(correction=CorrectionConfig("mask"), proximal="behavior"),
            "correction.kind=mask .* found 'behavior'",
        ),
        (
            lambda: AlgorithmConfig(advantage=AdvantageConfig("gdpo"), reward=RewardConfig(scale=2.0)),
            "advantage.kind with .* found 'gdpo'",
        ),
        (
            lambda: AlgorithmConfig(advantage=AdvantageConfig(std="mean"), reward=RewardConfig(overlong_max=9)),
            "advantage.std with .* found 'mean'",
        ),
        (
            lambda: AlgorithmConfig(mask=MaskConfig("ratio"), proximal="behavior"),
            "mask.kind=ratio.* found 'behavior'",
        ),
        (lambda: KLConfig("none", 0.1), "kl.coef with algorithm.kl.place=none: expected 0"),
        (lambda: KLConfig("loss", 0.0, "k3"), "kl.coef with algorithm.kl.place=loss: expected more than 0"),
        (lambda: KLConfig("loss", 0.1, "k1"), "kl.estimator with algorithm.kl.place=loss: expected `k2` or `k3`"),
        (lambda: KLConfig("reward", 0.1, "k1", weighted=True), "kl.weighted with algorithm.kl.place=reward"),
        (lambda: KLConfig(estimator="k1"), "kl.estimator with algorithm.kl.place=none"),
        (lambda: RewardConfig(overlong_weight=2.0), "overlong_weight with algorithm.reward.overlong_max=0"),
        (lambda: RewardConfig(overlong_cache=4), "overlong_cache with algorithm.reward.overlong_max=0"),
        (lambda: RewardConfig(overlong_max=4, overlong_cache=9), "overlong_cache with algorithm.reward.overlong_max=4"),
        (lambda: RewardConfig(clip=-1.0), "algorithm.reward.clip: expected 0 .off. or more, found -1.0"),
        (lambda: AdvantageConfig(mean="median"), "algorithm.advantage.mean: expected one of none, group, batch"),
        (lambda: AdvantageConfig("return", gamma=1.1), "algorithm.advantage.gamma"),
        (lambda: AdvantageConfig(mean="none", leave_one_out=True), "leave_one_out with algorithm.advantage.mean=none"),
        (lambda: LossConfig(clip_low=1.5), "algorithm.loss.clip_low"),
        (lambda: AggregationConfig("mode"), "algorithm.aggregation.kind: expected one of token_mean"),
        (lambda: CorrectionConfig("mask", floor=6.0), r"below cap \(2\)"),
        (lambda: CorrectionConfig(cap=0.0), "algorithm.correction.cap: expected more than 0"),
        (lambda: MaskConfig("ratio", low=2.0), "algorithm.mask.low: expected 0 to algorithm.mask.high"),
    ],
)
def test_algorithm_invalid_setting_is_rejected(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("options", [{"estimator": "k9"}, {"over": "batch"}])
def test_divergence_mask_unknown_option_is_rejected_on_load(options):
    with pytest.raises(ConfigError, match=r"algorithm\.mask\.options"):
        load_component(MaskConfig("divergence", options={"bound": 0.1, **options}))


def test_policy_loss_second_moment_mask_needs_recomputed_log_probs():
    config = AlgorithmConfig(loss=LossConfig("importance"), mask=MaskConfig("second_moment"), proximal="current")
    with pytest.raises(
        ConfigError, match=r"algorithm.proximal with algorithm.mask.kind=second_moment: expected `recomp"
    ):
        make_policy_loss(config, minibatches=1)


def test_resolve_proximal_auto_recomputes_for_minibatches_or_whole_mask():
    assert AlgorithmConfig().resolve_proximal(1) == "current"
    assert AlgorithmConfig().resolve_proximal(2) == "recompute"
    assert AlgorithmConfig().resolve_proximal(1, whole=True) == "recompute"


def test_load_components_several_and_none():
    assert [type(component).__name__ for component in load_components(MaskConfig("ratio+second_moment"))] == [
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
    """A custom loss with one constant from the settings and two further constants."""
    return -terms.ratio * sharpness * slope * clip_high * terms.advantages, {}


@pytest.fixture
def toy(monkeypatch):
    """Dotted path of a custom loss."""
    monkeypatch.setitem(sys.modules, "toy_losses", sys.modules[__name__])
    return "toy_losses:flat_loss"


def test_component_takes_constants_from_settings_and_options(toy):
    loaded = load_component(LossConfig(toy, clip_high=0.3, options={"sharpness": 2.0, "slope": None}))
    assert loaded.keywords == {"clip_high": 0.3, "sharpness": 2.0}
    with pytest.raises(ConfigError, match=r"the options \['sharpness'\]; set them with algorithm.loss.options"):
        load_component(LossConfig(toy))
    with pytest.raises(ConfigError, match=r"expected options of .*sharpness.*, found sharpnes\..*options.<name>=null"):
        load_component(LossConfig(toy, options={"sharpness": 2.0, "sharpnes": 2.0}))


READ_WITH_EVERY_KIND = {"whiten", "truncated"}
NON_DEFAULTS = {
    "mean": "batch", "std": "batch", "leave_one_out": True, "gamma": 0.5, "lam": 0.5, "unit": "turn", "clip_low": 0.1,
    "clip_high": 0.1, "level": "sequence", "cap": 3.0, "floor": 0.1, "low": 0.1, "high": 3.0, "threshold": 0.5,
}  # fmt: skip
"""A non-default value for each setting that only some kinds read."""


@pytest.mark.parametrize("config", [AdvantageConfig, LossConfig, CorrectionConfig, MaskConfig])
def test_setting_not_read_by_kind_is_rejected(config):
    installed = {name: load(config.group, name) for name in available(config.group)}
    none = {} if config in (AdvantageConfig, LossConfig) else {"none": lambda: None}
    names = {item.name for item in fields(config)} - {"kind", "options"} - READ_WITH_EVERY_KIND

    for kind, component in (installed | none).items():
        for name in names:
            if name in inspect.signature(component).parameters:
                config(kind, **{name: NON_DEFAULTS[name]})
            else:
                with pytest.raises(ConfigError, match=f"{name} with .*kind={kind}"):
                    config(kind, **{name: NON_DEFAULTS[name]})
