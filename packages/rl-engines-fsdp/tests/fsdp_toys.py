"""Tiny models, batches and a loss that the tests and their worker processes share."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import Trajectory, stack
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing.families import SIZES, VOCABULARY
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig

EPS = 1e-3
"""Of AdamW in tests: with a tiny one, the first step of an entry whose gradient is near 0 is a coin toss."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Gemma": {"head_dim": 8},
    "Gemma2": {  # caps so small that they matter
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
    },
    "Gemma3Text": {
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi": {},
    "GPT2": {},
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "Cohere": {"logit_scale": 0.25},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "StableLm": {},
    "Falcon": {},
    "Mamba": {},
}


ATTENTION_FAMILIES = [
    *("Qwen3", "Gemma2"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Qwen2", "Gemma", "Gemma3Text", "Mistral")),
]
"""Between them: full and sliding attention, in one model too, grouped queries, soft caps, norms of queries and keys."""


def make_model(path: Path, family: str = "Qwen3", seed: int = 0, **settings: Any) -> str:
    """Save a random model with weights large enough that every part of it matters."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | settings))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return str(path)


def make_classifier(path: Path, family: str = "Qwen3", seed: int = 0, **settings: Any) -> str:
    """Save a random sequence classifier of one label, with a head that is not zero."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | {"num_labels": 1} | settings))
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return str(path)


def make_batch(rows: int = 10, seed: int = 0, longest: int = 19) -> Any:
    """Rows of mixed lengths and temperatures, with advantages."""
    random = np.random.default_rng(seed)
    result = []
    for row in range(rows):
        length = int(random.integers(3, longest + 1))
        learn = np.arange(length) >= length // 2
        result.append(
            Trajectory(
                input_ids=random.integers(0, VOCABULARY, length),
                loss_mask=learn,
                logprobs=np.zeros(length, np.float32),
                versions=np.where(learn, 0, -1).astype(np.int32),
                temperature=float(random.choice([0.6, 1.0, 1.3])),
                prompt_id=row,
                group_id=row // 2,
                episode_id=row,
            )
        )
    batch = stack(result)
    batch["advantages"] = torch.from_numpy(random.normal(size=batch["input_ids"].shape).astype(np.float32))
    return batch


def loss_fn(outputs: Any, packed: Any) -> Any:
    """Policy-gradient loss with statistics of both kinds."""
    learn = packed["loss_mask"]
    loss = -(outputs.logprobs * packed["advantages"] * learn).sum()
    stats = {
        "entropy/mean": ((outputs.entropy.detach() * learn).sum(), learn.sum()),
        "logprob/max": (outputs.logprobs.detach().where(learn, -torch.inf).max(), learn.sum()),
    }
    return loss, stats


def loss_weight_fn(batch: Any) -> torch.Tensor:
    return batch["loss_mask"].sum()


def value_loss_fn(outputs: Any, packed: Any) -> Any:
    """Squared error against the advantages, for scalar heads."""
    learn = packed["loss_mask"]
    loss = ((outputs.values - packed["advantages"]).square() * learn).sum()
    return loss, {"value/mean": ((outputs.values.detach() * learn).sum(), learn.sum())}


def values_of(outputs: Any, packed: Any) -> torch.Tensor:
    return outputs.values


def logprobs_of(outputs: Any, packed: Any) -> torch.Tensor:
    return outputs.logprobs


def make_engine(
    path: str, micro_batch: int = 64, total_steps: int = 10, strategy: ParallelStrategy | None = None, **settings: Any
) -> FSDPEngine:
    """An initialised engine on the CPU; `settings` are those of its config and of the spec."""
    settings.setdefault("optimizer", OptimizerConfig(lr=1e-2, eps=EPS, max_grad_norm=0.5))
    told = {item.name: settings.pop(item.name) for item in fields(FinetuneSpec) if item.name in settings}
    engine = FSDPEngine(FSDPEngineConfig(**settings), strategy)
    spec = FinetuneSpec(path, total_steps, micro_batch=MicroBatchConfig(micro_batch), **({"device": "cpu"} | told))
    engine.initialize(spec)
    return engine


def record_gradients(engine: FSDPEngine, rate: float = 0.1) -> dict[str, torch.Tensor]:
    """Let the engine step with plain SGD, and find here after each step the gradients that it took (collective)."""
    from rl_engines_fsdp.ranks.sharding import whole

    named = engine._model.hugging_face_parameters()
    optimizer = torch.optim.SGD([parameter for _, parameter in named], rate)
    take, found = optimizer.step, {}

    def step() -> None:
        found.update({name: whole(parameter.grad).clone() for name, parameter in named if parameter.grad is not None})
        take()

    optimizer.step = step  # type: ignore[method-assign]
    engine._optimizer = optimizer  # type: ignore[assignment]
    return found


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], norm: float) -> float:
    """Norm of the difference of two sets of tensors, relative to `norm`."""
    assert found.keys() == expected.keys()
    return sum(float((found[n].double() - expected[n]).square().sum()) for n in expected) ** 0.5 / norm


def weights_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Whole parameters by name (collective)."""
    from rl_engines_fsdp.ranks.sharding import full_parameters

    return {name: value.clone() for name, value in full_parameters(engine._model)}
