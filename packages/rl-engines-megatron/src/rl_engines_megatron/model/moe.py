"""Mixture of experts (MoE): sizes in a Hugging Face config, and the ranks that hold the experts."""

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
    """Names that a family uses for its experts in Hugging Face configs and checkpoints."""

    block: str
    """Module of a layer that holds router and experts."""
    gate: str
    up: str
    down: str
    count: str
    """Config attribute: number of experts of a layer."""
    width: str
    """Config attribute: width of an expert."""


MIXTURES = {
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", "moe_intermediate_size"),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", "intermediate_size"),
}
"""Names by `model_type`. Routers use softmax; experts are gated MLPs without bias, and no expert is shared."""


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Experts of a decoder."""

    names: ExpertNames
    experts: int
    """Number of experts of an MoE layer."""
    chosen: int
    """Number of experts that a token is sent to."""
    width: int
    """Width of the gate and of the up projection of an expert, each."""
    normalized: bool
    """True if the weights of the chosen experts are scaled to a sum of 1."""
    layers: frozenset[int]
    """Numbers of the layers that have experts; the others have an MLP."""
    balance: float
    """Coefficient of the auxiliary loss of the routers; 0 disables it."""

    @classmethod
    def from_hugging_face(cls, config: Any) -> MoESpec | None:
        """Create a `MoESpec` from a transformers config, or return None for a dense model.

        Args:
            config: a transformers config, or an object with its attributes.

        Raises:
            ModelError: the config has a sliding window, or sizes that are not numbers.
        """
        names = MIXTURES.get(config.model_type)
        if names is None:
            return None
        if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) is not None:
            raise ModelError(
                f"megatron: sliding_window={config.sliding_window} is not supported for MoE models; use fsdp."
            )
        experts, chosen, width = (getattr(config, name, None) for name in (names.count, CHOSEN, names.width))
        if not (isinstance(experts, int) and isinstance(chosen, int) and isinstance(width, int)):
            raise ModelError(f"megatron: expected numbers for {names.count}, {CHOSEN} and {names.width} in the config.")
        step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
        layers = frozenset(n for n in range(config.num_hidden_layers) if n not in dense and (n + 1) % step == 0)
        if not layers:
            return None
        uses_auxiliary_loss = getattr(config, "output_router_logits", False)
        return cls(
            names,
            experts,
            chosen,
            width,
            normalized=bool(getattr(config, "norm_topk_prob", True)),
            layers=layers,
            balance=float(getattr(config, "router_aux_loss_coef", None) or 0.0) if uses_auxiliary_loss else 0.0,
        )


CHOSEN = "num_experts_per_tok"


def check_experts(path: str, strategy: ParallelStrategy, sequence_parallel: bool) -> None:
    """Reject a layout that does not fit the experts of a model, if its `config.json` exists.

    Raises:
        ConfigError: the message names layout, model and conflict, and the setting to change.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text())
    if not isinstance(config, dict) or "model_type" not in config:
        return
    config.setdefault("num_experts", config.get("num_local_experts"))
    moe, e, etp = MoESpec.from_hugging_face(SimpleNamespace(**config)), strategy.expert, expert_tensor(strategy)
    where, stage = f"allocation megatron:{strategy} with model {path}", strategy.tensor * strategy.context
    if moe is None:  # `Partition` rejects expert ranks for dense models
        return
    count, width = f"{moe.names.count}={moe.experts}", f"{moe.names.width}={moe.width}"
    for is_conflict, reason in (
        (moe.experts % e, f"{count} is not divisible by e={e}; choose an e that divides it"),
        (moe.width % etp, f"{width} is not divisible by {etp} ranks per expert; change t of ffn"),
        (
            strategy.tensor > 1 and not sequence_parallel,
            f"t={strategy.tensor} with experts requires sequence_parallel=true, so that each token is sent "
            "to its experts once; set it, or set t=1",
        ),
        (
            etp > 1 and e == 1 and not sequence_parallel,
            f"{etp} ranks per expert require e above 1, or t above 1 with sequence_parallel=true; set one of "
            "these, or omit t of ffn",
        ),
        (
            strategy.pipeline > 1 and e * etp != stage,
            f"with p={strategy.pipeline}, e={e} times {etp} ranks per expert must equal "
            f"t * c = {stage}; change e, or set p=1",
        ),
        (
            strategy.pipeline > 1 and moe.balance,
            f"p={strategy.pipeline} does not work with output_router_logits=true in config.json: the auxiliary loss "
            "depends on all layers; set p=1 or output_router_logits=false",
        ),
    ):
        if is_conflict:
            raise ConfigError(f"{where}: {reason}.")


def expert_tensor(strategy: ParallelStrategy) -> int:
    """Return the number of ranks over which each expert matrix is split.

    This is the t of `ffn` if the allocation states it. Otherwise it is t / e if e divides t, so that the experts fill
    the tensor ranks, else 1.
    """
    if strategy.expert_tensor is not None:
        return strategy.expert_tensor
    return strategy.tensor // strategy.expert if strategy.tensor % strategy.expert == 0 else 1
