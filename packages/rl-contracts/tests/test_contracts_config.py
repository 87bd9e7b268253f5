"""Tests of shared settings, which reject invalid values by field name, and of weight updates as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.config import GenerationConfig, MicroBatchConfig, OptimizerConfig
from rl_contracts.data import ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("min_new_tokens", -1, r"between 0 and max_new_tokens \(256\)"),
        ("min_new_tokens", 257, r"between 0 and max_new_tokens \(256\)"),
        ("temperature", float("nan"), r"0 \(greedy\) or 1e-4 to 1e4"),
        ("temperature", float("inf"), r"0 \(greedy\) or 1e-4 to 1e4"),
        ("temperature", 1e-46, r"0 \(greedy\) or 1e-4 to 1e4"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.1, r"in \(0, 1\]"),
        ("top_k", -1, r"0 \(off\) or more"),
        ("min_p", 1.0, r"in \[0, 1\)"),
        ("min_p", -0.1, r"in \[0, 1\)"),
        ("presence_penalty", 2.5, r"in \[-2, 2\]"),
        ("frequency_penalty", -2.5, r"in \[-2, 2\]"),
        ("repetition_penalty", 0.0, r"in \[0\.01, 100\] \(1 is off\)"),
        ("repetition_penalty", float("inf"), r"in \[0\.01, 100\] \(1 is off\)"),
    ],
)
def test_generation_config_value_out_of_range_names_field_and_range(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"generation\.{field}: expected {expected}, found {value}"):
        GenerationConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "greedy", "truncates"),
    [
        ({}, False, False),
        ({"top_p": 0.9}, False, True),
        ({"top_k": 5}, False, True),
        ({"min_p": 0.1}, False, True),
        ({"temperature": 0.0, "top_p": 0.9}, True, False),
        ({"temperature": 1e-3}, False, False),
    ],
)
def test_generation_config_sampling_fields_set_greedy_and_truncates(
    fields: dict[str, Any], greedy: bool, truncates: bool
) -> None:
    config = GenerationConfig(**fields)

    assert (config.greedy, config.truncates) == (greedy, truncates)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_generation_config_with_any_penalty_penalizes_even_if_greedy(field: str) -> None:
    assert not GenerationConfig(top_p=0.5).penalizes
    assert GenerationConfig(temperature=0.0, **{field: 0.5}).penalizes


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"lr": float("nan")}, r"optimizer\.lr"),
        ({"weight_decay": -0.1}, r"optimizer\.weight_decay"),
        ({"eps": 0.0}, r"optimizer\.eps"),
        ({"schedule": "cosin"}, r"optimizer\.schedule: expected one of constant, linear, cosine, found 'cosin'"),
        ({"warmup_steps": -1}, r"optimizer\.warmup_steps"),
        ({"min_lr_ratio": 1.5}, r"optimizer\.min_lr_ratio"),
        ({"max_grad_norm": -1.0}, r"optimizer\.max_grad_norm"),
        ({"beta1": 1.0}, r"optimizer\.beta1"),
        ({"beta2": -0.1}, r"optimizer\.beta2"),
        ({"name": "sgd", "beta2": 0.9}, r"optimizer\.beta2 with optimizer\.name=sgd"),
        ({"min_lr_ratio": 0.5}, r"optimizer\.min_lr_ratio with optimizer\.schedule=constant"),
    ],
)
def test_optimizer_config_invalid_value_names_field(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        OptimizerConfig(**fields)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_optimizer_schedule_reads_only_settings_that_change_its_rate(schedule: str) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule)
    before = config.rate(3, 4)
    config.min_lr_ratio = 0.5

    assert (config.rate(3, 4) != before) == ("min_lr_ratio" in OptimizerConfig.reads["schedule"][schedule])


def test_optimizer_config_custom_optimizer_may_read_all_settings() -> None:
    config = OptimizerConfig(name="torch.optim:RMSprop", beta1=0.5, eps=0.1)

    assert config.unread("name", config.name) == set()


def test_micro_batch_config_zero_tokens_raises() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch\.max_tokens: expected at least 1, found 0"):
        MicroBatchConfig(max_tokens=0)


specs = st.builds(
    ParamSpec,
    st.text(max_size=8),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
)
parts = st.builds(WeightPart, st.text(max_size=8), st.lists(specs, max_size=3).map(tuple))


@given(
    st.builds(
        WeightUpdateMeta,
        st.sampled_from(["shm", "disk"]),
        st.integers(0, 9),
        st.lists(parts, max_size=3).map(tuple),
    )
)
def test_weight_update_meta_json_round_trip_keeps_params_of_all_parts(meta: WeightUpdateMeta) -> None:
    assert WeightUpdateMeta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    assert list(meta.params) == [spec for part in meta.parts for spec in part.params]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"route": "shm", "version": "x", "parts": []},
        {"route": "shm", "version": 1, "parts": [{"location": "", "params": [{"name": "w"}]}]},
    ],
)
def test_weight_update_meta_from_invalid_json_raises(value: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        WeightUpdateMeta.from_json(value)
