"""Learning from preference pairs: reward-model, DPO and IPO losses for the common training loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from rl_contracts.batch.trajectory import PackedBatch, Trajectory
from rl_contracts.chat.image_messages import has_images
from rl_contracts.config import Reads, Settings, bounded, choice
from rl_contracts.engine import Stats, TokenOutputs
from rl_contracts.errors import DataError, EngineError
from rl_trainers.algorithms.functional.value_and_preference_losses import bradley_terry_loss, dpo_loss, ipo_loss
from rl_trainers.learners.supervised import render_conversation

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.chat.rendering import ChatRenderer


@dataclass
class PreferenceConfig(Settings):
    """Settings for learning a policy from preference pairs."""

    setting: ClassVar[str] = "preference"
    reads: ClassVar[Reads] = {"loss": {"dpo": {"label_smoothing"}, "ipo": set(), "ipo_sum": set()}}
    loss: str = choice("dpo", ("dpo", "ipo", "ipo_sum"))
    """Preference loss: `dpo` (arXiv 2305.18290), `ipo` (arXiv 2310.12036, with log-ratios averaged over a completion's
    tokens as in TRL), or `ipo_sum` (with summed log-ratios)."""
    beta: float = bounded(0.1, "more than 0", lambda beta: beta > 0)
    """Strength of the regularization towards the reference policy (tau in IPO)."""
    label_smoothing: float = bounded(0.0, "in [0, 0.5)", lambda fraction: 0 <= fraction < 0.5)
    """Assumed fraction of pairs with swapped labels (conservative DPO); 0 disables smoothing."""


def preference_sequences(
    rows: Iterable[dict[str, Any]], renderer: ChatRenderer, max_length: int, truncate: bool = False
) -> list[Trajectory]:
    """Return two trajectories per pair, chosen (reward 1) and rejected (reward 0), in the same group.

    Only the last assistant turn is trained; everything before it is the prompt.

    Args:
        rows: examples with the conversations `chosen` and `rejected`, and optionally `tools`.
        renderer: turns conversations into tokens.
        max_length: longest conversation, in tokens.
        truncate: whether to cut longer conversations at `max_length` tokens.

    Raises:
        DataError: a conversation does not end with an assistant turn, has images, is too long without `truncate`, or
            has no token of that turn after truncation; or a pair has two equal conversations. The message names the
            example.
    """
    result = []
    for index, row in enumerate(rows):
        name = int(row.get("prompt_id", index))
        sides = [_render_side(row, side, name, renderer, max_length, truncate) for side in ("chosen", "rejected")]
        if np.array_equal(sides[0][0], sides[1][0]):
            raise DataError(f"example {name}: `chosen` and `rejected` have the same tokens; remove the example.")
        for which, (ids, mask) in enumerate(sides):
            result.append(
                Trajectory(
                    input_ids=ids,
                    loss_mask=mask,
                    logprobs=np.zeros(len(ids), dtype=np.float32),
                    versions=np.full(len(ids), -1, dtype=np.int32),
                    reward=1.0 - which,
                    prompt_id=name,
                    group_id=index,
                    episode_id=2 * index + which,
                )
            )
    return result


def _render_side(
    row: dict[str, Any], side: str, name: int, renderer: ChatRenderer, max_length: int, truncate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a conversation, and a mask of its last assistant turn."""
    messages = row[side]
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError(f"example {name}: expected `{side}` to end with an assistant turn, found {messages!r:.80}.")
    if has_images(messages):
        raise DataError(f"example {name}: `{side}` has images, but preference training reads only text; remove them.")
    ids, mask, _ = render_conversation(renderer, messages, row.get("tools"), f"example {name}: `{side}`")
    if len(ids) > max_length and not truncate:
        raise DataError(
            f"example {name}: `{side}` has {len(ids)} tokens, more than data.max_length={max_length}; raise the limit "
            "or remove the example."
        )
    last_turn = np.asarray(mask, dtype=bool)
    gaps = np.flatnonzero(~last_turn[: int(np.flatnonzero(last_turn)[-1])])
    last_turn[: int(gaps[-1]) + 1 if len(gaps) else 0] = False
    if not last_turn[:max_length].any():
        raise DataError(
            f"example {name}: the last turn of `{side}` has no token within data.max_length={max_length}; raise the "
            "limit or remove the example."
        )
    return np.asarray(ids[:max_length], dtype=np.int64), last_turn[:max_length]


def reward_model_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Return the `bradley_terry_loss` of the scores at the last token of each sequence.

    Raises:
        EngineError: the model has no score head.
    """
    if outputs.values is None:
        raise EngineError("reward model: the engine's outputs have no scores; build it with a score head (head=score).")
    return bradley_terry_loss(packed.last_tokens(outputs.values), packed)


@dataclass(frozen=True)
class PolicyPreferenceLoss:
    """DPO or IPO loss of one packed micro-batch, which must have the reference policy's log-probs."""

    config: PreferenceConfig

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """Return `(loss_sum, stats)`."""
        learn = packed["loss_mask"]
        ratios = packed.sequence_sums(torch.where(learn, outputs.logprobs - packed["ref_logprobs"], 0.0))
        if self.config.loss == "dpo":
            return dpo_loss(ratios, packed, self.config.beta, self.config.label_smoothing)
        if self.config.loss == "ipo":
            ratios = ratios / packed.sequence_sums(learn.to(ratios.dtype)).clamp(min=1)
        return ipo_loss(ratios, packed, self.config.beta)


def count_pairs(batch: TensorDict) -> torch.Tensor:
    """Return a rank's contribution to the denominator, counted in pairs."""
    return (batch["rewards"] > 0).sum().float()
