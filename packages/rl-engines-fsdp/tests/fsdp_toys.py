"""Tiny models, batches and a loss that the tests and their worker processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.trajectory import Trajectory, stack
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig

VOCABULARY = 61
EPS = 1e-3
"""Of AdamW in tests: with a tiny one, the first step of an entry whose gradient is near 0 is a coin toss."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "Phi": {},
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "Cohere": {"logit_scale": 0.25},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "StableLm": {},
    "Mamba": {},
}


def make_model(path: Path, family: str = "Qwen3", seed: int = 0) -> str:
    """Save a random model with weights large enough that every part of it matters."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family]))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
                group_id=row,
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


def logprobs_of(outputs: Any, packed: Any) -> torch.Tensor:
    return outputs.logprobs


def make_engine(path: str, micro_batch: int = 64, total_steps: int = 10, **settings: Any) -> FSDPEngine:
    """An initialised engine on the CPU."""
    settings.setdefault("optimizer", OptimizerConfig(lr=1e-2, eps=EPS, max_grad_norm=0.5))
    config = FSDPEngineConfig(micro_batch=MicroBatchConfig(micro_batch), device="cpu", **settings)
    engine = FSDPEngine(config)
    engine.initialize(FinetuneSpec(path, total_steps))
    return engine


def weights_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Whole parameters by name (collective)."""
    from rl_engines_fsdp.sharding import full_parameters

    return {name: value.clone() for name, value in full_parameters(engine._model)}
