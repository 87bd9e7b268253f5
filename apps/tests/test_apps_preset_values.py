"""Every preset's loss and gradient on a made-up batch, against numbers that were computed once.

`preset_values.json` has them from the formulas of commit 847d745, before an algorithm was composed of parts: for each
minibatch the loss, and its gradient by the log-probs of the tokens that have one. The batch has what presets differ in:
groups of unequal size, one of a single answer, one of equal rewards, an episode of two rows, gaps between trained
tokens, several versions, truncated answers, a row without a trained token.
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
SINCE = {"dapo": ["algorithm.reward.overlong_cache=4"]}
"""What a preset said then that it says otherwise now."""
VERSION = 3
GROUPS = (0, 0, 0, 0, 7, 7, 7, 7, 7, 4, 9, 9, 9, 9, 9, 9)
EPISODES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 14)


def made_up_batch():
    """Sixteen rows with everything that a sampler records; and tables [B, T] of what models say of their tokens."""
    random = np.random.default_rng(5)
    rows, width = len(GROUPS), 38
    prompt = random.integers(2, 5, rows)
    generated = random.integers(6, 33, rows)
    generated[[0, 5]] = 32
    place = np.arange(width)[None]
    real = place < (prompt + generated)[:, None]
    answer = real & (place >= prompt[:, None])
    learn = answer & (random.random((rows, width)) < 0.85)
    learn[3] = False
    rewards = random.integers(0, 3, rows) / 2 + (random.random(rows) < 0.3) * 0.25
    rewards[[4, 5, 6, 7, 8]] = rewards[4]
    rewards[15] = rewards[14]

    def noise(scale):
        return torch.from_numpy(scale * random.standard_normal((rows, width)))

    base = -1 - noise(0.3).abs()
    tables = SimpleNamespace(
        old=base + noise(0.4), theta=base + noise(0.5), reference=base + noise(0.5), values=noise(1.0)
    )
    generated_here = torch.from_numpy(answer)
    versions = torch.from_numpy(VERSION - random.integers(0, 3, (rows, width))).int()
    batch = TensorDict(
        {
            "input_ids": torch.ones(rows, width, dtype=torch.int64),
            "attention_mask": torch.from_numpy(real),
            "loss_mask": torch.from_numpy(learn),
            "logprobs": torch.where(generated_here, base, 0.0).float(),
            "versions": torch.where(generated_here, versions, -1),
            "rewards": torch.from_numpy(rewards).float(),
            "prompt_ids": torch.tensor(GROUPS),
            "group_ids": torch.tensor(GROUPS),
            "episode_ids": torch.tensor(EPISODES),
            "temperature": torch.ones(rows),
            "truncated": torch.from_numpy(generated == 32),
            "minibatch": (torch.tensor(GROUPS) > 4).long(),
            "place": torch.arange(rows * width).reshape(rows, width),
        },
        batch_size=[rows],
    )
    return batch, tables


class TableEngine:
    """Says of a token what stands in a table; learns at another one, and keeps loss and gradient of each step."""

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
        here = table.flatten()[packed["place"]]
        return TokenOutputs(here, -0.5 * here.sin(), here)


@pytest.mark.parametrize("name", VALUES)
def test_preset_loss_and_gradient_are_those_of_its_formulas(name):
    overrides = [f"algorithm={name}", "actor.minibatches=2", "ref.path=/models/teacher", *SINCE.get(name, [])]
    algorithm = APP.config(overrides).algorithm
    batch, tables = made_up_batch()
    engines = {"policy": TableEngine(tables.old, tables.theta)}
    reference = TableEngine(tables.reference) if algorithm.needs_reference else None
    if algorithm.needs_critic:
        engines["critic"] = TableEngine(tables.values, tables.values + 0.3)
    critic = Critic(engines["critic"], 0.2, 2) if algorithm.needs_critic else None
    actor = PolicyActor(engines["policy"], algorithm, 2, reference, critic)

    actor.prepare(batch)
    actor.update(batch)

    assert set(engines) == set(VALUES[name])
    for which, engine in engines.items():
        for (loss, gradient), (expected, expected_gradient) in zip(engine.steps, VALUES[name][which], strict=True):
            assert loss == pytest.approx(expected, abs=1e-7)
            assert gradient == pytest.approx(expected_gradient, abs=1e-7)
