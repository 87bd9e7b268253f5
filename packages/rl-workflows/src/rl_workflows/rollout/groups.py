"""Group of episodes of one prompt, from its start to its outcome, in training and in evaluation."""

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
"""Fields of a trajectory that have one entry per token."""

EPS = 1e-6
"""Largest standard deviation at which rewards count as equal; relative to their mean if the mean is above 1."""

ShouldAccept = Callable[[Sequence["Trajectory"]], bool]
"""Filter `(trajectories of one group) -> whether to train on it`. A rejected group is counted and replaced by another
prompt."""


def dynamic_sampling(trajectories: Sequence[Trajectory]) -> bool:
    """Return whether the rewards of a group, or any reward component, differ (DAPO, arXiv 2503.14476, section 3.2).

    With equal rewards all advantages are 0, so the group would only dilute the batch. Rewards with a sample standard
    deviation of at most `EPS` count as equal, as in the computation of advantages.
    """
    import numpy as np

    rewards = np.array(
        [
            *{
                trajectory.episode_id: (trajectory.reward, *trajectory.reward_components.values())
                for trajectory in trajectories
            }.values()
        ]
    )
    return len(rewards) > 1 and bool((rewards.std(0, ddof=1) > EPS * np.maximum(abs(rewards.mean(0)), 1.0)).any())


@dataclass(slots=True)
class FinishedGroup:
    """Outcome of one admitted group. It is accepted, rejected or failed."""

    ticket: Ticket
    prompt: dict[str, Any]
    """Example of the group."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Trajectories of all successful episodes, in order of (episode, trajectory of the episode)."""
    rejected: str | None = None
    """Reason of a rejection: `workflow` (it rejected too many episodes) or `filter`. None if not rejected."""
    error: BaseException | None = None
    """Error that failed the group, or None."""
    failures: list[BaseException] = field(default_factory=list)
    """Errors of failed episodes in order of time, also if the group was used without these episodes."""
    declined: int = 0
    """Number of episodes that the workflow rejected."""
    metrics: Metrics = field(default_factory=Metrics)
    """Metrics recorded by all episodes, including failed ones."""


class _RunningGroup:
    """State of a running group: values shared by its episodes, and their results so far."""

    __slots__ = ("cache", "decided", "epoch", "group", "needed", "prompt_id", "remaining", "succeeded")

    def __init__(self, group: FinishedGroup, size: int, needed: int, held_out: bool) -> None:
        self.group, self.remaining, self.needed = group, size, needed
        # A held-out example needs no id; its index, the group id, replaces it. Epoch -1 keeps its seeds distinct.
        self.prompt_id = int(group.prompt.get("prompt_id", group.ticket.group_id))
        self.epoch = -1 if held_out else int(group.prompt.get("epoch", 0))
        self.cache: dict[str, Any] = {}
        self.succeeded: dict[int, list[Trajectory]] = {}
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_member_done(self, sample: int, trajectories: list[Trajectory] | None, error: BaseException | None) -> None:
        """Record the end of one episode. Results after the group was decided are ignored."""
        if self.decided.done():
            return
        self.remaining -= 1
        if error is not None:
            self.group.failures.append(error)
        elif trajectories is None:
            self.group.declined += 1
        else:
            self.succeeded[sample] = trajectories
        if not self.remaining or len(self.succeeded) + self.remaining < self.needed:
            self.decided.set_result(None)


async def run_group(
    episodes: Episodes,
    prompt: dict[str, Any],
    ticket: Ticket,
    size: int,
    needed: int,
    should_accept: ShouldAccept | None = None,
) -> FinishedGroup:
    """Run the episodes of one prompt and return the outcome of the group.

    If the remaining episodes cannot change the outcome, they are cancelled and the group ends at once.

    Args:
        episodes: settings of the episodes; its `running` lists the running episodes.
        prompt: the example; each episode gets a separate copy.
        ticket: the group's admission.
        size: number of episodes.
        needed: episodes that must succeed; 0 waits for all episodes, whether they succeed or fail.
        should_accept: filter for groups with at least `needed` successful episodes.
    """
    group = FinishedGroup(ticket, prompt)
    running = _RunningGroup(group, size, needed, held_out=episodes.generation is not None)
    with collect(group.metrics):
        tasks = [asyncio.create_task(_episode(episodes, running, sample)) for sample in range(size)]
    try:
        await running.decided
    finally:  # also if the group itself is cancelled
        running.decided.cancel()
        for task in tasks:
            task.cancel()
    group.trajectories = [
        trajectory for _, trajectories in sorted(running.succeeded.items()) for trajectory in trajectories
    ]
    if len(running.succeeded) >= needed:
        group.rejected, group.error = _apply_filter(group.trajectories, should_accept)
    elif group.failures:
        group.error = group.failures[0]
    else:
        group.rejected = "workflow"
    return group


async def _episode(episodes: Episodes, running: _RunningGroup, sample: int) -> None:
    group = running.group
    context = EpisodeContext(
        running.prompt_id, group.ticket.group_id, sample, running.epoch, running.cache, episodes.clock
    )
    set_current_episode(context)
    task = asyncio.current_task()
    assert task is not None
    episodes.running[context] = task
    trajectories: list[Trajectory] | None = None
    error: Exception | None = None
    try:
        result = await episodes.workflow.arun_episode(EpisodeEngine(episodes, context), deep_copy_data(group.prompt))
        trajectories = with_ids(result, context, type(episodes.workflow).__name__)
    except asyncio.CancelledError as cancelled:
        if running.decided.done():
            raise
        # The workflow cancelled its own task, or did not catch the error of a task that it cancelled.
        error = RLError(f"the episode of {context} was cancelled by its workflow, not by the runtime.")
        error.__cause__ = cancelled
    except Exception as caught:  # noqa: BLE001 - boundary of user code; recorded and counted in the budget
        error = caught
    finally:
        del episodes.running[context]
    running.on_member_done(sample, trajectories, error)
    del group, running, task, error  # the error's traceback references this frame: avoid a reference cycle


def _apply_filter(
    trajectories: list[Trajectory], should_accept: ShouldAccept | None
) -> tuple[str | None, BaseException | None]:
    """Return the reason why the filter rejects a complete group, or the error that the filter raised."""
    try:
        return (None if should_accept is None or should_accept(trajectories) else "filter"), None
    except Exception as error:  # noqa: BLE001 - user code; the group fails and the budget counts it
        return None, error


def prompt_id_of(prompt: dict[str, Any]) -> int:
    """Return the `prompt_id` of an example.

    Raises:
        DataError: `prompt_id` is missing or not an integer.
    """
    value = prompt.get("prompt_id")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise DataError(f"example: expected an integer `prompt_id`, found {value!r}; its keys are {sorted(prompt)}.")


def deep_copy_data(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the example for one episode, with nested lists and dictionaries copied.

    Episodes must not see changes that other episodes make, and a prompt saved while it runs must be unchanged. Arrays,
    tensors and images are shared.
    """
    return {key: _deep_copy(value) for key, value in prompt.items()}


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep_copy(entry) for key, entry in value.items()}
    return [_deep_copy(entry) for entry in value] if isinstance(value, list) else value


def with_ids(
    trajectories: list[Trajectory] | None, context: EpisodeContext, workflow: str = "the workflow"
) -> list[Trajectory] | None:
    """Check the result of a workflow, and set the ids of its episode.

    Raises:
        DataError: the result is not a list, or it is empty; the arrays of a trajectory differ in length; a reward is
            not finite in float32; or the trajectories of the episode have different rewards.
        TypeError, ValueError: a reward is not a number.
    """
    if trajectories is None:
        return None
    if not isinstance(trajectories, list | tuple):
        kind = type(trajectories).__name__
        raise DataError(f"{workflow}.arun_episode returned one {kind}: expected a list of one or more trajectories.")
    if not trajectories:
        raise DataError(f"{workflow}.arun_episode returned no trajectory; return None to reject an episode.")
    for trajectory in trajectories:
        if not hasattr(trajectory, "loss_mask"):
            kind = type(trajectory).__name__
            raise DataError(f"{workflow}.arun_episode returned a list with one {kind}: expected Trajectory objects.")
        if not _is_aligned(trajectory):
            lengths = {name: len(value) for name in PER_TOKEN if (value := getattr(trajectory, name)) is not None}
            raise DataError(
                f"{workflow}.arun_episode returned a trajectory whose arrays differ in length: {lengths}; expected one "
                "entry per token in each."
            )
        trajectory.reward = float(trajectory.reward)
        if not abs(trajectory.reward) <= MAX_REWARD:
            raise DataError(
                f"{workflow}.arun_episode returned a trajectory with the reward {trajectory.reward}; expected a finite "
                f"number of at most {MAX_REWARD:.3g} in magnitude, as float32 can hold. Clip or scale the reward."
            )
        trajectory.prompt_id = context.prompt_id
        trajectory.group_id = context.group_id
        trajectory.episode_id = context.sample
    if len(trajectories) > 1 and len({trajectory.reward for trajectory in trajectories}) > 1:
        raise DataError(
            f"{workflow}.arun_episode returned {len(trajectories)} trajectories with rewards "
            f"{[trajectory.reward for trajectory in trajectories]}; expected equal rewards, because an episode has "
            "one reward. Set it on each trajectory, and set rewards of single turns in `token_rewards`."
        )
    return trajectories


def _is_aligned(trajectory: Trajectory) -> bool:
    """Return whether all arrays of a trajectory have one entry per token."""
    length, rewards = len(trajectory.input_ids), trajectory.token_rewards
    equal = len(trajectory.loss_mask) == len(trajectory.logprobs) == len(trajectory.versions) == length
    return equal and (rewards is None or len(rewards) == length)
