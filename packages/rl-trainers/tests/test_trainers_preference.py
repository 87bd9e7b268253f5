"""Preference pairs: hand-computed losses, sequences from conversations, and a policy that learns a preference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import UNIT_KEY, PackedBatch, pack, select
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.engine import TokenOutputs
from rl_contracts.errors import ConfigError, DataError, EngineError
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_trainers.algorithms.functional.value_and_preference_losses import bradley_terry_loss, dpo_loss, ipo_loss
from rl_trainers.learners.preference import (
    PolicyPreferenceLoss,
    PreferenceConfig,
    count_pairs,
    preference_sequences,
    reward_model_loss,
)
from rl_trainers.learners.supervised import LossEvaluation, LossLearner, shard_sequences


def pair_batch(count: int, seed: int = 0) -> Any:
    """Return pairs of random sequences, every second one with the rejected sequence first."""
    batch = make_batch(2 * count, seed=seed)
    batch[UNIT_KEY] = torch.arange(2 * count) // 2
    first = torch.arange(count) % 2 == 0
    batch["rewards"] = torch.stack([first, ~first], 1).flatten().float()
    return batch


def packed_pairs(count: int = 2) -> PackedBatch:
    return pack(pair_batch(count))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_bradley_terry_any_order_in_pair_matches_hand_computation() -> None:
    # pair 0: chosen 1.5, rejected 0.5; pair 1 has the rejected sequence first: rejected 2, chosen -1
    loss, stats = bradley_terry_loss(torch.tensor([1.5, 0.5, 2.0, -1.0]), packed_pairs())

    assert loss.item() == pytest.approx(-math.log(sigmoid(1.0)) - math.log(sigmoid(-3.0)), rel=1e-6)
    metrics = {name: (total / count).item() for name, (total, count) in stats.items()}
    assert metrics == pytest.approx({"pair/accuracy": 0.5, "pair/margin": -1.0, "score/mean": 0.75})
    _, stats = bradley_terry_loss(torch.tensor([1.0, 0.0, 2.0, 2.0]), packed_pairs())  # equal scores count half
    assert (stats["pair/accuracy"][0] / stats["pair/accuracy"][1]).item() == 0.75


def test_dpo_matches_hand_computation() -> None:
    # log ratios: chosen 0.4, rejected -0.6, so h = 1; rejected 0.5, chosen 0.1, so h = -0.4; beta 0.5
    loss, stats = dpo_loss(torch.tensor([0.4, -0.6, 0.5, 0.1]), packed_pairs(), beta=0.5)

    assert loss.item() == pytest.approx(-math.log(sigmoid(0.5)) - math.log(sigmoid(-0.2)), rel=1e-6)
    metrics = {name: (total / count).item() for name, (total, count) in stats.items()}
    assert metrics["reward/chosen"] == pytest.approx(0.5 * (0.4 + 0.1) / 2)
    assert metrics["reward/rejected"] == pytest.approx(0.5 * (-0.6 + 0.5) / 2)
    assert metrics["pair/margin"] == pytest.approx(0.5 * (1.0 - 0.4) / 2)


def test_dpo_label_smoothing_weights_both_orders() -> None:
    loss, _ = dpo_loss(torch.tensor([0.4, -0.6]), packed_pairs(1), beta=1.0, label_smoothing=0.1)

    assert loss.item() == pytest.approx(-0.9 * math.log(sigmoid(1.0)) - 0.1 * math.log(sigmoid(-1.0)), rel=1e-6)


def test_ipo_matches_hand_computation() -> None:
    # h = 1 and -0.4; 1 / (2 * 0.25) = 2
    loss, _ = ipo_loss(torch.tensor([0.4, -0.6, 0.5, 0.1]), packed_pairs(), beta=0.25)

    assert loss.item() == pytest.approx((1.0 - 2.0) ** 2 + (-0.4 - 2.0) ** 2, rel=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("ipo", 0.0), ("ipo_sum", (10 / 0.2 - 1 / 0.2) ** 2)])
def test_ipo_averages_log_ratios_over_tokens_of_completion(kind: str, expected: float) -> None:
    # as in AReaL's test: 10 tokens each, with mean log-ratios that differ by 1 / (2 beta)
    rows = [{"chosen": talk("hi", "a" * 9), "rejected": talk("hi", "b" * 9)}]
    batch = shard_sequences(preference_sequences(rows, Letters(), 99), ParallelContext())
    batch["ref_logprobs"] = torch.zeros_like(batch["logprobs"])
    packed = pack(batch)
    chosen = packed["rewards"][packed.sequence_of_token] > 0
    logprobs = torch.where(chosen & packed["loss_mask"], 5.0, 0.0)

    loss, _ = PolicyPreferenceLoss(PreferenceConfig(loss=kind, beta=0.1))(TokenOutputs(logprobs, logprobs), packed)

    assert int(packed["loss_mask"].sum()) == 20
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["bradley_terry", "dpo smoothed", "ipo"])
def test_preference_losses_gradients_match_finite_differences(name: str) -> None:
    packed = packed_pairs(3)

    def loss(values: torch.Tensor) -> torch.Tensor:
        if name == "bradley_terry":
            return bradley_terry_loss(values, packed)[0]
        if name == "ipo":
            return ipo_loss(values, packed, 0.3)[0]
        return dpo_loss(values, packed, 0.3, 0.2)[0]

    torch.manual_seed(0)
    assert torch.autograd.gradcheck(loss, (torch.randn(6, dtype=torch.float64, requires_grad=True),))


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(8)), cut=st.integers(1, 3))
def test_preference_loss_any_order_and_split_gives_the_same(order: list[int], cut: int) -> None:
    batch = pair_batch(4)
    batch["ref_logprobs"] = torch.where(batch["loss_mask"], batch["logprobs"] - 0.1, 0.0)
    loss = PolicyPreferenceLoss(PreferenceConfig(beta=0.3))

    def sums(rows: list[int]) -> list[float]:
        packed = pack(select(batch, rows))
        total, stats = loss(TokenOutputs(packed["logprobs"] * 1.1, packed["logprobs"]), packed)
        return [total.item(), *(value.item() for pair in stats.values() for value in pair)]

    shuffled = [row for row in order if row // 2 < cut], [row for row in order if row // 2 >= cut]
    split_sums = [a + b for a, b in zip(*(sums(rows) for rows in shuffled), strict=True)]

    assert split_sums == pytest.approx(sums(list(range(8))), abs=1e-4)


def test_policy_preference_loss_ignores_untrained_tokens() -> None:
    batch = pair_batch(2)
    batch["ref_logprobs"] = torch.full_like(batch["logprobs"], float("nan")).where(~batch["loss_mask"], -1.0)
    packed = pack(batch)

    total, _ = PolicyPreferenceLoss(PreferenceConfig())(TokenOutputs(packed["logprobs"], packed["logprobs"]), packed)

    assert math.isfinite(total.item())


def test_reward_model_loss_reads_scores_of_last_tokens() -> None:
    packed = packed_pairs()
    values = torch.full((packed.num_tokens,), 99.0)
    values[packed.cu_seqlens[1:].long() - 1] = torch.tensor([1.5, 0.5, 2.0, -1.0])

    loss, _ = reward_model_loss(TokenOutputs(values, values, values), packed)

    expected, _ = bradley_terry_loss(torch.tensor([1.5, 0.5, 2.0, -1.0]), packed)
    assert loss.item() == expected.item()
    with pytest.raises(EngineError, match="head=score"):
        reward_model_loss(TokenOutputs(packed["logprobs"], packed["logprobs"]), packed)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"loss": "kto"}, "loss"), ({"beta": 0}, "beta"), ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing")],
)
def test_preference_config_invalid_setting_is_rejected(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"preference.{name}"):
        PreferenceConfig(**settings)


class Letters:
    """A renderer whose tokens are characters; assistant turns and the dots that end them are trained."""

    def require_rendered(self, messages: Any, tools: Any = None) -> None:
        pass

    def render_sft(self, messages: Any, tools: Any = None) -> tuple[list[int], list[bool]]:
        ids, mask = [], []
        for message in messages:
            text = message["content"] + "."
            ids += [ord(letter) for letter in text]
            mask += [message["role"] == "assistant"] * len(text)
        return ids, mask


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def test_preference_rows_train_only_the_last_turn() -> None:
    row = {"prompt_id": 7, "chosen": talk("hi", "lo", "ab", "good"), "rejected": talk("hi", "lo", "ab", "bad")}

    chosen, rejected = preference_sequences([row], Letters(), max_length=100)

    assert [chr(i) for i in chosen.input_ids[chosen.loss_mask]] == list("good.")
    assert [chr(i) for i in rejected.input_ids[rejected.loss_mask]] == list("bad.")
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert chosen.group_id == rejected.group_id
    assert chosen.prompt_id == rejected.prompt_id == 7


@pytest.mark.parametrize(
    ("rejected", "message"),
    [
        (talk("hi", "good"), "example 3: `chosen` and `rejected`"),
        (talk("hi"), "example 3: expected `rejected` to end"),
        ([{"role": "user", "content": [{"type": "image"}]}, *talk("hi", "no")[1:]], "example 3: `rejected` has images"),
        (talk("hi", "x" * 50), r"example 3: `rejected` has 54 tokens.*data\.max_length=40"),
    ],
)
def test_preference_rows_invalid_pair_is_rejected(rejected: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        preference_sequences([{"prompt_id": 3, "chosen": talk("hi", "good"), "rejected": rejected}], Letters(), 40)


def test_preference_rows_truncation_removes_end_of_completion() -> None:
    row = {"chosen": talk("hi", "abcdef"), "rejected": talk("hi", "xy")}

    chosen, _ = preference_sequences([row], Letters(), 6, truncate=True)

    assert [chr(i) for i in chosen.input_ids[chosen.loss_mask]] == list("abc")
    with pytest.raises(DataError, match=r"example 0: .*`chosen`.*data\.max_length=3"):
        preference_sequences([row], Letters(), 3, truncate=True)


def test_shard_sequences_keeps_pairs_together() -> None:
    rows = preference_sequences(
        [{"chosen": talk("hi", "a" * (i + 2)), "rejected": talk("hi", "b" * (9 - i))} for i in range(5)], Letters(), 99
    )

    shards = [shard_sequences(rows, ParallelContext(dp_rank=r, dp_size=2, world_size=2)) for r in range(2)]

    assert sum(count_pairs(shard).item() for shard in shards) == 5
    for shard in shards:
        assert shard[UNIT_KEY].bincount().unique().tolist() in ([2], [0, 2])


@pytest.mark.slow
def test_loss_learner_learns_to_prefer_chosen_sequences(tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model"))
    engine, reference = (ReferenceTrainEngine() for _ in range(2))
    for each in (engine, reference):
        each.initialize(FinetuneSpec(path, total_steps=10, optimizer=OptimizerConfig(lr=3e-3)))
    batch = pair_batch(4)
    loss = PolicyPreferenceLoss(PreferenceConfig())
    learner = LossLearner(engine, loss, count_pairs, reference)
    evaluate = LossEvaluation(learner, batch, 2)
    before = evaluate(0)

    for _ in range(6):
        learner.update(batch)

    after = evaluate(6)
    assert learner.version == 6
    assert before["eval/accuracy"] == 0.5  # policy and reference are the same model
    assert after["eval/accuracy"] == 1.0
    assert after["loss/eval"] is not None
    assert before["loss/eval"] is not None
    assert after["loss/eval"] < before["loss/eval"]


def test_loss_learner_prepare_without_reference_adds_nothing() -> None:
    batch = pair_batch(1)

    LossLearner(ReferenceTrainEngine()).prepare(batch)

    assert "ref_logprobs" not in batch
