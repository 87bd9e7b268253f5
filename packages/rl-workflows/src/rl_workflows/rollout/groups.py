"""A group: one prompt, fanned out into episodes, and what became of it. In training and in evaluation alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError, RLError
from rl_contracts.reward import MAX_REWARD
from rl_contracts.runtime.metrics import Metrics, collect
from rl_workflows.rollout.episode import EpisodeContext, EpisodeEngine, Episodes, set_current_episode

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_workflows.rollout.staleness import Ticket

PER_TOKEN = ("input_ids", "loss_mask", "logprobs", "versions", "token_rewards")
"""Arrays of a trajectory that speak of its tokens."""

EPS = 1e-6
"""Of the mean, if that is above 1."""

ShouldAccept = Callable[[Sequence["Trajectory"]], bool]
"""`(trajectories of one group) -> whether it is trained on`. A rejected group is replaced and its prompt counted."""


def dynamic_sampling(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group, or any of their parts, differ (DAPO, arXiv 2503.14476, section 3.2).

    Equal rewards give every member the advantage 0: the group would only thin the batch. Rewards whose sample standard
    deviation is at most `EPS` count as equal, as they do in advantages.
    """
    import numpy as np

    rewards = np.array(
        [*{row.episode_id: (row.reward, *row.reward_components.values()) for row in trajectories}.values()]
    )
    return len(rewards) > 1 and bool((rewards.std(0, ddof=1) > EPS * np.maximum(abs(rewards.mean(0)), 1.0)).any())


@dataclass(slots=True)
class FinishedGroup:
    """What became of one admission. Exactly one of accepted, rejected and failed."""

    ticket: Ticket
    prompt: dict[str, Any]
    """The data row."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Of all members that succeeded, in order of (episode, trajectory of the episode)."""
    rejected: str | None = None
    """Why it was rejected: `workflow` (too many members were) or `filter`."""
    error: BaseException | None = None
    """Why it failed."""
    failures: list[BaseException] = field(default_factory=list)
    """Errors of members, in the order in which they failed, also of a group that went on without them."""
    declined: int = 0
    """Members that the workflow rejected."""
    figures: Metrics = field(default_factory=Metrics)
    """What its episodes recorded, also those that failed."""


class _Members:
    """A group whose members run: what they have in common, and what has become of them so far."""

    __slots__ = ("cache", "decided", "epoch", "group", "left", "needed", "prompt_id", "succeeded")

    def __init__(self, group: FinishedGroup, size: int, needed: int, held_out: bool) -> None:
        self.group, self.left, self.needed = group, size, needed
        # a held-out row needs no id: the group's, its index, stands in; the epoch keeps its seeds apart from training
        self.prompt_id = int(group.prompt.get("prompt_id", group.ticket.group_id))
        self.epoch = -1 if held_out else int(group.prompt.get("epoch", 0))
        self.cache: dict[str, Any] = {}
        self.succeeded: dict[int, list[Trajectory]] = {}
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_member_done(self, sample: int, trajectories: list[Trajectory] | None, error: BaseException | None) -> None:
        """One member ended. Whatever comes after the decision is too late."""
        if self.decided.done():
            return
        self.left -= 1
        if error is not None:
            self.group.failures.append(error)
        elif trajectories is None:
            self.group.declined += 1
        else:
            self.succeeded[sample] = trajectories
        if not self.left or len(self.succeeded) + self.left < self.needed:
            self.decided.set_result(None)


async def run_group(
    episodes: Episodes,
    prompt: dict[str, Any],
    ticket: Ticket,
    size: int,
    needed: int,
    should_accept: ShouldAccept | None = None,
) -> FinishedGroup:
    """Fan a prompt out into episodes, end those that can no longer matter, and say what became of the group.

    Args:
        episodes: how they are run; those that run are in its `running`.
        prompt: the data row; each episode gets a copy of its own.
        ticket: the group's admission.
        size: episodes.
        needed: episodes that must succeed for the group to go on without the others; 0 lets every one end by itself.
        should_accept: filter of a group that has what it needs.
    """
    group = FinishedGroup(ticket, prompt)
    members = _Members(group, size, needed, held_out=episodes.generation is not None)
    with collect(group.figures):
        tasks = [asyncio.create_task(_episode(episodes, members, sample)) for sample in range(size)]
    try:
        await members.decided
    finally:  # also where the group itself is cancelled
        members.decided.cancel()
        for task in tasks:
            task.cancel()
    group.trajectories = [answer for _, answers in sorted(members.succeeded.items()) for answer in answers]
    if len(members.succeeded) >= needed:
        group.rejected, group.error = _filtered(group.trajectories, should_accept)
    elif group.failures:
        group.error = group.failures[0]
    else:
        group.rejected = "workflow"
    return group


async def _episode(episodes: Episodes, members: _Members, sample: int) -> None:
    group = members.group
    context = EpisodeContext(
        members.prompt_id, group.ticket.group_id, sample, members.epoch, members.cache, episodes.clock
    )
    set_current_episode(context)
    task = asyncio.current_task()
    assert task is not None
    episodes.running[context] = task
    trajectories: list[Trajectory] | None = None
    error: Exception | None = None
    try:
        found = await episodes.workflow.arun_episode(EpisodeEngine(episodes, context), deep_copy_data(group.prompt))
        trajectories = with_ids(found, context, type(episodes.workflow).__name__)
    except asyncio.CancelledError as killed:
        if members.decided.done():
            raise
        # a workflow cancelled the task it runs in, or let the error of a task that it cancelled through
        error = RLError(
            f"the episode of {context} was cancelled, but not by the runtime: by something in the workflow."
        )
        error.__cause__ = killed
    except Exception as caught:  # noqa: BLE001 - the boundary of user code: recorded, counted, held against the budget
        error = caught
    finally:
        del episodes.running[context]
    members.on_member_done(sample, trajectories, error)
    del group, members, task, error  # the error's traceback holds this frame, which would hold the error


def _filtered(
    trajectories: list[Trajectory], should_accept: ShouldAccept | None
) -> tuple[str | None, BaseException | None]:
    """Why a complete group is rejected, or the error of the filter."""
    try:
        return (None if should_accept is None or should_accept(trajectories) else "filter"), None
    except Exception as error:  # noqa: BLE001 - user code: the group fails with it and the budget counts it
        return None, error


def prompt_id_of(prompt: dict[str, Any]) -> int:
    """The data row's `prompt_id`.

    Raises:
        DataError: it has none, or one that is not an integer.
    """
    value = prompt.get("prompt_id")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise DataError(f"data row: expected an integer `prompt_id`, found {value!r}; its keys are {sorted(prompt)}.")


def deep_copy_data(prompt: dict[str, Any]) -> dict[str, Any]:
    """A copy for one episode, lists and dictionaries in it copied as well: members must not see each other's edits, and
    a prompt that is saved while it runs must be as it came. Arrays, tensors and images are shared."""
    return {key: _copied(value) for key, value in prompt.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if isinstance(value, list) else value


def with_ids(
    trajectories: list[Trajectory] | None, context: EpisodeContext, workflow: str = "the workflow"
) -> list[Trajectory] | None:
    """What a workflow returned, with the ids of its episode.

    Raises:
        DataError: it is no list or an empty one; arrays of a trajectory differ in length; a reward is not finite in
            float32; or the rewards of its rows differ, of which an episode has one.
        TypeError, ValueError: a reward is no number.
    """
    if trajectories is None:
        return None
    if not isinstance(trajectories, list | tuple):
        kind = type(trajectories).__name__
        raise DataError(f"{workflow}.arun_episode returned one {kind}: expected a list, of one trajectory or several.")
    if not trajectories:
        raise DataError(f"{workflow}.arun_episode returned no trajectory; return None to reject an episode.")
    for trajectory in trajectories:
        if not hasattr(trajectory, "loss_mask"):
            kind = type(trajectory).__name__
            raise DataError(f"{workflow}.arun_episode returned a list with one {kind}: expected Trajectory objects.")
        if not _aligned(trajectory):
            lengths = {name: len(value) for name in PER_TOKEN if (value := getattr(trajectory, name)) is not None}
            raise DataError(
                f"{workflow}.arun_episode returned a trajectory whose arrays differ in length: {lengths}; expected one "
                "entry per token in each."
            )
        trajectory.reward = float(trajectory.reward)
        if not abs(trajectory.reward) <= MAX_REWARD:
            raise DataError(
                f"{workflow}.arun_episode returned a trajectory with the reward {trajectory.reward}; expected a number "
                f"that float32 can hold, at most {MAX_REWARD:.3g} in size. Clip or scale the reward."
            )
        trajectory.prompt_id = context.prompt_id
        trajectory.group_id = context.group_id
        trajectory.episode_id = context.sample
    if len(trajectories) > 1 and len({trajectory.reward for trajectory in trajectories}) > 1:
        raise DataError(
            f"{workflow}.arun_episode returned {len(trajectories)} rows with the rewards "
            f"{[trajectory.reward for trajectory in trajectories]}; expected the same in each: an episode has one "
            "reward, its outcome. Give each row that of the whole episode, and what single turns earned as its "
            "`token_rewards`."
        )
    return trajectories


def _aligned(trajectory: Trajectory) -> bool:
    """Whether the arrays of a trajectory have one entry per token each."""
    length, rewards = len(trajectory.input_ids), trajectory.token_rewards
    same = len(trajectory.loss_mask) == len(trajectory.logprobs) == len(trajectory.versions) == length
    return same and (rewards is None or len(rewards) == length)
