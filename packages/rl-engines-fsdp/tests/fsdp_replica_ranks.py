"""One rank of `test_fsdp_replicas.py`: trains models whose replicas lie on several ranks and writes what it saw."""

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
from rl_contracts.weights import checksum
from rl_engines_fsdp import FSDPEngine
from rl_engines_fsdp.model import attention, checks, loading
from rl_engines_fsdp.ranks import tensor_parallel


def rows_of(batch, engine: FSDPEngine, empty_replica: int | None = None):
    """Rows of this rank's replica: every other one, or all of them on the replica that is not empty."""
    rows, parallel = list(range(len(batch))), engine.parallel
    if empty_replica is not None:
        return select(batch, [] if parallel.dp_rank == empty_replica else rows)
    return select(batch, rows[parallel.dp_rank :: parallel.dp_size])


def error_of(call) -> str:
    try:
        call()
    except RLError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def products_by_onednn(least: int) -> Iterator[Mock]:
    """As on processors where it is the faster library; `least` entries of a product from which on it is taken."""
    with (
        patch.object(cpu_matmul, "LEAST_OUTPUTS", least),
        patch.object(cpu_matmul, "prefers_onednn", torch.backends.mkldnn.is_available),
        patch.object(cpu_matmul, "_onednn", wraps=cpu_matmul._onednn) as product,
    ):
        yield product


def start(models: Path, family: str, strategy: ParallelStrategy | None = None, **settings) -> FSDPEngine:
    """An engine for one of the families; `Value` is a critic, the others are language models."""
    return make_engine(str(models / family), strategy=strategy, head="value" if family == "Value" else "lm", **settings)


def train_with_sgd(engine: FSDPEngine, steps: int, empty_replica: int | None = None) -> tuple[list, dict, dict]:
    """Results of each step, the gradients of the first, and the weights after the last."""
    loss = loss_fn if engine._model.head == "lm" else value_loss_fn
    found, results, first = record_gradients(engine), [], {}
    for seed in range(steps):
        batch = rows_of(make_batch(seed=seed), engine, empty_replica)
        results.append(engine.train_batch(batch, loss, loss_weight_fn))
        first = first or dict(found)
    return results, first, weights_of(engine)


def numerics(models: Path, expected: Path, families: list[str], layout: ParallelStrategy) -> dict:
    """How far each family is from one process, relative to the norm of the gradient."""
    seen: dict = {}
    for family in families:
        least = {"Mistral": 1, "Wide": cpu_matmul.LEAST_OUTPUTS}.get(family)
        with products_by_onednn(least) if least else nullcontext() as product:
            seen[family] = distances(models, expected, family, layout)
            assert product is None or product.called
    return seen


def distances(models: Path, expected: Path, family: str, layout: ParallelStrategy) -> dict:
    engine = start(models, family, layout, gradient_checkpointing=family == "Llama")
    one = {name: load_file(expected / f"{family}-{name}.safetensors") for name in ("gradients", "weights")}
    norm = sum(float(g.double().square().sum()) for g in one["gradients"].values()) ** 0.5
    results, gradients, weights = train_with_sgd(engine, 2)
    seen = {
        "results": results,
        "gradients": distance(gradients, one["gradients"], norm),
        "weights": distance(weights, one["weights"], norm),
    }
    if layout.data > 1:
        engine.load(SaveLoadMeta(str(models / family)))
        _, gradients, _ = train_with_sgd(engine, 1, empty_replica=1)
        seen["gradients with an empty replica"] = distance(gradients, one["gradients"], norm)
    engine.destroy()
    return seen


def weights_out_and_in(models: Path, expected: Path, out: Path, layout: ParallelStrategy) -> dict:
    """Publishing, saving, loading, and steps of AdamW with clipping."""
    seen: dict = {}
    engine = make_engine(str(models / "Qwen3"), strategy=layout)
    seen["sums"] = {name: str(checksum(value.contiguous())) for name, value in engine.full_parameters()}
    whole = make_batch()
    seen["evaluated"] = engine.eval_batch(rows_of(whole, engine), loss_fn, loss_weight_fn)
    forward = engine.forward(whole, logprobs_of)
    seen["forward"] = (forward - load_file(expected / "forward.safetensors")["logprobs"]).abs().max().item()
    seen["steps"] = [engine.train_batch(rows_of(make_batch(seed=s), engine), loss_fn, loss_weight_fn) for s in range(2)]
    engine.forward(whole, logprobs_of)  # leaves nothing behind that saving could take for the model's parameters
    engine.version = 7
    engine.save(SaveLoadMeta(str(out / "state"), kind="state"))
    engine.save(SaveLoadMeta(str(out / "hf")))
    batch = rows_of(make_batch(seed=2), engine)
    seen["after saving"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.load(SaveLoadMeta(str(out / "state"), kind="state"))
    seen["after loading"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.load(SaveLoadMeta(str(expected / "state"), kind="state"))
    seen["after loading what one process saved"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    rows = [0, 1] if engine.parallel.is_dp_leader else [0, 2]
    seen["other rows"] = error_of(lambda: engine.train_batch(select(whole, rows), loss_fn, loss_weight_fn))
    engine.destroy()
    return seen


def in_bfloat16(models: Path, layout: ParallelStrategy) -> list[dict]:
    """Three steps on the same batch."""
    engine = make_engine(str(models / "Qwen3"), strategy=layout, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-2))
    results = [engine.train_batch(rows_of(make_batch(), engine), loss_fn, loss_weight_fn) for _ in range(3)]
    engine.destroy()
    return results


def faults(models: Path, layout: ParallelStrategy) -> dict:
    """What is said of a model that cannot be split, and of planted faults."""
    seen = {
        name: error_of(lambda name=name: make_engine(str(models / name), strategy=layout))
        for name in ("ThreeHeads", "GPT2")
    }
    with patch.object(loading, "read_model", side_effect=AttributeError("no such part")):
        seen["an error of the model's own code"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
    said = checks._outputs_of
    of_split = lambda model, device: 1 / 0 if model.split.replica is None else said(model, device)  # noqa: E731
    with patch.object(checks, "_outputs_of", of_split):
        seen["an error of the whole model"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
    if layout.context > 1:
        exchange, attention.exchange = attention.exchange, lambda x, group: x
        seen["no exchange"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
        attention.exchange = exchange
    if layout.tensor > 1:
        sum_over, tensor_parallel.sum_over = tensor_parallel.sum_over, lambda x, group: x
        seen["no sum"] = error_of(lambda: make_engine(str(models / "Llama"), strategy=layout))
        tensor_parallel.sum_over = sum_over
        engine = make_engine(str(models / "Qwen3"), strategy=layout)
        gradients = engine._maker.tensor_gradients
        gradients._alike |= {f"norm {index}": p for index, p in enumerate(gradients._partial)}
        gradients._partial.clear()
        seen["a norm that the plan forgot"] = error_of(
            lambda: engine.train_batch(rows_of(make_batch(), engine), loss_fn, loss_weight_fn)
        )
        engine.destroy()
    return seen


def main(models: Path, expected: Path, out: Path, allocation: str, scenes: str) -> None:
    layout = Allocation.parse(f"fsdp:{allocation}").component("actor").strategy
    families, *others = scenes.split(";")
    keep = make_engine(str(models / "Llama"), strategy=layout)  # its group lives on, so that the others need not meet
    seen = {"numerics": numerics(models, expected, families.split(","), layout)}
    if "weights" in others:
        seen["weights"] = weights_out_and_in(models, expected, out, layout)
    if "bfloat16" in others:
        seen["bfloat16"] = in_bfloat16(models, layout)
    if "faults" in others:
        seen["faults"] = faults(models, layout)
    rank = keep.parallel.rank
    seen["replicas"] = [keep.parallel.dp_rank, keep.parallel.dp_size, keep.parallel.is_dp_leader]
    keep.destroy()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:6])
