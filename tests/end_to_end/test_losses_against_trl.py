"""Losses against the code of TRL: value and gradient on the same batch, for every loss that both implement."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rl_contracts.batch.trajectory import pack
from rl_contracts.engine import TokenOutputs
from rl_contracts.testing.batches import make_batch
from rl_trainers.algorithms.config import AggregationConfig, AlgorithmConfig, CorrectionConfig, KLConfig, LossConfig
from rl_trainers.algorithms.functional.aggregation import denominator, token_weights
from rl_trainers.algorithms.objective import make_policy_loss

SEQUENCES, LENGTH = 6, 12
CASES = {
    "grpo": ({}, {"aggregation": AggregationConfig("sequence_mean_token_mean")}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dapo": ({"loss_type": "dapo"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": AggregationConfig("constant_length")}),
    "two-sided clip": (
        {"loss_type": "dapo", "delta": 1.5},
        {"loss": LossConfig(clip_high=0.28, options={"dual_clip": 1.5})},
    ),
    "gspo": (
        {"level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
        {
            "ratio": "sequence",
            "loss": LossConfig(clip_low=0.02, clip_high=0.03),
            "aggregation": AggregationConfig("sequence_mean_token_mean"),
        },
    ),
    "luspo": (
        {"loss_type": "luspo", "level": "sequence"},
        {"ratio": "sequence", "aggregation": AggregationConfig("sequence_mean_token_sum")},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"loss": LossConfig("cispo", clip_low=1.0, clip_high=0.2)},
    ),
    "sapo": (
        {"loss_type": "sapo"},
        {"loss": LossConfig("sapo"), "aggregation": AggregationConfig("sequence_mean_token_mean")},
    ),
    "kl": ({"loss_type": "dapo", "beta": 0.2}, {"kl": KLConfig("loss", 0.2, "k3")}),
    "weighted kl": (
        {"loss_type": "dapo", "beta": 0.2, "unbiased_kl": True},
        {"kl": KLConfig("loss", 0.2, "k3", weighted=True)},
    ),
    "truncated importance sampling": ({"loss_type": "dapo", "cap": 1.2}, {"correction": CorrectionConfig(cap=1.2)}),
    "entropy bonus": ({"loss_type": "dapo", "entropy_coef": 0.3}, {"entropy_coef": 0.3}),
}
"""Equivalent settings of TRL and of this project."""


@pytest.fixture
def batch():
    """Sequences of one prompt token and up to LENGTH trained tokens."""
    batch = make_batch(SEQUENCES, lengths=(4, LENGTH + 1))
    batch["loss_mask"] = batch["attention_mask"].clone()
    batch["loss_mask"][:, 0] = False
    generator = torch.Generator().manual_seed(0)
    for name, scale in (("theta", 0.3), ("prox_logprobs", 0.3), ("ref_logprobs", 0.3), ("logprobs", 0.2)):
        batch[name] = -1 + scale * torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64)
    batch["per_sequence"] = torch.randn(SEQUENCES, generator=generator, dtype=torch.float64)
    return batch


def entropies(logprobs):
    """Return a differentiable function of the log-probs as a stand-in for the entropy."""
    return -0.5 * logprobs.sin()


def trl_loss(batch, theta, trl_settings):
    """Call `GRPOTrainer._compute_loss` on a trainer that has only the attributes that the method reads."""
    from trl.trainer.grpo_trainer import GRPOTrainer  # takes seconds; keeps test collection fast

    settings = {
        "loss_type": "grpo",
        "level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
    } | trl_settings
    mask = batch["loss_mask"][:, 1:].int()
    cap, entropy_coef = settings.get("cap"), settings.get("entropy_coef", 0.0)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__ |= {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (theta[:, 1:], entropies(theta[:, 1:]), None),
        "args": SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("unbiased_kl", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        "loss_type": settings["loss_type"],
        "importance_sampling_level": settings["level"],
        "epsilon_low": settings["epsilon_low"],
        "epsilon_high": settings["epsilon_high"],
        "beta": settings["beta"],
        "max_completion_length": LENGTH,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": cap is not None,
        "vllm_importance_sampling_correction": cap is not None,
        "_entropy_bonus_enabled": entropy_coef > 0,
        "use_adaptive_entropy": False,
        "entropy_coef": entropy_coef,
        "_metrics": {"train": defaultdict(list)},
    }
    old, ref, behavior = (batch[name][:, 1:] for name in ("prox_logprobs", "ref_logprobs", "logprobs"))
    inputs = {
        "prompt_ids": batch["input_ids"][:, :1],
        "prompt_mask": torch.ones(SEQUENCES, 1, dtype=torch.int32),
        "completion_ids": batch["input_ids"][:, 1:],
        "completion_mask": mask,
        "advantages": batch["per_sequence"],
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": (old - behavior).exp().clamp(max=cap) * mask if cap else None,
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(trainer.model, inputs)


def project_loss(batch, theta, settings):
    """Return the loss of this project on the packed batch."""
    defaults = {"correction": CorrectionConfig("none"), "loss": LossConfig(clip_high=0.28)}
    config = AlgorithmConfig(**defaults | settings)
    loss_mask = batch["loss_mask"]
    batch["advantages"] = torch.where(loss_mask, batch["per_sequence"][:, None], 0.0)
    batch["loss_weights"] = token_weights(loss_mask, config.aggregation.kind, LENGTH).double()
    packed_theta = theta[batch["attention_mask"]]
    value, _ = make_policy_loss(config, minibatches=2)(TokenOutputs(packed_theta, entropies(packed_theta)), pack(batch))
    return value / denominator(loss_mask, config.aggregation.kind)


@pytest.mark.guarantee("Loss and gradient equal those of TRL, for every loss that both implement.", area="algorithms")
@pytest.mark.parametrize("name", CASES)
def test_loss_value_and_gradient_match_trl(name, batch):
    trl_settings, settings = CASES[name]
    results = []
    for loss in (
        lambda theta: trl_loss(batch, theta, trl_settings),
        lambda theta: project_loss(batch, theta, settings),
    ):
        theta = batch["theta"].clone().requires_grad_()
        value = loss(theta)
        (gradient,) = torch.autograd.grad(value, theta)
        results.append((value.detach().double(), gradient))
    (trl_value, trl_gradient), (value, gradient) = results
    torch.testing.assert_close(value, trl_value, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient, trl_gradient, rtol=1e-6, atol=1e-8)
    assert trl_gradient.abs().max() > 0
