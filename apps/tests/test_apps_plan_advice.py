"""`rl plan`: the layouts that fit a model, the reasons for the others, and the smallest change with which one fits."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from rl_apps.cli.main import main
from rl_apps.plan.advice import Advice, advise
from rl_apps.plan.estimate import Estimator, estimator_of
from rl_apps.plan.inputs import read_inputs
from rl_apps.plan.memory import USABLE
from rl_apps.plan.page import OFFLOAD
from rl_apps.plan.rates import Sourced
from rl_apps.plan.splits import SAVINGS, free_splits, given_splits, layouts
from rl_apps.settings.device_layout import layout_of
from rl_contracts.allocation import Allocation

pytestmark = pytest.mark.slow

GIB = 2**30
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
"""`config.json` of Qwen2.5-7B."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    (directory / "config.json").write_text(json.dumps(QWEN))
    return directory


@pytest.fixture(scope="module")
def on_h100(model: Path) -> Estimator:
    return estimator_of(read_inputs("grpo", [f"model.path={model}"], "H100"))


def advice_for(estimator: Estimator, *settings: str, devices: int = 8, memory: float = 80) -> Advice:
    """Return the advice for a layout that does not fit on devices with this many usable GiB."""
    changed = estimator.with_settings(*settings)
    changed = replace(changed, inputs=replace(changed.inputs, memory=memory * GIB / USABLE))
    case = changed.case()
    assert case.too_large
    advice = advise(changed, case, devices)
    assert advice.case is not None
    assert not advice.case.too_large
    return advice


@pytest.mark.parametrize(
    ("settings", "memory", "expected"),
    [
        (["allocation=vllm:d4+fsdp:d4"], 80, ["actor.engine.gradient_checkpointing=true"]),
        (
            ["allocation=vllm:d4+fsdp:d4", "actor.engine.gradient_checkpointing=true"],
            50,
            ["actor.engine.sync_every_micro_batch=true"],
        ),
        (["allocation=vllm:d4+fsdp:d4", *SAVINGS, "model.dtype=float32"], 45, ["model.dtype=bfloat16"]),
        (["allocation=vllm:d4+fsdp:d4", *SAVINGS], 37, ["allocation=vllm:d4+fsdp:d2c2"]),
        (["allocation=vllm:d6+fsdp:d2", *SAVINGS], 45, ["allocation=vllm:d4+fsdp:d4"]),
        (
            ["allocation=vllm:d8|fsdp:d8", "actor.engine.gradient_checkpointing=true"],
            80,
            ["rollout.server.memory_share=0.7"],
        ),
    ],
)
def test_advise_returns_the_cheapest_change_that_fits(
    on_h100: Estimator, settings: list[str], memory: float, expected: list[str]
) -> None:
    assert advice_for(on_h100, *settings, memory=memory).settings == tuple(expected)


def test_advise_server_without_room_gets_more_devices_per_server(on_h100: Estimator) -> None:
    settings = ("rollout.server.memory_share=0.3", "actor.micro_batch.max_tokens=2048", *SAVINGS)
    (allocation,) = advice_for(on_h100, "allocation=vllm:d4+fsdp:d4", *settings, memory=44).settings
    rollout = Allocation.parse(allocation.partition("=")[2]).component("rollout")
    assert rollout.strategy.tensor == 2


def test_advise_two_changes_if_no_single_one_fits(on_h100: Estimator) -> None:
    advice = advice_for(on_h100, "allocation=vllm:d4+fsdp:d4", memory=50)
    assert len(advice.settings) == 2
    assert "actor.engine.gradient_checkpointing=true" in advice.settings
    assert advice.devices == 0


def test_advise_one_shared_device_gets_three_changes(on_h100: Estimator) -> None:
    advice = advice_for(on_h100, "allocation=vllm:d1|fsdp:d1", devices=1)
    names = [text.partition("=")[0].rpartition(".")[2] for text in advice.settings]
    assert names == ["memory_share", "gradient_checkpointing", "offload"]
    assert advice.devices == 0


@pytest.mark.parametrize("allocation", ["allocation=vllm:d1+fsdp:d1", "allocation=vllm:d2|fsdp:d2"])
def test_advise_too_few_devices_states_how_many_are_enough(on_h100: Estimator, allocation: str) -> None:
    advice = advice_for(on_h100, allocation, devices=2, memory=12)
    assert advice.devices > 2
    proposed = advice.settings[0].partition("=")[2]
    assert Allocation.parse(proposed).world_size <= advice.devices


def test_case_that_fills_the_whole_device_does_not_fit(on_h100: Estimator) -> None:
    estimator = on_h100.with_settings("allocation=vllm:d4+fsdp:d4", *SAVINGS)
    total = estimator.case().memory[0].total
    case = replace(estimator, inputs=replace(estimator.inputs, memory=total * 1.02)).case()
    assert [memory.owner for memory in case.too_large] == ["trainer rank"]


def test_given_splits_state_why_the_others_are_left_out(on_h100: Estimator) -> None:
    settings = ("allocation=vllm:d4+fsdp:d4", "actor.engine.gradient_checkpointing=true")
    found = given_splits(on_h100.with_settings(*settings), 8)
    assert set(found.cases) == {"vllm:d4+fsdp:d4"}
    kinds = {split.trainer_devices: split.kind for split in found.left_out}
    assert kinds == {1: "memory", 2: "memory", 3: "batch", 5: "batch", 6: "batch", 7: "batch"}
    assert all(split.reason for split in found.left_out)


def test_given_splits_omit_replicas_that_expert_groups_do_not_divide(on_h100: Estimator) -> None:
    found = layouts(layout_of("vllm:d4+megatron:d4e4", on_h100.inputs.app.servers), 8)
    assert [layout.actor.strategy.data for layout in found] == [4]


def test_free_splits_have_the_least_savings_and_sizes_that_fit(on_h100: Estimator) -> None:
    found = free_splits(on_h100, 8, 8)
    assert "vllm:d4+fsdp:d4" in found.cases
    assert "vllm:d8|fsdp:d8" in found.cases
    assert not any(case.too_large for case in found.cases.values())
    assert "actor.engine.sync_every_micro_batch=true" not in found.changes["vllm:d4+fsdp:d4"]
    assert all(Allocation.parse(name).world_size == 8 for name in found.cases)
    several_machines = free_splits(on_h100, 8, 4)
    assert not any("|" in name for name in several_machines.cases)  # only devices of one machine are shared


def test_plan_without_allocation_prints_a_command_that_fits(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "grpo", f"model.path={model}", "cluster.devices=4", "data.batch_size=8", "--gpu", "H100"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["best_command"] == plan["command"]
    assert "|" in plan["allocation"]
    program, app, *settings = shlex.split(plan["command"])
    assert (program, app) == ("rl", "grpo")
    assert main(["plan", "grpo", *settings, "--gpu", "H100", "--json", "--no-splits"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["fits"], again["allocation"], again["memory"]) == (True, plan["allocation"], plan["memory"])


def test_page_of_a_layout_too_large_has_advice_instead_of_a_simulation(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "grpo", f"model.path={model}", "allocation=vllm:d4+fsdp:d4", "--gpu", "H100"]) == 0
    out = capsys.readouterr().out
    assert "  actor.engine.gradient_checkpointing=true\n" in out
    assert "Simulated:" not in out
    assert "trainer devices 3, 5-7: their replicas do not divide data.batch_size=32" in out


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (["rollout.server.max_sequences=8"], "rollout.server.max_sequences"),
        (["rollout.max_concurrent=4"], "rollout.max_concurrent"),
        (["rollout.max_staleness=0", "data.batch_size=4"], "rollout.max_staleness and data.batch_size"),
        (
            ["rollout.max_staleness=9", "rollout.server.max_sequences=9999", "rollout.server.memory_share=0.2"],
            "the KV cache",
        ),
    ],
)
def test_limits_of_concurrent_completions_name_the_least(on_h100: Estimator, settings: list[str], limit: str) -> None:
    limits = on_h100.with_settings("allocation=vllm:d4+fsdp:d4", *settings).case().limits
    assert min(limits, key=lambda name: limits[name]) == limit


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ((), 15.23 / 5 + 0.1),
        (("model.dtype=float32",), 30.46 / 5 + 0.1),
        (("publish.route=disk",), 15.23 + 0.1),
        (("cluster.nodes=2", "cluster.devices=4"), 15.23 / 5 + 0.1),
        (("actor.engine.lora.rank=16",), 0.1),
    ],
)
def test_publish_seconds_are_bytes_by_the_speed_of_the_route(
    on_h100: Estimator, settings: tuple[str, ...], seconds: float
) -> None:
    rates = on_h100.with_settings("allocation=vllm:d4+fsdp:d4", *settings).case().rates
    assert rates["publish_seconds"].value == pytest.approx(seconds, rel=0.01, abs=0.05)


def test_publish_seconds_follow_the_given_speed(on_h100: Estimator) -> None:
    given = replace(on_h100.inputs, rates={"publish_gb_per_s": Sourced(20.0, "given")})
    rates = replace(on_h100, inputs=given, _configs={}).with_settings("allocation=vllm:d4+fsdp:d4").case().rates
    assert rates["publish_seconds"].value == pytest.approx(15.23 / 20 + 0.1, rel=0.01)
    assert "publish_gb_per_s" not in rates


@pytest.mark.parametrize(
    ("server", "kept"), [("vllm", ()), ("embedded", ("weights",)), ("sglang", ("weights", "keys and values"))]
)
def test_shared_device_in_training_has_what_a_sleeping_server_keeps(
    on_h100: Estimator, server: str, kept: tuple[str, ...]
) -> None:
    case = on_h100.with_settings(f"allocation={server}:d1|fsdp:d1").case()
    memory = {each.owner: each for each in case.memory}
    server_parts = memory["server device"].parts
    in_training = memory["shared device in training"].parts
    assert in_training["trainer"] == memory["trainer rank"].total
    assert in_training["sleeping server"] == pytest.approx(sum(server_parts[part] for part in kept))


def test_plan_with_offload_states_that_it_takes_no_time(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "grpo", f"model.path={model}", "allocation=vllm:d4+fsdp:d4", *SAVINGS, "--gpu", "H100"]
    assumptions = []
    for setting in ("actor.engine.offload=false", "actor.engine.offload=true"):
        assert main([*arguments, setting, "--no-splits", "--json"]) == 0
        assumptions.append(json.loads(capsys.readouterr().out)["assumptions"]["always"])
    assert set(assumptions[1]) - set(assumptions[0]) == {OFFLOAD}
