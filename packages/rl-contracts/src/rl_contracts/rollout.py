"""Contract of the asynchronous rollout runtime, which rl-workflows implements and rl-trainers uses."""

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
    from rl_contracts.workflow import RolloutWorkflow

__all__ = ["RolloutRuntime"]


class RolloutRuntime(ABC):
    """Runtime that generates rollouts continuously and returns batches of bounded staleness.

    One runs on each data-parallel leader. The training thread makes blocking calls; the work runs on a separate event
    loop.
    """

    @abstractmethod
    def next_batch(self) -> TensorDict:
        """Wait for this step's groups and return them (collective).

        Returns:
            this rank's sequences, in global order of (group, episode).

        Raises:
            RLError: the runtime of any rank failed; raised on every rank, with the cause.
            StopIteration: the data of some rank was exhausted by the previous batch; raised on every rank.
            StopRequestedError: some rank received a stop request while it waited; raised on every rank. No batch was
                taken, so the state can be saved.
        """

    def return_batch(self) -> None:
        """Return the last batch, which was not trained on, to the runtime. Call this instead of `end_step`.

        Afterwards `state_dict` contains its groups as accepted groups.

        Raises:
            RLError: the batch cannot be returned. This is the default.
        """
        raise RLError(f"{type(self).__name__} does not support return_batch.")

    @abstractmethod
    def end_step(self, version: int) -> None:
        """End the training step of the last batch and admit new prompts in place of its groups.

        Args:
            version: version committed on all live servers; the previous version if the step was skipped.
        """

    @abstractmethod
    def evaluate(
        self,
        data: Sequence[dict[str, Any]],
        generation: GenerationConfig,
        n: int = 1,
        workflow: RolloutWorkflow | None = None,
    ) -> list[Trajectory]:
        """Generate `n` completions per example with the current version (collective).

        The counters of the runtime in `stats` do not include these completions.

        Metrics that the workflow and the reward record go to the caller's collector
        (`rl_contracts.runtime.metrics.collect`).

        Args:
            data: examples to evaluate.
            generation: sampling settings.
            n: completions per example.
            workflow: workflow of these episodes, for example with another reward; None for the one of the training.

        Returns:
            on every rank, the trajectories of this rank's examples, in order; each has a reward.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop admitting new groups. Running groups continue."""

    @abstractmethod
    def resume(self) -> None:
        """Admit new groups again after `pause`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state (JSON values and tensors) for a later process to resume without lost or repeated work."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`. Call this before the first `next_batch`.

        A runtime that can resume with another number of ranks also has `load_states`, which takes the states of all
        previous ranks in rank order. A runtime without it can resume only with the same number of ranks.
        """

    @abstractmethod
    def stats(self) -> Metrics:
        """Return this replica's metrics since the last call.

        They include its counters (groups accepted, rejected and failed, seconds of waiting, tokens) and the metrics
        that workflows and rewards recorded. On the first replica they also include metrics of the servers.
        """

    def outcomes(self) -> list[dict[str, Any]]:
        """Return the outcomes of this replica's prompts since the last call. Empty by default.

        Each outcome is a JSON object of `prompt_id`, `epoch`, `group_id`, `outcome` and `reason`. `group_id` is null if
        the prompt was never admitted. `outcome` is `trained`, `rejected`, `failed` or `left_over`; `reason` is null if
        `trained`. `state_dict` contains outcomes that were not returned yet; they are returned after
        `load_state_dict`.
        """
        return []

    @abstractmethod
    def destroy(self) -> None:
        """Stop all background work. Safe to call twice."""
