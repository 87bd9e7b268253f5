"""Two real processes against one."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of
from safetensors.torch import load_file

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import ConfigError
from rl_contracts.models.process_group import read_environment
from rl_contracts.testing.processes import run_ranks
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig

FAMILIES = ("Qwen3", "Llama", "Gemma2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(directory / family, family)
    make_model(directory / "broken")
    (directory / "broken" / "model.safetensors").write_bytes(b"half")
    return directory


@pytest.fixture(scope="module")
def two_ranks(models, tmp_path_factory):
    """What each of two ranks saw."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("fsdp_ranks.py"), [str(models), str(out)], 2)
    seen = [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(2)]
    tensors = [load_file(out / f"tensors-{rank}.safetensors") for rank in range(2)]
    return seen, tensors, out


def part(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def assert_same_weights(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_train_batch_on_two_ranks_equals_one_rank(family, models, two_ranks):
    seen, tensors, _ = two_ranks
    engine = make_engine(str(models / family))

    expected = [engine.train_batch(make_batch(seed=s), loss_fn, loss_weight_fn) for s in range(3)]

    for found in (seen[0][family], seen[1][family]):
        for step, one in zip(found, expected, strict=True):
            assert step == pytest.approx(one, rel=1e-5)
    for rank in range(2):
        assert_same_weights(part(tensors[rank], f"{family}."), weights_of(engine))


def test_train_batch_with_a_rank_without_rows_equals_one_rank(models, two_ranks):
    seen, tensors, _ = two_ranks
    engine = make_engine(str(models / "Qwen3"))
    evaluated = engine.eval_batch(make_batch(), loss_fn, loss_weight_fn)

    expected = engine.train_batch(make_batch(), loss_fn, loss_weight_fn)

    for rank in range(2):
        assert seen[rank]["evaluated with an empty rank"] == pytest.approx(evaluated, rel=1e-5)
        assert seen[rank]["empty rank"] == pytest.approx(expected, rel=1e-5)
        assert_same_weights(part(tensors[rank], "empty."), weights_of(engine))


def test_forward_on_two_ranks_returns_each_rank_its_own_rows(models, two_ranks):
    _, tensors, _ = two_ranks

    expected = make_engine(str(models / "Qwen3")).forward(make_batch(), logprobs_of)

    torch.testing.assert_close(tensors[0]["forward.0"], expected, atol=1e-5, rtol=1e-5)
    assert tensors[1]["forward.1"].shape[0] == 0


def test_train_batch_with_non_finite_gradients_on_one_rank_is_skipped_on_both(two_ranks):
    for seen in two_ranks[0]:
        assert seen["exploding on rank 0"]["applied"] == 0.0
        assert not math.isfinite(seen["exploding on rank 0"]["grad_norm"])


def test_full_parameters_on_two_ranks_are_whole_and_come_on_rank_0_alone(two_ranks):
    seen, tensors, _ = two_ranks
    expected = part(tensors[0], "published.")

    found = part(tensors[0], "yielded.")

    assert dict(seen[0]["yielded"]) == {name: list(value.shape) for name, value in found.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert seen[1]["yielded"] == []
    assert part(tensors[1], "yielded.") == {}


def test_as_served_on_two_ranks_rounds_every_shard_for_the_time_of_a_block(models, two_ranks):
    engine, tensors = make_engine(str(models / "Qwen3"), serve_dtype="bfloat16"), two_ranks[1]
    weights = weights_of(engine)
    with engine.as_served():
        expected = engine.forward(make_batch(seed=1), logprobs_of)

    for rank in range(2):
        found, after = part(tensors[rank], "served."), part(tensors[rank], "unserved.")
        logprobs = found.pop(str(rank))
        torch.testing.assert_close(logprobs, expected[rank::2, : logprobs.shape[1]], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in weights.items())
        assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_save_state_on_two_ranks_continues_exactly_there_and_on_one(models, two_ranks):
    seen, _, out = two_ranks
    assert seen[0]["after loading"] == seen[0]["after saving"]
    engine = make_engine(str(models / "Qwen3"))

    engine.load(SaveLoadMeta(str(out / "state"), kind="state"))

    assert engine.version == 7
    found = engine.train_batch(make_batch(seed=1), loss_fn, loss_weight_fn)
    assert found == pytest.approx(seen[0]["after saving"], rel=1e-5)


def test_save_hf_on_two_ranks_loads_with_transformers(two_ranks):
    from transformers import AutoModelForCausalLM

    _, tensors, out = two_ranks

    loaded = dict(AutoModelForCausalLM.from_pretrained(out / "hf").named_parameters())

    for name, value in part(tensors[0], "published.").items():
        assert torch.equal(loaded[name], value)


def test_load_hf_on_two_ranks_replaces_the_weights_on_both(models, two_ranks):
    _, tensors, _ = two_ranks

    expected = weights_of(make_engine(str(models / "Qwen3")))

    for rank in range(2):
        assert_same_weights(part(tensors[rank], "reloaded."), expected)


def test_errors_of_one_rank_are_raised_on_both(two_ranks):
    for seen in two_ranks[0]:
        assert "rank 1" in seen["too long on rank 1"]
        assert "a micro-batch holds 2" in seen["too long on rank 1"]
        assert "rank 0: ModelError" in seen["nothing there"]


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("read_model on rank 0", "rank 0: ZeroDivisionError"),
        ("read_config on rank 0", "rank 0: ZeroDivisionError"),
        ("read_config on rank 1", "rank 1: ZeroDivisionError"),
        ("hub_slices on rank 0", "rank 0: ZeroDivisionError"),
        ("make_optimizer on rank 1", "rank 1: ZeroDivisionError"),
        ("another buffer", "'model.another' has shape none there and (2,) here"),
        ("a tensor missing while loading", "rank 0: KeyError: 'model.model.embed_tokens.weight'"),
    ],
)
def test_error_of_any_kind_while_one_rank_loads_is_raised_on_both_within_seconds(two_ranks, doing, said):
    for seen in two_ranks[0]:
        assert said in seen[doing]
        assert seen[f"{doing}, seconds"] < 30  # of the group's timeout of minutes


def test_bfloat16_on_two_ranks_learns_and_engines_share_the_process_group(two_ranks):
    for seen in two_ranks[0]:
        losses = [step["loss"] for step in seen["bfloat16"]]
        assert losses[-1] < losses[0]
        assert seen["groups alive"]


# ---- layouts and environments that cannot work


def test_initialize_with_another_number_of_ranks_says_both(models):
    engine = FSDPEngine(FSDPEngineConfig(), ParallelStrategy(data=3))

    with pytest.raises(ConfigError, match="expected 3 ranks, but WORLD_SIZE is 1"):
        engine.initialize(FinetuneSpec(str(models / "Qwen3"), 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_initialize_ranks_of_one_machine_listen_on_loopback_alone(models):
    script = Path(__file__).with_name("fsdp_listening_ranks.py")
    outputs = run_ranks(script, [str(models / "Qwen3")], 2)
    assert [output.splitlines()[-1] for output in outputs] == ["0100007F", "0100007F"]


def test_read_environment_without_torchrun_is_one_process():
    assert read_environment({}).world_size == 1


def test_read_environment_with_a_missing_variable_names_it():
    with pytest.raises(ConfigError, match="MASTER_PORT is missing"):
        read_environment({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"})


def test_read_environment_with_a_rank_that_is_no_number_says_so():
    with pytest.raises(ConfigError, match="must be integers"):
        read_environment({"WORLD_SIZE": "1", "RANK": "first", "LOCAL_RANK": "0"})
