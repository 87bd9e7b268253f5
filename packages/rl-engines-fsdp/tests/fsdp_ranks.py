"""One rank of `test_fsdp_ranks.py`: run several scenarios and write the results to JSON and safetensors files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, weights_of
from safetensors.torch import save_file

from rl_contracts.batch.trajectory import select
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import RLError
from rl_engines_fsdp import engine as engine_module
from rl_engines_fsdp.model import loading


def sequences_of_rank(batch, parallel, empty_rank: int | None = None):
    """Return the sequences of this rank. Ranks alternate, unless one of two is empty and the other has all."""
    indices = list(range(len(batch)))
    if empty_rank is not None:
        return select(batch, [] if parallel.rank == empty_rank else indices)
    return select(batch, indices[parallel.rank :: parallel.world_size])


def error_of(call) -> str:
    try:
        call()
    except RLError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def make_engine_failing(models: Path, name: str, failing_rank: int, running_engine) -> None:
    """Create an engine; on `failing_rank`, a function of `loading` or the engine raises a ZeroDivisionError."""
    with pytest.MonkeyPatch.context() as patch:
        if running_engine.parallel.rank == failing_rank:
            patch.setattr(engine_module if hasattr(engine_module, name) else loading, name, lambda *_, **__: 1 / 0)
        make_engine(str(models / "Qwen3"))


def make_engine_with_extra_buffer(models: Path) -> None:
    """Create an engine whose model has a non-persistent buffer that the model read from the directory lacks."""
    empty_model = loading.empty_model

    def with_extra_buffer(*arguments):
        model = empty_model(*arguments)
        model.register_buffer("another", torch.zeros(2, device="meta"), persistent=False)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "empty_model", with_extra_buffer)
        make_engine(str(models / "Qwen3"))


def load_without_a_tensor(engine, models: Path) -> None:
    """Load a model, with the first tensor missing on rank 0, which sends the tensors to the other ranks."""
    read = engine._maker.read

    def without_first_tensor(*arguments, **keywords):
        source = read(*arguments, **keywords)
        if source is not None:
            tensors = source.kept_tensors()
            source.kept_tensors = lambda: tensors[1:]
        return source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._maker, "read", without_first_tensor)
        engine.load(SaveLoadMeta(str(models / "Qwen3")))


def main(models: Path, out: Path) -> None:
    report: dict = {}
    tensors: dict = {}
    for family in ("Qwen3", "Llama", "Gemma2"):
        engine = make_engine(str(models / family))
        rank = engine.parallel.rank
        report[family] = [
            engine.train_batch(sequences_of_rank(make_batch(seed=s), engine.parallel), loss_fn, loss_weight_fn)
            for s in range(3)
        ]
        tensors |= {f"{family}.{name}": value for name, value in weights_of(engine).items()}
        engine.destroy()

    engine = make_engine(str(models / "Qwen3"), sync_every_micro_batch=True, reshard_after_forward=False)
    batch = sequences_of_rank(make_batch(), engine.parallel, empty_rank=1)
    report["evaluated with an empty rank"] = engine.eval_batch(batch, loss_fn, loss_weight_fn)
    tensors[f"forward.{rank}"] = engine.forward(batch, logprobs_of)
    report["empty rank"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    tensors |= {f"empty.{name}": value for name, value in weights_of(engine).items()}

    def exploding(outputs, packed):
        return outputs.logprobs.sum() * (torch.inf if engine.parallel.rank == 0 else 1.0), {}

    batch = sequences_of_rank(make_batch(seed=1), engine.parallel)
    report["exploding on rank 0"] = engine.train_batch(batch, exploding, loss_weight_fn)

    report["yielded"] = [[spec.name, list(spec.shape)] for spec in engine.param_specs()]
    tensors |= {f"yielded.{name}": value.clone() for name, value in engine.full_parameters()}
    tensors |= {f"published.{name}": value for name, value in weights_of(engine).items()}
    engine.version = 7
    engine.forward(batch, logprobs_of)  # leaves gathered layers in the model, which must not be saved or loaded
    engine.save(SaveLoadMeta(str(out / "state"), kind="state"))
    engine.save(SaveLoadMeta(str(out / "hf")))
    report["after saving"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.load(SaveLoadMeta(str(out / "state"), kind="state"))
    report["after loading"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.forward(batch, logprobs_of)
    engine.load(SaveLoadMeta(str(models / "Qwen3")))
    tensors |= {f"reloaded.{name}": value for name, value in weights_of(engine).items()}
    engine.config.serve_dtype = "bfloat16"
    with engine.as_served():
        tensors[f"served.{rank}"] = engine.forward(batch, logprobs_of)
        tensors |= {f"served.{name}": value for name, value in weights_of(engine).items()}
    tensors |= {f"unserved.{name}": value for name, value in weights_of(engine).items()}

    # errors on one rank are raised on both
    too_long_batch = select(make_batch(), [0] if engine.parallel.rank else [0, 1])
    too_long_batch["attention_mask"][:] = True
    small_engine = make_engine(str(models / "Qwen3"), micro_batch=2 if engine.parallel.rank else 99)
    report["too long on rank 1"] = error_of(lambda: small_engine.train_batch(too_long_batch, loss_fn, loss_weight_fn))
    report["broken model"] = error_of(lambda: make_engine(str(models / "broken")))
    for scenario, call in {
        "read_model on rank 0": lambda: make_engine_failing(models, "read_model", 0, small_engine),
        "read_config on rank 0": lambda: make_engine_failing(models, "read_config", 0, small_engine),
        "read_config on rank 1": lambda: make_engine_failing(models, "read_config", 1, small_engine),
        "hub_slices on rank 0": lambda: make_engine_failing(models, "hub_slices", 0, small_engine),
        "make_optimizer on rank 1": lambda: make_engine_failing(models, "make_optimizer", 1, small_engine),
        "another buffer": lambda: make_engine_with_extra_buffer(models),
        "a tensor missing while loading": lambda: load_without_a_tensor(small_engine, models),
    }.items():
        start = time.monotonic()
        report[scenario] = error_of(call)
        report[f"{scenario}, seconds"] = time.monotonic() - start
    small_engine.destroy()  # the process group stays alive, because another engine uses it

    bfloat16_engine = make_engine(
        str(models / "Qwen3"), dtype="bfloat16", gradient_checkpointing=True, optimizer=OptimizerConfig(lr=1e-2)
    )
    report["bfloat16"] = [
        bfloat16_engine.train_batch(sequences_of_rank(make_batch(), bfloat16_engine.parallel), loss_fn, loss_weight_fn)
        for _ in range(3)
    ]
    report["groups alive"] = torch.distributed.is_initialized()
    bfloat16_engine.destroy()
    engine.destroy()
    (out / f"report-{rank}.json").write_text(json.dumps(report))
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"tensors-{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
