"""One rank of `test_fsdp_ranks.py`: runs a few scenes and writes what it saw to a JSON or safetensors file."""

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


def rows_of(batch, parallel, empty_rank: int | None = None):
    """Rows of this rank: every other one, or all of them on the rank that is not empty."""
    rows = list(range(len(batch)))
    if empty_rank is not None:
        return select(batch, [] if parallel.rank == empty_rank else rows)
    return select(batch, rows[parallel.rank :: parallel.world_size])


def error_of(call) -> str:
    try:
        call()
    except RLError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def make_engine_failing(models: Path, name: str, where: int, beside) -> None:
    """An engine whose rank `where` meets an error of no kind of ours in a function of `loading` or of the engine."""
    with pytest.MonkeyPatch.context() as patch:
        if beside.parallel.rank == where:
            patch.setattr(engine_module if hasattr(engine_module, name) else loading, name, lambda *_, **__: 1 / 0)
        make_engine(str(models / "Qwen3"))


def make_engine_with_another_buffer(models: Path) -> None:
    """An engine whose model has a buffer, which no directory holds, that the one which is read has not."""
    empty_model = loading.empty_model

    def with_another(*arguments):
        model = empty_model(*arguments)
        model.register_buffer("another", torch.zeros(2, device="meta"), persistent=False)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "empty_model", with_another)
        make_engine(str(models / "Qwen3"))


def load_without_a_tensor(engine, models: Path) -> None:
    """Rank 0 misses the first of the tensors that it is to give to the others."""
    read = engine._maker.read

    def without_one(*arguments, **keywords):
        source = read(*arguments, **keywords)
        if source is not None:
            kept = source.kept_tensors()
            source.kept_tensors = lambda: kept[1:]
        return source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._maker, "read", without_one)
        engine.load(SaveLoadMeta(str(models / "Qwen3")))


def main(models: Path, out: Path) -> None:
    seen: dict = {}
    tensors: dict = {}
    for family in ("Qwen3", "Llama", "Gemma2"):
        engine = make_engine(str(models / family))
        rank = engine.parallel.rank
        seen[family] = [
            engine.train_batch(rows_of(make_batch(seed=s), engine.parallel), loss_fn, loss_weight_fn) for s in range(3)
        ]
        tensors |= {f"{family}.{name}": value for name, value in weights_of(engine).items()}
        engine.destroy()

    engine = make_engine(str(models / "Qwen3"), sync_every_micro_batch=True, reshard_after_forward=False)
    batch = rows_of(make_batch(), engine.parallel, empty_rank=1)
    seen["evaluated with an empty rank"] = engine.eval_batch(batch, loss_fn, loss_weight_fn)
    tensors[f"forward.{rank}"] = engine.forward(batch, logprobs_of)
    seen["empty rank"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    tensors |= {f"empty.{name}": value for name, value in weights_of(engine).items()}

    def exploding(outputs, packed):
        return outputs.logprobs.sum() * (torch.inf if engine.parallel.rank == 0 else 1.0), {}

    batch = rows_of(make_batch(seed=1), engine.parallel)
    seen["exploding on rank 0"] = engine.train_batch(batch, exploding, loss_weight_fn)

    seen["yielded"] = [[spec.name, list(spec.shape)] for spec in engine.param_specs()]
    tensors |= {f"yielded.{name}": value.clone() for name, value in engine.full_parameters()}
    tensors |= {f"published.{name}": value for name, value in weights_of(engine).items()}
    engine.version = 7
    engine.forward(batch, logprobs_of)  # leaves gathered layers behind, which are not what is saved or loaded
    engine.save(SaveLoadMeta(str(out / "state"), kind="state"))
    engine.save(SaveLoadMeta(str(out / "hf")))
    seen["after saving"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.load(SaveLoadMeta(str(out / "state"), kind="state"))
    seen["after loading"] = engine.train_batch(batch, loss_fn, loss_weight_fn)
    engine.forward(batch, logprobs_of)
    engine.load(SaveLoadMeta(str(models / "Qwen3")))
    tensors |= {f"reloaded.{name}": value for name, value in weights_of(engine).items()}
    engine.config.serve_dtype = "bfloat16"
    with engine.as_served():
        tensors[f"served.{rank}"] = engine.forward(batch, logprobs_of)
        tensors |= {f"served.{name}": value for name, value in weights_of(engine).items()}
    tensors |= {f"unserved.{name}": value for name, value in weights_of(engine).items()}

    # errors on one rank reach both
    crowded = select(make_batch(), [0] if engine.parallel.rank else [0, 1])
    crowded["attention_mask"][:] = True
    small = make_engine(str(models / "Qwen3"), micro_batch=2 if engine.parallel.rank else 99)
    seen["too long on rank 1"] = error_of(lambda: small.train_batch(crowded, loss_fn, loss_weight_fn))
    seen["nothing there"] = error_of(lambda: make_engine(str(models / "broken")))
    for doing, call in {
        "read_model on rank 0": lambda: make_engine_failing(models, "read_model", 0, small),
        "read_config on rank 0": lambda: make_engine_failing(models, "read_config", 0, small),
        "read_config on rank 1": lambda: make_engine_failing(models, "read_config", 1, small),
        "hub_slices on rank 0": lambda: make_engine_failing(models, "hub_slices", 0, small),
        "make_optimizer on rank 1": lambda: make_engine_failing(models, "make_optimizer", 1, small),
        "another buffer": lambda: make_engine_with_another_buffer(models),
        "a tensor missing while loading": lambda: load_without_a_tensor(small, models),
    }.items():
        began = time.monotonic()
        seen[doing] = error_of(call)
        seen[f"{doing}, seconds"] = time.monotonic() - began
    small.destroy()  # the group goes on: another engine uses it

    half = make_engine(
        str(models / "Qwen3"), dtype="bfloat16", gradient_checkpointing=True, optimizer=OptimizerConfig(lr=1e-2)
    )
    seen["bfloat16"] = [
        half.train_batch(rows_of(make_batch(), half.parallel), loss_fn, loss_weight_fn) for _ in range(3)
    ]
    seen["groups alive"] = torch.distributed.is_initialized()
    half.destroy()
    engine.destroy()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"tensors-{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
