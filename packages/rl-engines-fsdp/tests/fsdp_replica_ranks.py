"""One rank of `test_fsdp_replicas.py`: train models whose replicas span several ranks, and write the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import torch
from fsdp_toys import (
    distance,
    logprobs_of,
    loss_fn,
    loss_weight_fn,
    make_batch,
    make_engine,
    record_gradients,
    value_loss_fn,
    weights_of,
)
from safetensors.torch import load_file

from rl_contracts.allocation import Allocation, ParallelStrategy
from rl_contracts.batch.trajectory import select
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import RLError
from rl_contracts.models import cpu_matmul
from rl_contracts.testing.processes import rank_device
from rl_contracts.weights import checksum
from rl_engines_fsdp import FSDPEngine
from rl_engines_fsdp.model import attention, checks, loading
from rl_engines_fsdp.ranks import tensor_parallel


def sequences_of_replica(batch, engine: FSDPEngine, empty_replica: int | None = None):
    """Return the sequences of this rank's replica. Replicas alternate, unless one of two is empty."""
    indices, parallel = list(range(len(batch))), engine.parallel
    if empty_replica is not None:
        return select(batch, [] if parallel.dp_rank == empty_replica else indices)
    return select(batch, indices[parallel.dp_rank :: parallel.dp_size])


def error_of(call) -> str:
    try:
        call()
    except RLError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def products_by_onednn(least: int) -> Iterator[Mock]:
    """Use oneDNN for products with at least `least` outputs, as on processors where it is the faster library."""
    with (
        patch.object(cpu_matmul, "LEAST_OUTPUTS", least),
        patch.object(cpu_matmul, "prefers_onednn", torch.backends.mkldnn.is_available),
        patch.object(cpu_matmul, "_onednn", wraps=cpu_matmul._onednn) as product,
    ):
        yield product


def start(models: Path, family: str, strategy: ParallelStrategy | None = None, **settings) -> FSDPEngine:
    """Create an engine for a family; `Value` is a critic, all others are language models."""
    return make_engine(str(models / family), strategy=strategy, head="value" if family == "Value" else "lm", **settings)


def train_with_sgd(engine: FSDPEngine, steps: int, empty_replica: int | None = None) -> tuple[list, dict, dict]:
    """Return the results of each step, the gradients of the first, and the weights after the last."""
    loss = loss_fn if engine._model.head == "lm" else value_loss_fn
    gradients, results, first_gradients = record_gradients(engine), [], {}
    for seed in range(steps):
        batch = sequences_of_replica(make_batch(seed=seed), engine, empty_replica)
        results.append(engine.train_batch(batch, loss, loss_weight_fn))
        first_gradients = first_gradients or dict(gradients)
    return results, first_gradients, weights_of(engine)


def numerics(models: Path, expected: Path, families: list[str], layout: ParallelStrategy) -> dict:
    """Compare each family with one process, relative to the gradient norm."""
    report: dict = {}
    for family in families:
        least = {"Mistral": 1, "Wide": cpu_matmul.LEAST_OUTPUTS}.get(family) if rank_device() == "cpu" else None
        with products_by_onednn(least) if least else nullcontext() as product:
            report[family] = distances(models, expected, family, layout)
            assert product is None or product.called
    return report


def distances(models: Path, expected: Path, family: str, layout: ParallelStrategy) -> dict:
    engine = start(models, family, layout, gradient_checkpointing=family == "Llama")
    one = {name: load_file(expected / f"{family}-{name}.safetensors") for name in ("gradients", "weights")}
    norm = sum(float(g.double().square().sum()) for g in one["gradients"].values()) ** 0.5
    results, gradients, weights = train_with_sgd(engine, 2)
    report = {
        "results": results,
        "gradients": distance(gradients, one["gradients"], norm),
        "weights": distance(weights, one["weights"], norm),
    }
    if layout.data > 1:
        engine.load(SaveLoadMeta(str(models / family)))
        _, gradients, _ = train_with_sgd(engine, 1, empty_replica=1)
        report["gradients with an empty replica"] = distance(gradients, one["gradients"], norm)
    engine.destroy()
    return report


def publish_save_and_load(models: Path, expected: Path, out: Path, layout: ParallelStrategy) -> dict:
    """Publish, save, load, and take steps of AdamW with clipping."""
    report: dict = {}
    engine = make_engine(str(models / "Qwen3"), strategy=layout)
    report["sums"] = {name: str(checksum(value.contiguous())) for name, value in engine.full_parameters()}
    batch_of_all = make_batch()
    report["evaluated"] = engine.eval_batch(sequences_of_replica(batch_of_all, engine), loss_fn, loss_weight_fn)
    forward = engine.forward(batch_of_all, logprobs_of)
    report["forward"] = (forward - load_file(expected / "forward.safetensors")["logprobs"]).abs().max().item()
    report["steps"] = [
        engine.train_batch(sequences_of_replica(make_batch(seed=s), engine), loss_fn, loss_weight_fn) for s in range(2)
    ]
    # must not leave gathered parameters that would be saved instead of the sharded ones
    engine.forward(batch_of_all, logprobs_of)
    engine.version = 7
    engine.save(SaveLoadMeta(str(out / "state"), kind="state"))
    engine.save(SaveLoadMeta(str(out / "hf")))
    batch = sequences_of_replica(make_batch(seed=2), engine)
    report["after saving"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.load(SaveLoadMeta(str(out / "state"), kind="state"))
    report["after loading"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.load(SaveLoadMeta(str(expected / "state"), kind="state"))
    report["after loading what one process saved"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    indices = [0, 1] if engine.parallel.is_dp_leader else [0, 2]
    report["different batches"] = error_of(
        lambda: engine.train_batch(select(batch_of_all, indices), loss_fn, loss_weight_fn)
    )
    engine.destroy()
    return report


def in_bfloat16(models: Path, layout: ParallelStrategy) -> list[dict]:
    """Take three steps on the same batch."""
    engine = make_engine(str(models / "Qwen3"), strategy=layout, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-2))
    results = [
        engine.train_batch(sequences_of_replica(make_batch(), engine), loss_fn, loss_weight_fn) for _ in range(3)
    ]
    engine.destroy()
    return results


def faults(models: Path, layout: ParallelStrategy) -> dict:
    """Return the errors of models that cannot be split, and of injected faults."""
    report = {
        name: error_of(lambda name=name: make_engine(str(models / name), strategy=layout))
        for name in ("ThreeHeads", "GPT2")
    }
    with patch.object(loading, "read_model", side_effect=AttributeError("injected")):
        report["an error of the model's own code"] = error_of(
            lambda: make_engine(str(models / "Llama"), strategy=layout)
        )
    original = checks._outputs_of
    failing_on_whole_model = lambda model, device: 1 / 0 if model.split.replica is None else original(model, device)  # noqa: E731
    with patch.object(checks, "_outputs_of", failing_on_whole_model):
        report["an error of the whole model"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
    if layout.context > 1:
        exchange, attention.exchange = attention.exchange, lambda x, group: x
        report["no exchange"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
        attention.exchange = exchange
    if layout.tensor > 1:
        sum_over, tensor_parallel.sum_over = tensor_parallel.sum_over, lambda x, group: x
        report["no sum"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
        tensor_parallel.sum_over = sum_over
        engine = make_engine(str(models / "Qwen3"), strategy=layout)
        gradients = engine._maker.tensor_gradients
        gradients._replicated |= {f"norm {index}": p for index, p in enumerate(gradients._partial)}
        gradients._partial.clear()
        report["a norm missing in the plan"] = error_of(
            lambda: engine.train_batch(sequences_of_replica(make_batch(), engine), loss_fn, loss_weight_fn)
        )
        engine.destroy()
    return report


def main(models: Path, expected: Path, out: Path, allocation: str, scenarios: str) -> None:
    layout = Allocation.parse(f"fsdp:{allocation}").component("actor").strategy
    families, *extra_scenarios = scenarios.split(";")
    # keeps the process group alive for all other engines
    base_engine = make_engine(str(models / "Llama"), strategy=layout)
    report = {"numerics": numerics(models, expected, families.split(","), layout)}
    if "weights" in extra_scenarios:
        report["weights"] = publish_save_and_load(models, expected, out, layout)
    if "bfloat16" in extra_scenarios:
        report["bfloat16"] = in_bfloat16(models, layout)
    if "faults" in extra_scenarios:
        report["faults"] = faults(models, layout)
    rank = base_engine.parallel.rank
    report["replicas"] = [base_engine.parallel.dp_rank, base_engine.parallel.dp_size, base_engine.parallel.is_dp_leader]
    base_engine.destroy()
    (out / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:6])
