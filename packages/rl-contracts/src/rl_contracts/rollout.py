"""What a training loop needs of the asynchronous side. rl-workflows implements it; rl-trainers knows only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import RLError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.runtime.metrics import Metrics

__all__ = ["RolloutRuntime"]


class RolloutRuntime(ABC):
    """Keeps generation going and hands out batches under a bound on staleness.

    One runs on each data-parallel head. Calls come from the training thread and block; the work happens on a loop of
    its own.
    """

    @abstractmethod
    def next_batch(self) -> TensorDict:
        """Wait for this step's groups and return them (collective).

        Returns:
            this rank's rows, in global order of (group, episode).

        Raises:
            RLError: the runtime or another head failed; on every rank, with the cause.
            StopIteration: the data of some head were at their end with the last batch; on every rank.
            StopRequestedError: some rank was asked to stop while it waited; on every rank. No batch was taken, so that
                the state can be saved.
        """

    def return_batch(self) -> None:
        """Take the last batch back, instead of `end_step`: nothing was learned from it, and `state_dict` is to have its
        groups as accepted ones.

        Raises:
            RLError: it cannot be taken back, which is the default.
        """
        raise RLError(f"{type(self).__name__} cannot take a batch back.")

    @abstractmethod
    def end_step(self, version: int) -> None:
        """The step of the last batch is over: `version` is committed on all live servers, or was already (a skipped
        step).

        Frees the places of the batch's groups and lets new prompts in.
        """

    @abstractmethod
    def evaluate(self, data: Sequence[dict[str, Any]], generation: GenerationConfig, n: int = 1) -> list[Trajectory]:
        """Answer each row `n` times at the one version that is committed now, apart from all training counters
        (collective).

        What workflow and reward record meanwhile goes to the caller's collector
        (`rl_contracts.runtime.metrics.collect`).

        Returns:
            on every rank, the trajectories of this rank's share of the rows, in order; each has a reward.
        """

    @abstractmethod
    def pause(self) -> None:
        """Admit no new groups; those that run go on."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that a later process needs to go on with nothing lost or repeated: JSON values and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, before the first `next_batch`.

        A runtime that can go on with another number of ranks also has `load_states`, which takes the states of all
        former ranks, in order of rank; one without it is resumed with the same number alone.
        """

    @abstractmethod
    def stats(self) -> Metrics:
        """This replica's counters since the last call (groups accepted, rejected, failed, waiting seconds, tokens),
        what workflows and rewards recorded, and, on the first replica, the servers' own."""

    def outcomes(self) -> list[dict[str, Any]]:
        """What became of each prompt of this replica since the last call; one that `state_dict` found untold is told
        after the state was loaded. JSON objects of `prompt_id`, `epoch`, `group_id` (null where it was never
        admitted), `ending` (`trained`: it left in a batch; `rejected`, `failed` or `left_over`) and `reason` (null
        where it was trained on). Nothing from a runtime that keeps no such account."""
        return []

    @abstractmethod
    def destroy(self) -> None:
        """Stop everything that runs in the background. Safe to call twice."""
