"""Loss and gradient of every preset on a synthetic batch, against reference values.

`preset_values.json` was computed once with reference formulas of every preset. For each minibatch, it has the loss and
its gradient with respect to the log-probs of the tokens with a nonzero gradient. The batch covers the cases in which
presets differ: groups of unequal size, a group of one completion, a group of equal rewards, an episode of two
sequences, gaps between trained tokens, several versions, truncated completions and a sequence without a trained token.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rl_apps.programs.gsm8k_grpo import APP
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import pack, unpack
from rl_contracts.engine import TokenOutputs
from rl_trainers import Critic, PolicyActor

VALUES = json.loads((Path(__file__).parent / "preset_values.json").read_text())
OVERRIDES = {"dapo": ["algorithm.reward.overlong_cache=4"], "distillation": ["ref.path=/models/teacher"]}
"""Settings in which the reference values differ from the current preset, and the teacher."""
VERSION = 3
GROUPS = (0, 0, 0, 0, 7, 7, 7, 7, 7, 4, 9, 9, 9, 9, 9, 9)
EPISODES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 14)


def synthetic_batch():
    """Return sixteen sequences with all fields of a sampler, and tables [B, T] of the models' outputs per token."""
    random = np.random.default_rng(5)
    sequences, width = len(GROUPS), 38
    prompt = random.integers(2, 5, sequences)
    generated = random.integers(6, 33, sequences)
    generated[[0, 5]] = 32
    position = np.arange(width)[None]
    attention = position < (prompt + generated)[:, None]
    completion = attention & (position >= prompt[:, None])
    learn = completion & (random.random((sequences, width)) < 0.85)
    learn[3] = False
    rewards = random.integers(0, 3, sequences) / 2 + (random.random(sequences) < 0.3) * 0.25
    rewards[[4, 5, 6, 7, 8]] = rewards[4]
    rewards[15] = rewards[14]

    def noise(scale):
        return torch.from_numpy(scale * random.standard_normal((sequences, width)))

    base = -1 - noise(0.3).abs()
    tables = SimpleNamespace(
        old=base + noise(0.4), theta=base + noise(0.5), reference=base + noise(0.5), values=noise(1.0)
    )
    is_generated = torch.from_numpy(completion)
    versions = torch.from_numpy(VERSION - random.integers(0, 3, (sequences, width))).int()
    batch = TensorDict(
        {
            "input_ids": torch.ones(sequences, width, dtype=torch.int64),
            "attention_mask": torch.from_numpy(attention),
            "loss_mask": torch.from_numpy(learn),
            "logprobs": torch.where(is_generated, base, 0.0).float(),
            "versions": torch.where(is_generated, versions, -1),
            "rewards": torch.from_numpy(rewards).float(),
            "prompt_ids": torch.tensor(GROUPS),
            "group_ids": torch.tensor(GROUPS),
            "episode_ids": torch.tensor(EPISODES),
            "temperature": torch.ones(sequences),
            "truncated": torch.from_numpy(generated == 32),
            "minibatch": (torch.tensor(GROUPS) > 4).long(),
            "place": torch.arange(sequences * width).reshape(sequences, width),
        },
        batch_size=[sequences],
    )
    return batch, tables


class TableEngine:
    """Engine whose outputs come from a table; trains on another table, and records loss and gradient of each step."""

    def __init__(self, table, learning=None):
        self.table, self.learning = table, learning
        self.version, self.parallel, self.steps = VERSION, ParallelContext(), []

    def forward(self, batch, output_fn):
        packed = pack(batch)
        return unpack(output_fn(self._outputs(self.table, packed), packed), batch).float()

    def train_batch(self, batch, loss_fn, loss_weight_fn):
        packed = pack(batch)
        packed.tokens["logprobs"] = packed["logprobs"].double()
        theta = self.learning.clone().requires_grad_()
        loss, _ = loss_fn(self._outputs(theta, packed), packed)
        loss = loss / loss_weight_fn(batch).double()
        (gradient,) = torch.autograd.grad(loss, theta)
        self.steps.append((loss.item(), gradient[gradient != 0].tolist()))
        return {"loss": loss.item(), "grad_norm": 1.0, "applied": 1.0}

    @staticmethod
    def _outputs(table, packed):
        values = table.flatten()[packed["place"]]
        return TokenOutputs(values, -0.5 * values.sin(), values)


@pytest.mark.parametrize("name", VALUES)
def test_preset_loss_and_gradient_equal_reference_values(name):
    overrides = [f"algorithm={name}", "actor.minibatches=2", *OVERRIDES.get(name, [])]
    config = APP.config(overrides)
    algorithm, longest = config.algorithm, config.rollout.generation.max_new_tokens
    batch, tables = synthetic_batch()
    engines = {"policy": TableEngine(tables.old, tables.theta)}
    reference = TableEngine(tables.reference) if algorithm.needs_reference else None
    if algorithm.needs_critic:
        engines["critic"] = TableEngine(tables.values, tables.values + 0.3)
    critic = Critic(engines["critic"], 0.2, 2) if algorithm.needs_critic else None
    actor = PolicyActor(engines["policy"], algorithm, 2, reference, critic, longest)

    actor.prepare(batch)
    actor.update(batch)

    assert set(engines) == set(VALUES[name])
    for model, engine in engines.items():
        for (loss, gradient), (expected, expected_gradient) in zip(engine.steps, VALUES[name][model], strict=True):
            assert loss == pytest.approx(expected, abs=1e-7)
            assert gradient == pytest.approx(expected_gradient, abs=1e-7)
