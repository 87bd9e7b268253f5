"""The supervised warm-up: a plain training loop on lessons, which teach some verbs and leave the others for the reward.
What a lesson looks like is in `rl_apps.embedded.curriculum`.

Every warm-up answer has the right form and the right arithmetic. Of the verbs on each side (adding, taking away) two
are *taught*: their operation is always right. For each of the others the warm-up only has an opinion, drawn by the seed
without regard to what the verb means: on each side half of the untaught verbs are mostly added and half mostly taken
away, 60 to 40. So a verb's opinion says nothing about its meaning, and a model that follows the opinions is right about
two thirds of the verbs: (2/3)^2, or 44 %, of the two-step problems. The 40 % are what reinforcement starts from.
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
"""The verbs whose operation the warm-up answers always have right."""

OPINION_STRENGTH = 0.6
"""Share of the warm-up answers that follow the opinion of an untaught verb."""

STEPS_WITH_EXPERTS = 1000
"""Steps of a model with experts: some learn what the taught verbs mean only after 500, where one without has learned it
after 300."""

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps to do, and the loss of the step."""

_IGNORED = -100  # the target that torch's cross entropy skips


@dataclass(frozen=True)
class WarmUp:
    """The short supervised training on lessons. The defaults take about 25 s of one core."""

    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 64
    """Lessons per step."""
    problems: int = 16384
    """Distinct problems of the training split that the lessons are about."""
    lr: float = 3e-3
    """Peak learning rate of AdamW; it falls to 0 along half a cosine."""
    lr_rise: int = 20
    """Steps over which the rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's moments; there is no weight decay."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped."""


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    lesson: MakeLesson,
    config: WarmUp,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place on lessons about `problems`, whose untaught verbs follow opinions (see above).

    The loss is the mean cross entropy over the answers' tokens, the end tokens among them.

    Args:
        lesson: what a lesson is, see `rl_apps.embedded.curriculum.LESSONS`.
    """
    import torch
    from torch.nn import functional as F

    rng = random.Random(f"{seed} warm-up")
    chances = chances_of_adding(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0)
    model.train()
    threads = torch.get_num_threads()
    # tensors this small gain little from a second thread, and lose much where cores are shared
    torch.set_num_threads(1)
    for step in range(config.steps):
        lessons = [lesson(p, chances, rng) for p in rng.choices(problems, k=config.batch_size)]
        input_ids, targets = _batch(lessons, tokenizer)
        # Rows are padded on the right, so that under causal attention no real token sees a pad.
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
    """The learning rate of a step over its peak: a linear rise under half a cosine."""
    return min(1.0, (step + 1) / config.lr_rise) * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def _batch(lessons: Sequence[Lesson], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets of lessons, both int64 [lessons, longest]; prompts and pads are no targets."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    encoded = iter(tokenizer([part for lesson in lessons for part in lesson], add_special_tokens=False)["input_ids"])
    input_ids, targets = [], []
    for lesson in lessons:
        parts: list[list[int]] = [next(encoded) for _ in lesson]
        wanted = [part if turn % 2 else [_IGNORED] * len(part) for turn, part in enumerate(parts)]
        input_ids.append(torch.tensor([token for part in parts for token in part]))
        targets.append(torch.tensor([token for part in wanted for token in part]))
    return (
        pad_sequence(input_ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(targets, batch_first=True, padding_value=_IGNORED),
    )


def chances_of_adding(seed: int) -> dict[str, float]:
    """For each verb the probability that a warm-up answer adds: 0 or 1 if it is taught, else its opinion."""
    chances = {verb: 1.0 if operation == "+" else 0.0 for verb, operation in OPERATION_OF.items()}
    for side in (ADDING, TAKING):
        untaught = [verb for verb in side if verb not in TAUGHT_VERBS]
        random.Random(f"{seed} {side[0]}").shuffle(untaught)
        half = len(untaught) // 2
        chances |= dict.fromkeys(untaught[:half], OPINION_STRENGTH)
        chances |= dict.fromkeys(untaught[half:], 1 - OPINION_STRENGTH)
    return chances
