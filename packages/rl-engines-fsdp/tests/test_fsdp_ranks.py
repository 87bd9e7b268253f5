"""Two processes compared with one."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of
from safetensors.torch import load_file

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.process_group import read_environment
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import ConfigError
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
def two_ranks(device, models, tmp_path_factory):
    """Return reports and tensors of two ranks, and their output directory."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("fsdp_ranks.py"), [str(models), str(out)], 2)
    reports = [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(2)]
    tensors = [load_file(out / f"tensors-{rank}.safetensors") for rank in range(2)]
    return reports, tensors, out


def with_prefix(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def assert_same_weights(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_train_batch_on_two_ranks_equals_one_rank(family, models, two_ranks):
    reports, tensors, _ = two_ranks
    engine = make_engine(str(models / family))

    expected = [engine.train_batch(make_batch(seed=s), loss_fn, loss_weight_fn) for s in range(3)]

    for actual in (reports[0][family], reports[1][family]):
        for step, expected_step in zip(actual, expected, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-5)
    for rank in range(2):
        assert_same_weights(with_prefix(tensors[rank], f"{family}."), weights_of(engine))


def test_train_batch_with_rank_without_sequences_equals_one_rank(models, two_ranks):
    reports, tensors, _ = two_ranks
    engine = make_engine(str(models / "Qwen3"))
    evaluated = engine.eval_batch(make_batch(), loss_fn, loss_weight_fn)

    expected = engine.train_batch(make_batch(), loss_fn, loss_weight_fn)

    for rank in range(2):
        assert reports[rank]["evaluated with an empty rank"] == pytest.approx(evaluated, rel=1e-5)
        assert reports[rank]["empty rank"] == pytest.approx(expected, rel=1e-5)
        assert_same_weights(with_prefix(tensors[rank], "empty."), weights_of(engine))


def test_forward_on_two_ranks_returns_own_sequences(models, two_ranks):
    _, tensors, _ = two_ranks

    expected = make_engine(str(models / "Qwen3")).forward(make_batch(), logprobs_of)

    torch.testing.assert_close(tensors[0]["forward.0"], expected, atol=1e-5, rtol=1e-5)
    assert tensors[1]["forward.1"].shape[0] == 0


def test_non_finite_gradients_on_one_rank_skip_the_step_on_both(two_ranks):
    for report in two_ranks[0]:
        assert report["exploding on rank 0"]["applied"] == 0.0
        assert not math.isfinite(report["exploding on rank 0"]["grad_norm"])


def test_weights_on_two_ranks_are_yielded_saved_and_replaced(models, two_ranks):
    from transformers import AutoModelForCausalLM

    reports, tensors, out = two_ranks
    expected = with_prefix(tensors[0], "published.")

    actual = with_prefix(tensors[0], "yielded.")

    assert dict(reports[0]["yielded"]) == {name: list(value.shape) for name, value in actual.items()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert reports[1]["yielded"] == []
    assert with_prefix(tensors[1], "yielded.") == {}
    saved = dict(AutoModelForCausalLM.from_pretrained(out / "hf").named_parameters())
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    original = weights_of(make_engine(str(models / "Qwen3")))
    for rank in range(2):
        assert_same_weights(with_prefix(tensors[rank], "reloaded."), original)


def test_as_served_on_two_ranks_rounds_shards_temporarily(models, two_ranks):
    engine, tensors = make_engine(str(models / "Qwen3"), serve_dtype="bfloat16"), two_ranks[1]
    weights = weights_of(engine)
    with engine.as_served():
        expected = engine.forward(make_batch(seed=1), logprobs_of)

    for rank in range(2):
        served, after = with_prefix(tensors[rank], "served."), with_prefix(tensors[rank], "unserved.")
        logprobs = served.pop(str(rank))
        torch.testing.assert_close(logprobs, expected[rank::2, : logprobs.shape[1]], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(served[name], value.bfloat16().float()) for name, value in weights.items())
        assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_save_state_on_two_ranks_resumes_on_two_ranks_and_on_one(models, two_ranks):
    reports, _, out = two_ranks
    assert reports[0]["after loading"] == reports[0]["after saving"]
    engine = make_engine(str(models / "Qwen3"))

    engine.load(SaveLoadMeta(str(out / "state"), kind="state"))

    assert engine.version == 7
    actual = engine.train_batch(make_batch(seed=1), loss_fn, loss_weight_fn)
    assert actual == pytest.approx(reports[0]["after saving"], rel=1e-5)


def test_error_on_one_rank_is_raised_on_both_in_seconds(two_ranks):
    scenarios = {
        "read_model on rank 0": "rank 0: ZeroDivisionError",
        "read_config on rank 0": "rank 0: ZeroDivisionError",
        "read_config on rank 1": "rank 1: ZeroDivisionError",
        "hub_slices on rank 0": "rank 0: ZeroDivisionError",
        "make_optimizer on rank 1": "rank 1: ZeroDivisionError",
        "another buffer": "'model.another' has shape none in the directory and (2,) in the engine",
        "a tensor missing while loading": "rank 0: KeyError: 'model.model.embed_tokens.weight'",
    }
    for report in two_ranks[0]:
        assert "rank 1" in report["too long on rank 1"]
        assert "a micro-batch holds 2" in report["too long on rank 1"]
        assert "rank 0: ModelError" in report["broken model"]
        for scenario, message in scenarios.items():
            assert message in report[scenario]
            assert report[f"{scenario}, seconds"] < 30  # the timeout of the process group is minutes


def test_bfloat16_on_two_ranks_learns_and_engines_share_the_process_group(two_ranks):
    for report in two_ranks[0]:
        losses = [step["loss"] for step in report["bfloat16"]]
        assert losses[-1] < losses[0]
        assert report["groups alive"]


# ---- invalid layouts and environments


def test_initialize_with_wrong_world_size_names_both_sizes(models):
    engine = FSDPEngine(FSDPEngineConfig(), ParallelStrategy(data=3))

    with pytest.raises(ConfigError, match="requires 3 ranks, but WORLD_SIZE is 1"):
        engine.initialize(FinetuneSpec(str(models / "Qwen3"), 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_on_one_machine_listen_only_on_loopback(models):
    script = Path(__file__).with_name("fsdp_listening_ranks.py")
    outputs = run_ranks(script, [str(models / "Qwen3")], 2)
    assert [output.splitlines()[-1] for output in outputs] == ["0100007F", "0100007F"]


def test_read_environment_with_missing_or_invalid_variable_is_rejected():
    with pytest.raises(ConfigError, match="must be integers"):
        read_environment({"WORLD_SIZE": "1", "RANK": "first", "LOCAL_RANK": "0"})
    with pytest.raises(ConfigError, match="MASTER_PORT is missing"):
        read_environment({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"})
