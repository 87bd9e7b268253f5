"""Replicas on several real processes against one process: tensor and context parallelism."""

import json
from pathlib import Path

import pytest
import torch
from fsdp_replica_ranks import start, train_with_sgd
from fsdp_toys import (
    logprobs_of,
    loss_fn,
    loss_weight_fn,
    make_batch,
    make_classifier,
    make_engine,
    make_model,
    weights_of,
)
from safetensors.torch import save_file

from rl_contracts.data import SaveLoadMeta
from rl_contracts.testing.families import VARIANTS, make_family
from rl_contracts.testing.processes import run_ranks
from rl_contracts.weights import checksum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # what ranks compute is charged to a layout's first test
FAMILIES = ("Llama", "Qwen3", "Gemma2", "Mistral", "OneKeyHead", "Value", "Wide", "Longrope", "Dynamic")
BOUND = 5e-5
"""Difference to one process, relative to the norm of the gradient."""
LAYOUTS = {
    # two processes
    "c2": (2, "Llama,Qwen3,Gemma2,Mistral,OneKeyHead,Value,Longrope,Dynamic;weights;bfloat16;faults"),
    "t2": (2, "Llama,Qwen3,Gemma2,Mistral,Value,Wide;weights;bfloat16;faults"),
    # four
    "d2t2": (4, "Qwen3;weights"),
    "d2c2": (4, "Qwen3"),
    "c2t2": (4, "Qwen3,Gemma2"),
}


MARKS = {name: [pytest.mark.nightly] for name, (ranks, _) in LAYOUTS.items() if ranks > 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for family in ("Llama", "Qwen3", "Gemma2", "Mistral"):
        make_model(directory / family, family)
    make_family(directory / "Longrope", "phi3")
    _, dynamic = VARIANTS["llama, dynamic rope"]
    make_family(directory / "Dynamic", "llama", **dynamic)
    make_model(directory / "OneKeyHead", "Llama", num_key_value_heads=1)
    make_model(directory / "ThreeHeads", "Llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    # wide enough for oneDNN, on each of two ranks
    make_model(directory / "Wide", "Llama", hidden_size=256, intermediate_size=512, num_attention_heads=8)
    make_model(directory / "GPT2", "GPT2")
    make_classifier(directory / "Value", "Qwen3")
    return directory


@pytest.fixture(scope="module")
def one(models, tmp_path_factory):
    """What one process computes."""
    out = tmp_path_factory.mktemp("one")
    results: dict = {}
    for family in FAMILIES:
        results[family], gradients, weights = train_with_sgd(start(models, family), 2)
        save_file(gradients, out / f"{family}-gradients.safetensors")
        save_file(weights, out / f"{family}-weights.safetensors")
    engine = make_engine(str(models / "Qwen3"))
    results["sums"] = {name: str(checksum(value.contiguous())) for name, value in engine.full_parameters()}
    results["evaluated"] = engine.eval_batch(make_batch(), loss_fn, loss_weight_fn)
    save_file({"logprobs": engine.forward(make_batch(), logprobs_of)}, out / "forward.safetensors")
    results["steps"] = [engine.train_batch(make_batch(seed=s), loss_fn, loss_weight_fn) for s in range(2)]
    engine.save(SaveLoadMeta(str(out / "state"), kind="state"))
    results["last weights"] = weights_of(engine)
    results["third"] = engine.train_batch(make_batch(seed=2), loss_fn, loss_weight_fn)
    return results, out


@pytest.fixture(scope="module", params=[pytest.param(n, marks=[pytest.mark.slow, *MARKS.get(n, [])]) for n in LAYOUTS])
def split(request, models, one, tmp_path_factory):
    """What each rank of a layout saw."""
    ranks, scenes = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(request.param)
    arguments = [str(models), str(one[1]), str(out), request.param, scenes]
    run_ranks(Path(__file__).with_name("fsdp_replica_ranks.py"), arguments, ranks)
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(ranks)], out


def test_train_batch_over_split_replicas_has_the_gradients_and_weights_of_one_process(split, one):
    for seen in split[0]:
        for family, found in seen["numerics"].items():
            for step, expected in zip(found["results"], one[0][family], strict=True):
                assert step == pytest.approx(expected, rel=BOUND, abs=1e-6)
            for what, difference in found.items():
                if what != "results":
                    assert difference < BOUND, f"{family}: {what}"


def test_train_batch_over_split_replicas_gives_every_rank_the_same_results(split):
    first, *others = split[0]
    for seen in others:
        assert [f["results"] for f in seen["numerics"].values()] == [f["results"] for f in first["numerics"].values()]


def test_parallel_context_counts_replicas(split):
    seen, out = split
    data = 2 if len(seen) == 4 and "d2" in out.name else 1
    size = len(seen) // data
    assert [rank["replicas"] for rank in seen] == [[r // size, data, r % size == 0] for r in range(len(seen))]


def weights_of_split(split) -> list[dict]:
    if "weights" not in split[0][0]:
        pytest.skip("this layout runs the numerics only")
    return [seen["weights"] for seen in split[0]]


def test_full_parameters_over_split_replicas_are_those_of_one_process_and_come_on_rank_0(split, one):
    first, *others = weights_of_split(split)

    assert first["sums"] == one[0]["sums"]
    assert all(seen["sums"] == {} for seen in others)


def test_eval_and_forward_over_split_replicas_give_whole_rows_as_one_process(split, one):
    for seen in weights_of_split(split):
        assert seen["evaluated"] == pytest.approx(one[0]["evaluated"], rel=BOUND)
        assert seen["forward"] < 1e-5


def test_train_batch_over_split_replicas_clips_by_the_norm_of_one_process(split, one):
    for seen in weights_of_split(split):
        for found, expected in zip(seen["steps"], one[0]["steps"], strict=True):
            assert found == pytest.approx(expected, rel=BOUND, abs=1e-6)


def test_state_of_split_replicas_continues_exactly_there_and_on_one_process(split, one, models):
    for seen in weights_of_split(split):
        assert seen["after loading"] == seen["after saving"]
        assert seen["after loading what one process saved"] == pytest.approx(one[0]["third"], rel=BOUND, abs=1e-6)
    engine = make_engine(str(models / "Qwen3"))

    engine.load(SaveLoadMeta(str(split[1] / "state"), kind="state"))

    assert engine.version == 7
    found = engine.train_batch(make_batch(seed=2), loss_fn, loss_weight_fn)
    assert found == pytest.approx(seen["after saving"], rel=BOUND, abs=1e-6)


def test_save_hf_over_split_replicas_holds_the_weights_of_one_process(split, one):
    from transformers import AutoModelForCausalLM

    weights_of_split(split)

    loaded = dict(AutoModelForCausalLM.from_pretrained(split[1] / "hf").named_parameters())

    for name, value in one[0]["last weights"].items():
        torch.testing.assert_close(loaded[name], value, atol=3e-6, rtol=1e-5)


def test_bfloat16_over_split_replicas_learns(split):
    if "bfloat16" not in split[0][0]:
        pytest.skip("this layout runs in float32 only")
    for seen in split[0]:
        losses = [step["loss"] for step in seen["bfloat16"]]
        assert losses[-1] < losses[0]


def test_train_batch_with_other_rows_on_ranks_of_one_replica_is_refused(split):
    for seen in weights_of_split(split):
        assert "parallel.dp_rank" in seen["other rows"]


def test_models_and_faults_that_cannot_be_split_are_refused_on_every_rank(split):
    if "faults" not in split[0][0]:
        pytest.skip("this layout runs the numerics only")
    tensor = "t2" in split[1].name
    for seen in split[0]:
        found = seen["faults"]
        assert "expected attention heads that divide by tensor * context = 2, found 3" in found["ThreeHeads"]
        assert "rank 0: AttributeError: no such part" in found["an error of the model's own code"]
        assert "rank 0: ZeroDivisionError" in found["an error of the whole model"]
        if tensor:
            assert "transformers has none for this model" in found["GPT2"]
            assert "differ by" in found["no sum"]
            assert "the plan" not in found["no sum"] or "fit?" in found["no sum"]
            assert "sees part of the heads" in found["a norm that the plan forgot"]
        else:
            assert found["GPT2"] == "no error"
            assert "differ by" in found["no exchange"]
