"""Tests of the allocation grammar: meaning, round trip through text, and positions of errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts import registry
from rl_contracts.allocation import (
    Allocation,
    Component,
    ComponentKind,
    ParallelStrategy,
)
from rl_contracts.errors import ConfigError
from rl_contracts.inference import InferenceEngine

INFERENCE, TRAIN = ComponentKind.INFERENCE, ComponentKind.TRAIN
KINDS = {"embedded": INFERENCE, "sglang": INFERENCE, "vllm": INFERENCE, "fsdp": TRAIN, "megatron": TRAIN}


def parse(text: str) -> Allocation:
    """Parse an allocation as if all backends of `KINDS` were installed."""
    return Allocation.parse(text, KINDS)


class Engine:
    """Stand-in for a train engine, which has no `server_spec`."""


class Server(Engine):
    """Stand-in for an inference engine, which the grammar recognizes by its `server_spec`."""

    server_spec = InferenceEngine.server_spec


def test_parse_separate_groups_adds_devices() -> None:
    allocation = parse("sglang:d4t2+fsdp:d8")

    assert allocation.world_size == 16
    assert allocation.inference == (
        Component("sglang", "rollout", ParallelStrategy(data=4, tensor=2), ComponentKind.INFERENCE),
    )
    assert allocation.train == (Component("fsdp", "actor", ParallelStrategy(data=8), ComponentKind.TRAIN),)
    assert allocation.devices("rollout") == range(8)
    assert allocation.devices("actor") == range(8, 16)


def test_parse_bar_binds_tighter_than_plus() -> None:
    allocation = parse("sglang[r]:d2+fsdp[actor]:d4|fsdp[critic]:d4")

    assert [[c.name for c in group] for group in allocation.groups] == [["r"], ["actor", "critic"]]
    assert allocation.world_size == 6
    assert allocation.devices("actor") == allocation.devices("critic") == range(2, 6)
    assert allocation.devices("r") == range(2)


def test_parse_dimensions_in_any_order_excludes_expert_from_world_size() -> None:
    strategy = parse("megatron:e4c2p3t2d2").component("actor").strategy

    assert strategy == ParallelStrategy(data=2, tensor=2, pipeline=3, context=2, expert=4)
    assert strategy.world_size == 24
    assert strategy.model_size == 12


def test_parse_hybrid_folds_experts_into_attention_ranks() -> None:
    strategy = parse("megatron:(attn:d1p12t4|ffn:d1p12e4)").component("megatron").strategy

    assert strategy == ParallelStrategy(tensor=4, pipeline=12, expert=4, expert_tensor=1)
    assert strategy.world_size == 48
    assert strategy.expert_data == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(attn:d2p2t2|ffn:e4)", ParallelStrategy(data=2, pipeline=2, tensor=2, expert=4, expert_tensor=1)),
        ("(attn:d4|ffn:t2)", ParallelStrategy(data=4, expert_tensor=2)),
    ],
)
def test_parse_hybrid_without_d_or_p_derives_them_for_experts(text: str, expected: ParallelStrategy) -> None:
    assert parse(f"megatron:{text}").component("megatron").strategy == expected


def test_parse_installed_backend_gets_kind_from_entry_point_group(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"rl.inference_engines": {"custom": "m:S"}, "rl.train_engines": {"embedded": "m:E"}}
    monkeypatch.setattr(registry, "available", lambda group: installed[group])

    assert [c.kind for c in Allocation.parse("custom:d1+embedded:d1").components] == [INFERENCE, TRAIN]
    with pytest.raises(ConfigError) as caught:
        Allocation.parse("custom:d1+embeded:d1")
    lines = str(caught.value).splitlines()
    assert "'embeded'; did you mean 'embedded'? Installed: custom, embedded." in lines[0]
    assert "Install rl-inference or rl-engines-fsdp" in lines[0]
    assert lines[2] == " " * 12 + "^"


def test_parse_dotted_path_gets_kind_from_class() -> None:
    text = f"{__name__}:Server:d2+{__name__}:Engine[policy]:d1t2"
    allocation = Allocation.parse(text)

    assert [(c.name, c.kind) for c in allocation.components] == [("rollout", INFERENCE), ("policy", TRAIN)]
    assert (allocation.world_size, str(allocation)) == (4, text.replace("d1t2", "t2"))
    with pytest.raises(ConfigError, match=r"'no_such_module:Engine' .*\n.*\n  \^$"):
        Allocation.parse("no_such_module:Engine:d1")


def test_component_unknown_or_ambiguous_key_lists_components() -> None:
    allocation = parse("fsdp[actor]:d2|fsdp[critic]:d2")

    with pytest.raises(ConfigError, match=r"'fsdp'.*actor \(fsdp\), critic \(fsdp\)"):
        allocation.component("fsdp")
    with pytest.raises(ConfigError, match="'rollout'"):
        allocation.component("rollout")


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 0, "name of a backend"),
        ("sglang", 6, "expected ':', found the end"),
        ("fsdp:d4x2", 7, "expected a dimension (one of d, t, p, c, e, then a number), found 'x'"),
        ("fsdp:d-1", 6, "size of dimension 'd', a number of at least 1, found '-'"),
        ("fsdp:d2d4", 7, "dimension 'd' is given twice"),
        ("fsdp:d2t0", 8, "at least 1 for dimension 't', found 0"),
        ("fsdp:d2+", 8, "name of a backend"),
        ("fsdp[actor:d2", 10, "expected ']', found ':'"),
        ("fsdp[]:d2", 5, "name of the component"),
        ("fsdp:d2)", 7, "expected another dimension, '+', '|' or the end, found ')'"),
        ("megatron:(attn:d2|ffn:d2", 24, "expected ')', found the end"),
        ("megatron:(attn:d2)", 17, "expected '|', found ')'"),
        ("megatron:(ffn:d2|attn:d2)", 10, "expected 'attn:'"),
        (
            "megatron:(attn:d2e2|ffn:d2)",
            17,
            "expected a dimension (one of d, t, p, c, then a number), found 'e'",
        ),
        ("megatron:(attn:d2p2|ffn:d4p1)", 20, "need the same p, found 2 and 1"),
        ("megatron:(attn:d2p2|ffn:d4)", 20, "must equal ffn d*t*p*e: found 4 and 8"),
        ("archon:d4", 0, "archon"),
        ("fsdp:d2+fsdp:d2", 8, "two components are called 'actor'"),
        ("vllm:d2t2|fsdp:d8", 10, "world sizes must be equal: rollout has 4, actor has 8"),
        ("megatron:d2e3", 9, "must divide the 2 ranks"),
        ("fsdp:d٢", 6, "size of dimension 'd'"),
    ],
)
def test_parse_invalid_text_marks_character(text: str, at: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)

    lines = str(caught.value).splitlines()
    assert message in lines[0]
    assert lines[1] == f"  {text}"
    assert lines[2] == "  " + " " * at + "^"


def test_allocation_constructor_with_invalid_groups_raises() -> None:
    actor = Component("fsdp", "actor", ParallelStrategy(data=2), ComponentKind.TRAIN)
    server = Component("sglang", "rollout", ParallelStrategy(), ComponentKind.INFERENCE)

    with pytest.raises(ConfigError, match="world sizes must be equal"):
        Allocation(((actor, server),))
    with pytest.raises(ConfigError, match="'actor'"):
        Allocation(((actor,), (actor,)))
    with pytest.raises(ConfigError, match="at least one component"):
        Allocation(())


@pytest.mark.parametrize("sizes", [{"data": 0}, {"expert_tensor": 0}, {"data": 2, "expert": 2, "expert_tensor": 2}])
def test_strategy_with_impossible_sizes_raises(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="parallel strategy"):
        ParallelStrategy(**sizes)


@st.composite
def _components(draw: st.DrawFn, name: str) -> str:
    backend = draw(st.sampled_from(["embedded", "sglang", "fsdp", "megatron"]))
    data, tensor, pipeline = (draw(st.integers(1, 9)) for _ in range(3))
    if draw(st.booleans()):
        dims = draw(st.permutations([f"d{data}", f"t{tensor}", f"p{pipeline}", f"e{data}"]))
        return f"{backend}[{name}]:{''.join(dims)}"
    return f"{backend}[{name}]:(attn:d{data}t{tensor}p{pipeline}|ffn:d{tensor}p{pipeline}e{data})"


@st.composite
def _texts(draw: st.DrawFn) -> str:
    """Draw groups of one component, or of one component and its copy on the same devices."""
    groups = []
    for index in range(draw(st.integers(1, 4))):
        text = draw(_components(f"n{index}"))
        copy = text.replace(f"n{index}", f"copy{index}")
        groups.append(f"{text}|{copy}" if draw(st.booleans()) else text)
    return draw(st.sampled_from(["+", " + "])).join(groups)


@given(_texts())
def test_parse_of_str_returns_equal_allocation(text: str) -> None:
    allocation = parse(text)

    assert parse(str(allocation)) == allocation
    assert str(parse(str(allocation))) == str(allocation)


@pytest.mark.parametrize(
    "text",
    [
        "embedded:d1+fsdp:d1",
        "sglang[r]:d2+fsdp:d4|fsdp[critic]:d4",
        "sglang:d2t2|megatron:(attn:d2t2|ffn:t2e2)",
    ],
)
def test_str_of_parsed_canonical_text_returns_it(text: str) -> None:
    assert str(parse(text)) == text


@given(st.text(alphabet="fsdpvlm:[]()|+dtpce0129 ", max_size=30))
def test_parse_any_text_returns_allocation_or_raises_config_error(text: str) -> None:
    try:
        allocation = parse(text)
    except ConfigError:
        return
    assert parse(str(allocation)) == allocation
