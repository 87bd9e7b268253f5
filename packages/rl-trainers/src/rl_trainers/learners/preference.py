"""Learning from preference pairs: a reward model, or a policy by DPO or IPO, as learners for the common loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from rl_contracts.batch.trajectory import PackedBatch, Trajectory
from rl_contracts.config import Reads, Settings, bounded, choice
from rl_contracts.engine import Stats, TokenOutputs
from rl_contracts.errors import DataError, EngineError
from rl_trainers.algorithms.functional.value_and_preference_losses import bradley_terry_loss, dpo_loss, ipo_loss
from rl_trainers.learners.supervised import rendered

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.chat.rendering import ChatRenderer


@dataclass
class PreferenceConfig(Settings):
    """How a policy learns from pairs."""

    setting: ClassVar[str] = "preference"
    reads: ClassVar[Reads] = {"loss": {"dpo": {"label_smoothing"}, "ipo": set(), "ipo_sum": set()}}
    loss: str = choice("dpo", ("dpo", "ipo", "ipo_sum"))
    """`dpo` (arXiv 2305.18290); `ipo` (arXiv 2310.12036), with log-probs averaged over an answer's tokens as in TRL; or
    `ipo_sum`, with their sums."""
    beta: float = bounded(0.1, "more than 0", lambda beta: beta > 0)
    """Strength of the pull to the reference policy (IPO: tau)."""
    label_smoothing: float = bounded(0.0, "in [0, 0.5)", lambda fraction: 0 <= fraction < 0.5)
    """Share of pairs that are taken to be labelled the wrong way round (conservative DPO); 0: none."""


def preference_rows(
    rows: Iterable[dict[str, Any]], renderer: ChatRenderer, max_length: int, truncate: bool = False
) -> list[Trajectory]:
    """Two trajectories per pair, chosen (reward 1) and rejected (reward 0), of the same group. What the model learns
    from is the last assistant turn; what comes before it is the prompt.

    Args:
        rows: each with the conversations `chosen` and `rejected`, and `tools` where they have any.
        truncate: cut conversations at `max_length` tokens.

    Raises:
        DataError: a conversation has no assistant turn at its end or is longer than `max_length` tokens and
            not cut, nothing of the turn is left, or both conversations of a pair are the same; names the row.
    """
    result = []
    for number, row in enumerate(rows):
        name = int(row.get("prompt_id", number))
        sides = [_side(row, side, name, renderer, max_length, truncate) for side in ("chosen", "rejected")]
        if np.array_equal(sides[0][0], sides[1][0]):
            raise DataError(f"row {name}: chosen and rejected are the same text; there is nothing to prefer. Drop it.")
        for which, (ids, mask) in enumerate(sides):
            result.append(
                Trajectory(
                    input_ids=ids,
                    loss_mask=mask,
                    logprobs=np.zeros(len(ids), dtype=np.float32),
                    versions=np.full(len(ids), -1, dtype=np.int32),
                    reward=1.0 - which,
                    prompt_id=name,
                    group_id=number,
                    episode_id=2 * number + which,
                )
            )
    return result


def _side(
    row: dict[str, Any], side: str, name: int, renderer: ChatRenderer, max_length: int, truncate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a conversation, and which of them are its last assistant turn."""
    messages = row[side]
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError(f"row {name}: expected `{side}` to end with an assistant turn, found {messages!r:.80}.")
    ids, mask = rendered(renderer, messages, row.get("tools"), f"row {name}: `{side}`")
    if len(ids) > max_length and not truncate:
        raise DataError(
            f"row {name}: `{side}` has {len(ids)} tokens, more than data.max_length ({max_length}); raise that or drop "
            "it."
        )
    learn = np.asarray(mask, dtype=bool)
    gaps = np.flatnonzero(~learn[: int(np.flatnonzero(learn)[-1])])
    learn[: int(gaps[-1]) + 1 if len(gaps) else 0] = False
    if not learn[:max_length].any():
        raise DataError(f"row {name}: nothing of the answer of `{side}` is within {max_length} tokens; drop it.")
    return np.asarray(ids[:max_length], dtype=np.int64), learn[:max_length]


def reward_model_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """`bradley_terry_loss` of the scores at the rows' last tokens."""
    if outputs.values is None:
        raise EngineError("reward model: the engine gives no scores; make it with a score head (`head=score`).")
    return bradley_terry_loss(packed.last_tokens(outputs.values), packed)


@dataclass(frozen=True)
class PolicyPreferenceLoss:
    """DPO or IPO of one packed micro-batch that holds the reference's log-probs."""

    config: PreferenceConfig

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """`(loss_sum, stats)`."""
        learn = packed["loss_mask"]
        ratios = packed.sequence_sums(torch.where(learn, outputs.logprobs - packed["ref_logprobs"], 0.0))
        if self.config.loss == "dpo":
            return dpo_loss(ratios, packed, self.config.beta, self.config.label_smoothing)
        if self.config.loss == "ipo":
            ratios = ratios / packed.sequence_sums(learn.to(ratios.dtype)).clamp(min=1)
        return ipo_loss(ratios, packed, self.config.beta)


def count_pairs(batch: TensorDict) -> torch.Tensor:
    """A rank's part of the denominator: its pairs."""
    return (batch["rewards"] > 0).sum().float()
