"""Mixtures of experts: what a Hugging Face config says of them, and over how many ranks they lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family calls what its mixtures have, in Hugging Face configs and checkpoints."""

    block: str
    """The module of a layer that holds router and experts."""
    gate: str
    up: str
    down: str
    count: str
    """Setting: experts of a layer."""
    width: str
    """Setting: width of an expert."""


MIXTURES = {
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", "moe_intermediate_size"),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", "intermediate_size"),
}
"""By `model_type`. A router chooses by softmax; experts are gated MLPs without bias, and none is shared."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a decoder."""

    names: ExpertNames
    experts: int
    """Of each layer that has any."""
    chosen: int
    """Experts that a token is sent to."""
    width: int
    """Of an expert, of its gate and of its up projection each."""
    normalised: bool
    """Whether the weights of the chosen ones are scaled to a sum of 1."""
    layers: frozenset[int]
    """Which have experts; the others have an MLP."""
    balance: float
    """Factor of the auxiliary loss of the routers; 0: there is none."""

    @classmethod
    def from_hugging_face(cls, config: Any) -> Mixture | None:
        """Read a transformers config, or what its file says; None of a model whose layers are all dense.

        Raises:
            ModelError: a window, or numbers that are none.
        """
        names = MIXTURES.get(config.model_type)
        if names is None:
            return None
        if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) is not None:
            raise ModelError(f"megatron: sliding_window={config.sliding_window} is not supported; use fsdp for it.")
        experts, chosen, width = (getattr(config, name, None) for name in (names.count, CHOSEN, names.width))
        if not (isinstance(experts, int) and isinstance(chosen, int) and isinstance(width, int)):
            raise ModelError(f"megatron: expected numbers for {names.count}, {CHOSEN} and {names.width} in the config.")
        step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
        layers = frozenset(n for n in range(config.num_hidden_layers) if n not in dense and (n + 1) % step == 0)
        if not layers:
            return None
        asked = getattr(config, "output_router_logits", False)
        return cls(
            names,
            experts,
            chosen,
            width,
            normalised=bool(getattr(config, "norm_topk_prob", True)),
            layers=layers,
            balance=float(getattr(config, "router_aux_loss_coef", None) or 0.0) if asked else 0.0,
        )


CHOSEN = "num_experts_per_tok"


def check_experts(path: str, strategy: ParallelStrategy, sequence_parallel: bool) -> None:
    """Refuse a layout that does not go with the experts of a model, where its `config.json` is there to be read.

    Raises:
        ConfigError: names both, and what to set instead.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        return
    said = json.loads(file.read_text())
    if not isinstance(said, dict) or "model_type" not in said:
        return
    said.setdefault("num_experts", said.get("num_local_experts"))
    mixture, e, etp = Mixture.from_hugging_face(SimpleNamespace(**said)), strategy.expert, expert_tensor(strategy)
    where, stage = f"allocation megatron:{strategy} with model {path}", strategy.tensor * strategy.context
    if mixture is None:  # `Partition` rejects expert ranks, once its family is known
        return
    count, width = f"{mixture.names.count}={mixture.experts}", f"{mixture.names.width}={mixture.width}"
    for wrong, reason in (
        (mixture.experts % e, f"e={e} does not divide {count}; choose an e that does"),
        (mixture.width % etp, f"{etp} ranks for each expert do not divide {width}; choose another t of ffn"),
        (
            strategy.tensor > 1 and not sequence_parallel,
            f"t={strategy.tensor} with experts needs sequence_parallel=true of the engine, so that each token is sent "
            "to its experts once; set it, or t to 1",
        ),
        (
            etp > 1 and e == 1 and not sequence_parallel,
            f"{etp} ranks for each expert need an e above 1, or t above 1 with sequence_parallel=true; choose one of "
            "these, or leave the t of ffn out",
        ),
        (
            strategy.pipeline > 1 and e * etp != stage,
            f"with p={strategy.pipeline} experts lie over the ranks of one replica, but e={e} times {etp} ranks for "
            f"each expert are not its t * c = {stage}; choose e so, or p=1",
        ),
        (
            strategy.pipeline > 1 and mixture.balance,
            f"p={strategy.pipeline} does not go with output_router_logits=true in config.json: the auxiliary loss is "
            "one of all layers; set one of p=1 and output_router_logits=false",
        ),
    ):
        if wrong:
            raise ConfigError(f"{where}: {reason}.")


def expert_tensor(strategy: ParallelStrategy) -> int:
    """Ranks over which each matrix of an expert is split: the t of `ffn`, where it is written; else t / e, where e
    divides t, so that experts fill the tensor ranks; else 1."""
    if strategy.expert_tensor is not None:
        return strategy.expert_tensor
    return strategy.tensor // strategy.expert if strategy.tensor % strategy.expert == 0 else 1
