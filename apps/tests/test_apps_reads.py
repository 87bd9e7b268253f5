"""`Settings.reads` lists exactly the settings that the component of each selector value uses."""

from copy import copy
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch

from rl_contracts import registry
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import COMPONENT_PREFIX, pack
from rl_contracts.config import OptimizerConfig, Settings
from rl_contracts.engine import TokenOutputs
from rl_contracts.errors import ConfigError
from rl_contracts.testing.batches import make_batch
from rl_trainers import PolicyActor
from rl_trainers.algorithms.config import AlgorithmConfig, LossConfig
from rl_trainers.learners.preference import PolicyPreferenceLoss, PreferenceConfig

SECTIONS = {cls: name for name, cls in get_type_hints(AlgorithmConfig).items() if getattr(cls, "reads", None)}
TESTED_ELSEWHERE = {OptimizerConfig}  # test_contracts_config.py and test_fsdp_optimizers.py
CASES = [(cls, selector) for cls in (*SECTIONS, PreferenceConfig) for selector in cls.reads]
REQUIRED = {"divergence": {"options": {"bound": 0.1}}, "reward": {"coef": 0.1}, "loss": {"coef": 0.1}}
"""Settings without which a selector value is rejected."""


def numbers_computed(config):
    """Return all numbers that the component computes from a batch in which all policies differ."""
    batch = shard_batch(make_batch(16), ParallelContext(), 2)
    batch["group_ids"], batch["rewards"] = torch.arange(16) // 2, torch.arange(16) % 2.0  # pairs
    shape, generator = batch["logprobs"].shape, torch.Generator().manual_seed(0)
    old, new, reference, values = (batch["logprobs"] + torch.randn(shape, generator=generator) / 2 for _ in range(4))
    outputs = TokenOutputs(new[batch["attention_mask"]], torch.zeros(int(batch["attention_mask"].sum())))
    if isinstance(config, PreferenceConfig):
        batch["ref_logprobs"] = reference
        return [float(PolicyPreferenceLoss(config)(outputs, pack(batch))[0])]
    batch[f"{COMPONENT_PREFIX}score"] = batch["rewards"] = torch.arange(16.0) ** 2 % 7
    batch["group_ids"] = torch.arange(16) // 4
    engine = SimpleNamespace(version=0, parallel=ParallelContext(), forward=lambda *_: old)
    critic = SimpleNamespace(values=lambda _: values, explained_variance=lambda _: 0.0)
    algorithm = AlgorithmConfig(**{SECTIONS[type(config)]: config})
    actor = PolicyActor(engine, algorithm, 2, SimpleNamespace(forward=lambda *_: reference), critic)
    actor.prepare(batch)
    loss, stats = actor.loss(outputs, pack(batch))
    return [float(loss), *batch["advantages"].flatten().tolist(), *(float(total) for total, _ in stats.values())]


def other_values(item):
    """Return values of a field that differ from its default and satisfy its condition."""
    numbers, names = (0.1, 0.3, 0.9, 3.0), item.metadata.get("expected", "").removeprefix("one of ").split(", ")
    values = {bool: (True, False), str: names}.get(type(item.default), numbers)
    return [value for value in values if value != item.default and item.metadata.get("holds", bool)(value)]


def is_accepted(config, **change):
    try:
        return bool(replace(config, **change))
    except ConfigError:
        return False


def accepted_and_used_settings(cls, selector, value):
    """Return the settings that may be changed with a selector value, and those whose change has an effect."""
    config, accepted, used = cls(**{selector: value}, **REQUIRED.get(value, {})), set(), set()
    before = numbers_computed(config)
    for item in fields(cls):
        for other in other_values(item) if item.name not in (selector, "options") else ():
            unchecked = copy(config)
            setattr(unchecked, item.name, other)
            accepted |= {item.name} if is_accepted(config, **{item.name: other}) else set()
            used |= {item.name} if numbers_computed(unchecked) != before else set()
    return accepted, used


@pytest.mark.parametrize(("cls", "selector"), CASES, ids=lambda case: getattr(case, "setting", case))
def test_reads_each_value_accepts_only_settings_with_effect(cls, selector):
    settings = {value: accepted_and_used_settings(cls, selector, value) for value in cls.reads[selector]}
    assert {value: accepted for value, (accepted, _) in settings.items()} == {
        value: used for value, (_, used) in settings.items()
    }


@pytest.mark.parametrize(("kind", "reads"), [("cispo", {"clip_low"}), ("sapo", {"clip_low"})])
def test_reads_wrong_entry_is_detected(kind, reads, monkeypatch):
    monkeypatch.setitem(LossConfig.reads["kind"], kind, reads)
    accepted, used = accepted_and_used_settings(LossConfig, "kind", kind)
    assert accepted == reads != used


def test_reads_each_selector_lists_all_values():
    for app in registry.available("rl.apps"):
        registry.load("rl.apps", app)  # imports the settings classes
    pending, selecting = [Settings], set()
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        names = {item.name for item in fields(cls)} - {"kind", "options"} if hasattr(cls, "group") else set()
        selecting |= {cls} if cls.__module__.startswith("rl_") and (cls.reads or names) else set()
    assert selecting == {*SECTIONS, PreferenceConfig, *TESTED_ELSEWHERE}
    for cls in selecting:
        assert cls.reads
        for selector, values in cls.reads.items():
            item = cls.__dataclass_fields__[selector]
            names = other_values(item) if item.metadata else registry.available(cls.group)
            assert {item.default, *names} <= values.keys()
