"""On each rank: what a model says of a batch, and the gradients of a step, with one of several losses.

Arguments: a model, and as JSON the layout, settings and losses; where they go; a model that is in the same process
beside (empty: none).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.conformance.train_engine import trained_tokens
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.testing import make_batch
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig

RATE = 1024.0
"""What a weight moves by it is its gradient, and rounding of the weight is little."""
HEADS = ("value", "score")


def squares(outputs, packed):
    return (outputs.values - 1.0)[packed["loss_mask"]].square().sum(), {}


def with_entropy(outputs, packed):
    return -(outputs.logprobs + 0.5 * outputs.entropy)[packed["loss_mask"]].sum(), {}


def nothing(outputs, packed):
    """Of a mixture that has an auxiliary loss, so that it is all there is."""
    return outputs.logprobs.sum() * 0.0, {}


LOSSES = {"value": squares, "score": squares, "entropy": with_entropy, "balance": nothing}


def started(model: str, layout: dict, settings: dict, loss: str) -> MegatronEngine:
    engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(**layout))
    optimizer = OptimizerConfig(name="sgd", lr=RATE, weight_decay=0.0, max_grad_norm=0.0)
    micro_batch, head = MicroBatchConfig(64), loss if loss in HEADS else "lm"
    entropy_grad = loss == "entropy"
    engine.initialize(
        FinetuneSpec(model, 1, 0, optimizer, micro_batch, head=head, entropy_grad=entropy_grad, device="cpu")
    )
    return engine


def said(engine: MegatronEngine, batch: Any) -> Tensor:
    return engine.forward(batch, lambda outputs, _: outputs.logprobs if outputs.values is None else outputs.values)


def step(model: str, layout: dict, settings: dict, loss: str, state: str = "") -> tuple[dict[str, Tensor], Tensor]:
    """This rank's gradients by name, and `loss/aux` among them; and what the model says of this replica's rows.

    Args:
        state: where its state is saved after the step, for another engine, which then says the same.
    """
    engine = started(model, layout, settings, loss)
    batch = shard_batch(make_batch(8, seed=3), engine.parallel)
    before, values = {name: tensor.clone() for name, tensor in engine.full_parameters()}, said(engine, batch)
    figures = engine.train_batch(batch, LOSSES[loss], trained_tokens)
    found = {name: (before[name] - tensor) / RATE for name, tensor in engine.full_parameters()}
    if state:
        engine.save(SaveLoadMeta(state, "state"))
        moved = said(engine, batch)
        engine.destroy()
        engine = started(model, layout, settings, loss)
        engine.load(SaveLoadMeta(state, "state"))
        assert torch.equal(said(engine, batch), moved)
    engine.destroy()
    return found | {"loss/aux": torch.tensor(figures.get("loss/aux", 0.0))}, values


def main(model: str, layout: dict, settings: dict, losses: list[str], out: Path, beside: str) -> None:
    other = started(beside, layout, settings, "lm") if beside else None
    for loss in losses:
        found, values = step(model, layout, settings, loss, str(out / f"state-{loss}"))
        save_file(found | {"said": values}, out / f"{loss}-{os.environ['RANK']}.safetensors")
    if other is not None:
        other.train_batch(make_batch(8, seed=3), LOSSES["entropy"], trained_tokens)
        other.destroy()


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6])
