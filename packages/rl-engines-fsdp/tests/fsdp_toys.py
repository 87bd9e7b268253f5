"""Tiny models, batches and losses shared by the tests and their worker processes."""

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
from rl_contracts.testing.processes import rank_device
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig

EPS = 1e-3
"""Epsilon of AdamW. With a tiny epsilon, the sign of the first step is arbitrary where the gradient is near 0."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Gemma": {"head_dim": 8},
    "Gemma2": {  # small caps, so that they have an effect
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
}


ATTENTION_FAMILIES = [
    *("Qwen3", "Gemma2"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Qwen2", "Gemma", "Gemma3Text", "Mistral")),
]
"""Families that cover full, sliding and mixed attention, grouped queries, soft caps, and norms of queries and keys."""


def make_model(path: Path, family: str = "Qwen3", seed: int = 0, **settings: Any) -> str:
    """Save a random model with weights large enough that each component affects the outputs."""
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
    """Save a random sequence classifier with one label and a nonzero head."""
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
    """Make a batch of sequences with mixed lengths and temperatures, and with advantages."""
    random = np.random.default_rng(seed)
    trajectories = []
    for index in range(rows):
        length = int(random.integers(3, longest + 1))
        learn = np.arange(length) >= length // 2
        trajectories.append(
            Trajectory(
                input_ids=random.integers(0, VOCABULARY, length),
                loss_mask=learn,
                logprobs=np.zeros(length, np.float32),
                versions=np.where(learn, 0, -1).astype(np.int32),
                temperature=float(random.choice([0.6, 1.0, 1.3])),
                prompt_id=index,
                group_id=index // 2,
                episode_id=index,
            )
        )
    batch = stack(trajectories)
    batch["advantages"] = torch.from_numpy(random.normal(size=batch["input_ids"].shape).astype(np.float32))
    return batch


def loss_fn(outputs: Any, packed: Any) -> Any:
    """Return a policy-gradient loss with a mean and a maximum as statistics."""
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
    """Return the squared error of a scalar head against the advantages."""
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
    """Create an initialized engine on `rank_device`; `settings` are fields of its config or of the spec."""
    settings.setdefault("optimizer", OptimizerConfig(lr=1e-2, eps=EPS, max_grad_norm=0.5))
    spec_settings = {item.name: settings.pop(item.name) for item in fields(FinetuneSpec) if item.name in settings}
    engine = FSDPEngine(FSDPEngineConfig(**settings), strategy)
    spec = FinetuneSpec(
        path, total_steps, micro_batch=MicroBatchConfig(micro_batch), **({"device": rank_device()} | spec_settings)
    )
    engine.initialize(spec)
    return engine


def record_gradients(engine: FSDPEngine, rate: float = 0.1) -> dict[str, torch.Tensor]:
    """Replace the optimizer by plain SGD, and return a dict that each step fills with its gradients (collective).

    The gradients are on the CPU.
    """
    from rl_engines_fsdp.ranks.sharding import whole

    named = engine._model.hugging_face_parameters()
    optimizer = torch.optim.SGD([parameter for _, parameter in named], rate)
    original_step, gradients = optimizer.step, {}

    def step() -> None:
        gradients.update(
            {
                name: whole(parameter.grad).to("cpu", copy=True)
                for name, parameter in named
                if parameter.grad is not None
            }
        )
        original_step()

    optimizer.step = step  # type: ignore[method-assign]
    engine._optimizer = optimizer  # type: ignore[assignment]
    return gradients


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], norm: float) -> float:
    """Return the norm of the difference of two sets of tensors, relative to `norm`."""
    assert actual.keys() == expected.keys()
    return sum(float((actual[name].double() - expected[name]).square().sum()) for name in expected) ** 0.5 / norm


def weights_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Return whole parameters by name, on the CPU (collective)."""
    from rl_engines_fsdp.ranks.sharding import full_parameters

    return {name: value.to("cpu", copy=True) for name, value in full_parameters(engine._model)}
