"""The supervised warm-up: a plain training loop on lessons that teach some verbs and leave the others for the reward.

`rl_apps.embedded.curriculum` defines the lessons. Every warm-up answer has the right format and the right arithmetic.
On each side (adding, taking away), two verbs are *taught*: their operation is always right. For each other verb the
warm-up has an *opinion*, a preferred operation that the seed draws independently of the verb's meaning. On each side,
half of the untaught verbs are mostly added and half mostly subtracted, 60 to 40. The opinions are therefore
uninformative. A model that follows them is right about two thirds of the verbs, and so solves (2/3)^2, or 44 %, of the
two-step problems. Reinforcement learning starts from the 40 % of samples against the opinion.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_apps.embedded.curriculum import Lesson, MakeLesson
from rl_datasets.word_problems import ADDING, OPERATION_OF, TAKING, Problem

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TAUGHT_PER_SIDE = 2
TAUGHT_VERBS: frozenset[str] = frozenset(ADDING[:TAUGHT_PER_SIDE] + TAKING[:TAUGHT_PER_SIDE])
"""Verbs whose operation is always right in warm-up answers."""

OPINION_STRENGTH = 0.6
"""Fraction of warm-up answers that follow the opinion on an untaught verb."""

STEPS_WITH_EXPERTS = 1000
"""Warm-up steps of an MoE model. Some learn the taught verbs only after 500 steps; a dense model needs 300."""

Progress = Callable[[int, int, float], None]
"""Callback after each step, with the number of completed steps, the total number of steps, and the loss."""

_IGNORED = -100  # target value that torch's cross entropy skips


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised warm-up. The defaults take about 25 s on one core."""

    steps: int = 500
    """Number of optimizer steps."""
    batch_size: int = 64
    """Lessons per step."""
    problems: int = 16384
    """Number of distinct training problems in the lessons."""
    lr: float = 3e-3
    """Peak learning rate of AdamW. The rate decays to 0 along half a cosine."""
    lr_rise: int = 20
    """Steps over which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments. There is no weight decay."""
    max_grad_norm: float = 1.0
    """Maximum global gradient norm."""


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    lesson: MakeLesson,
    config: WarmUp,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place on lessons about `problems`; see the module docstring for untaught verbs.

    The loss is the mean cross entropy over the tokens of the answers, including the end tokens.

    Args:
        lesson: function that builds a lesson from a problem; see `rl_apps.embedded.curriculum.LESSONS`.
    """
    import torch
    from torch.nn import functional as F

    rng = random.Random(f"{seed} warm-up")
    chances = chances_of_adding(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0)
    model.train()
    threads = torch.get_num_threads()
    # Small tensors gain little from a second thread, and run much slower with several threads on shared cores.
    torch.set_num_threads(1)
    for step in range(config.steps):
        lessons = [lesson(p, chances, rng) for p in rng.choices(problems, k=config.batch_size)]
        input_ids, targets = _batch(lessons, tokenizer)
        # Sequences are padded on the right, so that no real token attends to padding under causal attention.
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _rate(step, config)
        optimizer.step()
        if progress is not None:
            progress(step + 1, config.steps, float(loss.detach()))
    torch.set_num_threads(threads)
    model.eval()  # type: ignore[no-untyped-call]


def _rate(step: int, config: WarmUp) -> float:
    """Return the learning rate of a step divided by its peak: a linear rise times half a cosine."""
    return min(1.0, (step + 1) / config.lr_rise) * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def _batch(lessons: Sequence[Lesson], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and targets, both int64 [lessons, longest]. Prompts and padding have the ignored target."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    encoded = iter(tokenizer([part for lesson in lessons for part in lesson], add_special_tokens=False)["input_ids"])
    input_ids, targets = [], []
    for lesson in lessons:
        parts: list[list[int]] = [next(encoded) for _ in lesson]
        target_parts = [part if turn % 2 else [_IGNORED] * len(part) for turn, part in enumerate(parts)]
        input_ids.append(torch.tensor([token for part in parts for token in part]))
        targets.append(torch.tensor([token for part in target_parts for token in part]))
    return (
        pad_sequence(input_ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(targets, batch_first=True, padding_value=_IGNORED),
    )


def chances_of_adding(seed: int) -> dict[str, float]:
    """Return for each verb the probability that a warm-up answer adds: 0 or 1 if taught, else the opinion."""
    chances = {verb: 1.0 if operation == "+" else 0.0 for verb, operation in OPERATION_OF.items()}
    for side in (ADDING, TAKING):
        untaught = [verb for verb in side if verb not in TAUGHT_VERBS]
        random.Random(f"{seed} {side[0]}").shuffle(untaught)
        half = len(untaught) // 2
        chances |= dict.fromkeys(untaught[:half], OPINION_STRENGTH)
        chances |= dict.fromkeys(untaught[half:], 1 - OPINION_STRENGTH)
    return chances
