"""The reference train engine against independent computations: padded batches and AdamW written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import PackedBatch
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.engine import Stats, TokenOutputs
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_contracts.testing.reference_engine import learning_rate


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    return str(make_tiny_model(folder, request.param, tied=request.param == "qwen3", hidden=32))


def weighted_nll(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    mask = packed["loss_mask"]
    loss = -(outputs.logprobs * packed["advantages"])[mask].sum()
    return loss, {
        "entropy": (outputs.entropy[mask].detach().sum(), mask.sum()),
        "logprob/max": (outputs.logprobs.detach()[mask].max(), mask.sum()),
    }


def trained_tokens(batch: Any) -> torch.Tensor:
    return batch["loss_mask"].sum()


def padded_outputs(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies, [B, T] each, of one padded forward pass."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    distribution = (logits / batch["temperature"][:, None, None]).log_softmax(-1)[:, :-1]
    logprobs = distribution.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    zero = torch.zeros(len(logits), 1)
    real = batch["attention_mask"]
    return torch.cat([zero, logprobs], 1) * real, torch.cat([zero, entropy], 1) * real


def test_forward_equals_padded_forward(model_path: str) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model_path, 1))
    batch = make_batch(5)

    logprobs = engine.forward(batch, lambda outputs, packed: outputs.logprobs)
    entropy = engine.forward(batch, lambda outputs, packed: outputs.entropy)

    with torch.no_grad():
        expected = padded_outputs(engine.model, batch)
    torch.testing.assert_close(logprobs, expected[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected[1], atol=2e-5, rtol=1e-5)


def test_train_batch_equals_handwritten_adamw(model_path: str) -> None:
    settings = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.3)
    engine, batch = ReferenceTrainEngine(), make_batch(5)
    engine.initialize(FinetuneSpec(model_path, 1, optimizer=settings))
    logprobs, entropy = padded_outputs(engine.model, batch)
    mask = batch["loss_mask"]
    loss = -(logprobs * batch["advantages"])[mask].sum() / mask.sum()
    names, parameters = zip(*engine.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    expected = {}
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        g = gradient * min(1.0, 0.3 / norm)
        update = g / (g.abs() + 1e-8)  # the first step of Adam: both moments are unbiased
        decay = 0.1 if parameter.ndim == 2 else 0.0
        expected[name] = (parameter * (1 - 1e-2 * decay) - 1e-2 * update).detach()
    large = {n: g.abs() > 1e-4 * norm for n, g in zip(names, gradients, strict=True)}

    result = engine.train_batch(batch, weighted_nll, trained_tokens)

    assert result["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert result["entropy"] == pytest.approx(float(entropy[mask].mean().detach()), rel=1e-5)
    assert result["logprob/max"] == pytest.approx(float(logprobs[mask].max().detach()), abs=1e-5)
    assert (result["lr"], result["applied"], result["tokens"]) == (1e-2, 1.0, float(batch["attention_mask"].sum()))
    for name, parameter in engine.model.named_parameters():
        # rounding decides the sign of a gradient near 0, and so the direction of Adam's first step
        torch.testing.assert_close(
            parameter.detach()[large[name]], expected[name][large[name]], atol=2e-4, rtol=1e-3, msg=name
        )


def test_forward_custom_module_may_return_logits() -> None:
    class Unigram(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.arange(6.0))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.logits.expand(*input_ids.shape, -1)

    engine = ReferenceTrainEngine(model=Unigram())
    engine.initialize(FinetuneSpec("", 1, optimizer=OptimizerConfig(lr=0.5, weight_decay=0.0)))
    batch = make_batch(3, vocab_size=6)

    logprobs = engine.forward(batch, lambda outputs, packed: outputs.logprobs)

    length = int(batch["attention_mask"][0].sum())
    expected = (torch.arange(6.0) / batch["temperature"][0]).log_softmax(-1)[batch["input_ids"][0, 1:length]]
    torch.testing.assert_close(logprobs[0, 1:length], expected)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.8 * (2 + math.sqrt(2)) / 4, 0.6, 0.2 + 0.8 * (2 - math.sqrt(2)) / 4]),
    ],
)
def test_learning_rate_rises_to_peak_and_follows_schedule(schedule: str, rates: list[float]) -> None:
    min_ratio = 0.0 if schedule == "constant" else 0.2
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2, min_lr_ratio=min_ratio)

    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("strategy", "settings", "match"),
    [
        (ParallelStrategy(2), {}, "allocation: expected one rank"),
        (ParallelStrategy(), {"head": "value"}, "head: expected lm"),
        (ParallelStrategy(), {"device": "cuda"}, "device: expected cpu"),
    ],
)
def test_initialize_unsupported_setting_raises_its_name(
    strategy: ParallelStrategy, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        ReferenceTrainEngine(strategy=strategy).initialize(FinetuneSpec("", 1, **settings))


def test_train_batch_without_optimizer_raises() -> None:
    engine = ReferenceTrainEngine(model=torch.nn.Embedding(9, 9))
    engine.initialize(FinetuneSpec("", 1, optimizer=None))

    with pytest.raises(EngineError, match="optimizer is None"):
        engine.train_batch(make_batch(2), weighted_nll, trained_tokens)
