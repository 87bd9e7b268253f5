"""Tensor and context parallelism over several processes, compared with one process."""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test of a layout includes the time of its ranks
FAMILIES = ("Llama", "Qwen3", "Gemma2", "Mistral", "OneKeyHead", "Value", "Wide", "Longrope", "Dynamic")
BOUND = 5e-5
"""Largest difference from one process, relative to the gradient norm."""
LAYOUTS = {
    # two processes
    "c2": (2, "Llama,Qwen3,Gemma2,Mistral,OneKeyHead,Value,Longrope,Dynamic;weights;bfloat16;faults"),
    "t2": (2, "Llama,Qwen3,Gemma2,Mistral,Value,Wide;weights;bfloat16;faults"),
    # four processes
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
    # wide enough for oneDNN on each of two ranks
    make_model(directory / "Wide", "Llama", hidden_size=256, intermediate_size=512, num_attention_heads=8)
    make_model(directory / "GPT2", "GPT2")
    make_classifier(directory / "Value", "Qwen3")
    return directory


@pytest.fixture(scope="module")
def one_process(device, models, tmp_path_factory):
    """Return the results of one process."""
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
def split(request, models, one_process, tmp_path_factory):
    """Return the reports of all ranks of a layout, and their output directory."""
    ranks, scenarios = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(request.param)
    arguments = [str(models), str(one_process[1]), str(out), request.param, scenarios]
    run_ranks(Path(__file__).with_name("fsdp_replica_ranks.py"), arguments, ranks)
    return [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(ranks)], out


@pytest.mark.guarantee("A step over tensor- or context-parallel ranks equals a step in one process.", area="layout")
def test_train_batch_over_split_replicas_equals_one_process(split, one_process):
    first = split[0][0]
    for report in split[0]:
        assert [f["results"] for f in report["numerics"].values()] == [f["results"] for f in first["numerics"].values()]
        for family, family_report in report["numerics"].items():
            for step, expected in zip(family_report["results"], one_process[0][family], strict=True):
                assert step == pytest.approx(expected, rel=BOUND, abs=1e-6)
            for quantity, difference in family_report.items():
                if quantity != "results":
                    assert difference < BOUND, f"{family}: {quantity}"


def test_parallel_context_counts_replicas(split):
    reports, out = split
    data = 2 if len(reports) == 4 and "d2" in out.name else 1
    size = len(reports) // data
    assert [rank["replicas"] for rank in reports] == [[r // size, data, r % size == 0] for r in range(len(reports))]


def weights_reports(split) -> list[dict]:
    if "weights" not in split[0][0]:
        pytest.skip("this layout runs only the numerics")
    return [report["weights"] for report in split[0]]


def test_evaluation_and_exports_of_split_replicas_equal_one_process(split, one_process):
    from transformers import AutoModelForCausalLM

    first, *other_reports = weights_reports(split)

    assert first["sums"] == one_process[0]["sums"]
    assert all(report["sums"] == {} for report in other_reports)
    loaded = dict(AutoModelForCausalLM.from_pretrained(split[1] / "hf").named_parameters())
    for name, value in one_process[0]["last weights"].items():
        torch.testing.assert_close(loaded[name], value, atol=3e-6, rtol=1e-5)
    for report in (first, *other_reports):
        assert report["evaluated"] == pytest.approx(one_process[0]["evaluated"], rel=BOUND)
        assert report["forward"] < 1e-5
        for actual, expected in zip(report["steps"], one_process[0]["steps"], strict=True):
            assert actual == pytest.approx(expected, rel=BOUND, abs=1e-6)


def test_state_of_split_replicas_resumes_there_and_on_one_process(split, one_process, models):
    for report in weights_reports(split):
        assert report["after loading"] == report["after saving"]
        assert report["after loading what one process saved"] == pytest.approx(
            one_process[0]["third"], rel=BOUND, abs=1e-6
        )
    engine = make_engine(str(models / "Qwen3"))

    engine.load(SaveLoadMeta(str(split[1] / "state"), kind="state"))

    assert engine.version == 7
    actual = engine.train_batch(make_batch(seed=2), loss_fn, loss_weight_fn)
    assert actual == pytest.approx(report["after saving"], rel=BOUND, abs=1e-6)


def test_bfloat16_over_split_replicas_learns(split):
    if "bfloat16" not in split[0][0]:
        pytest.skip("this layout runs only in float32")
    for report in split[0]:
        losses = [step["loss"] for step in report["bfloat16"]]
        assert losses[-1] < losses[0]


def test_train_batch_with_different_batches_in_replica_is_rejected(split):
    for report in weights_reports(split):
        assert "parallel.dp_rank" in report["different batches"]


def test_unsplittable_models_and_faults_are_rejected_on_every_rank(split):
    if "faults" not in split[0][0]:
        pytest.skip("this layout runs only the numerics")
    is_tensor_parallel = "t2" in split[1].name
    for report in split[0]:
        errors = report["faults"]
        assert "3 attention heads of the model must be divisible by t * c = 2" in errors["ThreeHeads"]
        assert "rank 0: AttributeError: injected" in errors["an error of the model's own code"]
        assert "rank 0: ZeroDivisionError" in errors["an error of the whole model"]
        if is_tensor_parallel:
            assert "has no tensor-parallel plan" in errors["GPT2"]
            assert "differ by" in errors["no sum"]
            assert "plan" not in errors["no sum"] or "may be wrong" in errors["no sum"]
            assert "plan of this model in transformers is incomplete" in errors["a norm missing in the plan"]
        else:
            assert errors["GPT2"] == "no error"
            assert "differ by" in errors["no exchange"]
