"""Rollout runtime for training loops: blocking calls that are collective over all trainer ranks.

Each data-parallel leader runs a `RolloutScheduler` on a separate event loop. The other ranks only take part in the
exchange of sequences. Waiting ranks synchronize every `POLL_SECONDS`, so a failure on one leader ends the wait of all
ranks within a second.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_contracts.batch.packing import even_ranges
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.config import require
from rl_contracts.errors import ConfigError, StopRequestedError
from rl_contracts.rollout import RolloutRuntime
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.runtime.clock import Clock, SystemClock
from rl_contracts.runtime.metrics import Metrics, record_all
from rl_workflows.rollout.config import RolloutConfig, groups_per_replica
from rl_workflows.rollout.groups import FinishedGroup, ShouldAccept, dynamic_sampling
from rl_workflows.rollout.resharding import leader_states
from rl_workflows.rollout.scheduler import OnCompletions, RolloutScheduler
from rl_workflows.rollout.staleness import StalenessManager

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.config import GenerationConfig
    from rl_contracts.errors import StalledError
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.workflow import RolloutWorkflow

POLL_SECONDS = 0.5
"""Seconds between two synchronizations of waiting ranks."""

CALL_SECONDS = 60.0
"""Time limit in seconds for calls that do not wait for episodes."""

GC_THRESHOLDS = (1_000_000, 20, 50)
"""Arguments of `gc.set_threshold`. A young collection runs when allocations exceed deallocations by a million objects,
about 50,000 episodes. A steady run with 100,000 outstanding episodes had one collection per 120,000 episodes, because
new episodes replace finished ones."""


COLLECTION_FRACTION = 0.01
"""Maximum fraction of the time to spend on garbage collection at the ends of steps. These collections free tensors in
reference cycles: a tensor is a small Python object, so the thresholds ignore its memory."""
FULL_COLLECTION_EVERY = 50
"""Number of collections per full collection. Only a full collection frees objects that survived the end of their
step."""


class DistRollout(RolloutRuntime):
    """Asynchronous rollouts under the admission rule of `rl_workflows.rollout.staleness`.

    Args:
        engine: client of the inference servers; used on data-parallel leaders only.
        workflow: workflow that each episode runs.
        prompts: examples of this leader, finite or endless. They are dictionaries with an integer `prompt_id` and, if
            the data is repeated, an `epoch`. `rl_workflows.rollout.prompt_source` states the requirements for resuming.
        batch_size: groups per step over all leaders.
        config: settings.
        parallel: position of this rank among the trainer ranks.
        minibatches: optimizer steps per batch. The batch's entry `minibatch` assigns each sequence to a minibatch.
        should_accept: filter of complete groups, in addition to `config.dynamic_sampling`.
        on_completions: called with this leader's completions, for example to write them to disk; see
            `rl_workflows.rollout.scheduler.OnCompletions`.
        clock: clock for all times; the system clock by default.
        loop: thread with the event loop for the engine's coroutines, if the engine is shared. With None, the runtime
            creates a separate one, and `destroy` also closes the engine.
        version: version that the servers hold at the start.
        on_stuck_trainer: called on the loop when the trainer made no call for `TRAINER_TIMEOUT` of
            `rl_workflows.rollout.watchdog`. It should end the process, because an error cannot be raised in the
            trainer's thread. The next call raises the error in any case. None: the trainer is not checked.
        stop: returns whether this process received a stop request; polled while `next_batch` waits. None: never.
        seed: seed from which each sampling seed is derived, together with prompt, epoch and sample.

    Raises:
        ConfigError: `batch_size` or `max_concurrent` is not divisible by the number of leaders.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        prompts: Iterable[dict[str, Any]],
        *,
        batch_size: int,
        config: RolloutConfig | None = None,
        parallel: ParallelContext | None = None,
        minibatches: int = 1,
        should_accept: ShouldAccept | None = None,
        on_completions: OnCompletions | None = None,
        clock: Clock | None = None,
        loop: LoopThread | None = None,
        version: int = 0,
        on_stuck_trainer: Callable[[StalledError], None] | None = None,
        stop: Callable[[], bool] | None = None,
        seed: int = 0,
    ) -> None:
        self._stop = stop
        self.config = config or RolloutConfig()
        self.parallel = parallel or ParallelContext()
        sequences = batch_size * self.config.needed
        require(
            1 <= minibatches <= sequences,
            "actor.minibatches",
            f"1 to {sequences}, the sequences per batch",
            minibatches,
        )
        self.batch_size, self.minibatches = batch_size, minibatches
        replicas = self.parallel.dp_size
        concurrent = self.config.max_concurrent
        manager = StalenessManager(
            groups_per_replica(batch_size, replicas, "data.batch_size"),
            self.config.max_staleness,
            None if concurrent is None else groups_per_replica(concurrent, replicas, "rollout.max_concurrent"),
            version=version,
            first_id=self.parallel.dp_rank,
            id_stride=replicas,
        )
        self._owns_loop = loop is None
        self.loop = loop or LoopThread(f"rollout-{self.parallel.rank}")
        self.scheduler = RolloutScheduler(
            engine,
            workflow,
            prompts,
            manager,
            self.config,
            clock or SystemClock(),
            _accept_all_of(should_accept, dynamic_sampling if self.config.dynamic_sampling else None),
            on_completions,
            on_stuck_trainer,
            seed,
        )
        self._wait_seconds = 0.0
        self._collections = 0
        self._next_collection = 0.0
        self._destroyed = False

    def next_batch(self) -> TensorDict:
        from rl_contracts.batch.redistribution import redistribute
        from rl_workflows.rollout.batches import assemble

        with self.scheduler.watchdog.trainer_call():
            start = self.scheduler.clock.now()
            total = self._wait_for_all()
            self._wait_seconds += self.scheduler.clock.now() - start
            if not total:
                raise StopIteration
            with self.parallel.agree_on_errors("assembling the batch"):
                groups = self._call(self.scheduler.take()) if self.parallel.is_dp_leader else []
                batch = assemble(groups, self.scheduler.manager.version)
                if total < self.batch_size and self.parallel.is_dp_leader:
                    self._call(self.scheduler.finish())
            # Only the last batch of a finite data set is smaller.
            minibatches = self.minibatches if total == self.batch_size else min(self.minibatches, total)
            return redistribute(batch, self.parallel, minibatches)

    def return_batch(self) -> None:
        if self.parallel.is_dp_leader:
            self._call(self.scheduler.return_batch())

    def end_step(self, version: int) -> None:
        self._collect_garbage()
        if self.parallel.is_dp_leader:
            self._call(self.scheduler.end_step(version))

    def evaluate(
        self,
        data: Sequence[dict[str, Any]],
        generation: GenerationConfig,
        n: int = 1,
        workflow: RolloutWorkflow | None = None,
    ) -> list[Trajectory]:
        from rl_workflows.rollout.evaluation import evaluate_held_out

        shard = even_ranges(len(data), self.parallel.dp_size)[self.parallel.dp_rank]
        groups: list[FinishedGroup] = []
        with self.parallel.agree_on_errors("evaluating"):
            if self.parallel.is_dp_leader:
                episodes = self.scheduler.episodes
                workflow = workflow or episodes.workflow
                episodes = replace(
                    episodes, workflow=workflow, label="eval", generation=generation, running={}, tokens=0
                )
                version, examples = self.scheduler.manager.version, data[shard.start : shard.stop]
                groups = self._wait(evaluate_held_out(episodes, examples, shard.start, n, version, self.config))
        for group in groups:
            record_all(group.metrics)
        return [trajectory for group in groups for trajectory in group.trajectories]

    def pause(self) -> None:
        self._call(self.scheduler.set_paused(True))

    def resume(self) -> None:
        self._call(self.scheduler.set_paused(False))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank. Call it between `end_step` and `next_batch`.

        Raises:
            RLError: a batch is being trained on.
        """
        from rl_workflows.rollout.batches import groups_to_state

        state: dict[str, Any] = {"layout": self._layout}
        if self.parallel.is_dp_leader:
            state |= self._call(self.scheduler.state_dict())
            state |= groups_to_state(state["groups"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the same rank.

        Raises:
            ConfigError: the saved run had another number of data-parallel leaders, or the state is of another leader.
        """
        if state["layout"] != self._layout:
            raise ConfigError(
                f"rollout state: expected the layout {self._layout}, found {state['layout']}. To resume with another "
                "number of trainer replicas, pass the states of all ranks to load_states."
            )
        if self.parallel.is_dp_leader:
            self._call(self.scheduler.load_state_dict(_with_groups(state)))

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore from the states of all ranks of a run, in rank order, for any previous number and layout of ranks.

        No prompt is lost or repeated, even if the previous leaders had drawn different amounts of data.

        Raises:
            ConfigError: the state of a leader is missing, or states have different versions; or the number of leaders
                changed and the data cannot be divided among the new ones.
        """
        own_state = states[self.parallel.rank] if self.parallel.rank < len(states) else {"layout": None}
        if own_state["layout"] == self._layout and ("manager" in own_state or not self.parallel.is_dp_leader):
            self.load_state_dict(own_state)
        elif self.parallel.is_dp_leader:
            saved = [_with_groups(state) for state in leader_states(states)]
            self._call(self.scheduler.load_states(saved, self.parallel.dp_rank, self.parallel.dp_size))

    @property
    def _layout(self) -> dict[str, int]:
        return {"heads": self.parallel.dp_size, "head": self.parallel.dp_rank}

    def stats(self) -> Metrics:
        """Return this leader's metrics since the last call.

        - `groups/accepted`; `groups/rejected` and `groups/rejected/<reason>`; `groups/failed` and
          `groups/failed/<boundary>`.
        - `groups/left_over`: prompts that are not trained on because the data of some leader was exhausted; 0 before
          the last batch.
        - `groups/outstanding`: current number of outstanding groups.
        - `groups/staleness_mean` and `groups/staleness_max`: versions from a group's start to its batch.
        - `groups/wait_seconds`: seconds that `next_batch` waited.
        - `episodes/failed/<boundary>` and `tokens/generated`.
        - `finished/reward_mean`, `finished/length_mean` and `finished/truncated_fraction`: over all completions of
          finished groups, including groups that are not trained on.
        - Metrics that episodes recorded.
        - `server/<name>`: metrics of the servers, on the first leader only.
        """
        if not self.parallel.is_dp_leader:
            return Metrics()
        metrics = self._call(self.scheduler.stats(of_servers=self.parallel.dp_rank == 0))
        metrics.add("groups/wait_seconds", self._wait_seconds, kind="sum")
        self._wait_seconds = 0.0
        return metrics

    def outcomes(self) -> list[dict[str, Any]]:
        return self._call(self.scheduler.take_outcomes()) if self.parallel.is_dp_leader else []

    def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        if self.parallel.is_dp_leader:
            self.loop.run(self.scheduler.close(), CALL_SECONDS)
        if self._owns_loop:
            if self.parallel.is_dp_leader:
                self.loop.run(self.scheduler.engine.destroy(), CALL_SECONDS)
            self.loop.close()

    def _wait_for_all(self) -> int:
        """Wait until every leader has a batch, and return the number of groups in all of them."""
        poll = None if self.parallel.world_size == 1 and self._stop is None else POLL_SECONDS
        waiting = False
        while True:
            groups: int | None = 0
            with self.parallel.agree_on_errors("collecting rollouts"):
                if self.parallel.is_dp_leader:
                    if not waiting:
                        self._call(self.scheduler.begin_wait())
                        waiting = True
                    groups = self._wait(self.scheduler.fill(poll))
            stop_requested = self._stop is not None and self._stop()
            group_counts, stop_requests = zip(*self.parallel.gather_json([groups, stop_requested]), strict=True)
            if any(stop_requests):
                raise StopRequestedError("the run received a stop request while it waited for a batch")
            if None not in group_counts:
                return int(sum(group_counts))

    def _collect_garbage(self) -> None:
        start = time.monotonic()
        if start < self._next_collection:
            return
        self._collections += 1
        gc.collect(1 if self._collections % FULL_COLLECTION_EVERY else 2)
        end = time.monotonic()
        self._next_collection = end + (end - start) / COLLECTION_FRACTION

    def _call[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._wait(coroutine, CALL_SECONDS)

    def _wait[T](self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        The watchdog ends waits for episodes. Only the loop itself is monitored here.
        """
        with self.scheduler.watchdog.trainer_call():
            return self.loop.run(coroutine, timeout, blocked=self.config.stall_timeout)


def _with_groups(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a leader with its groups rebuilt from `groups_to_state`."""
    from rl_workflows.rollout.batches import groups_from_state

    return state | {"groups": groups_from_state(state)}


def _accept_all_of(*filters: ShouldAccept | None) -> ShouldAccept | None:
    active = [f for f in filters if f is not None]
    if not active:
        return None
    return lambda trajectories: all(accepts(trajectories) for accepts in active)


def tune_garbage_collection() -> None:
    """Reduce how often Python's cycle collector visits all outstanding episodes.

    An outstanding episode has about twenty tracked objects (coroutines, a task, requests). They survive the young
    collections, and each full collection then visits them. With 100,000 episodes and Python's default thresholds, this
    nearly doubles the processor time of an episode. A young collection per 100,000 new objects still takes a quarter of
    the processor time.

    The runtime creates no cycles (verified by a test), so reference counts free all its objects. Cycles that workflows
    and libraries create are still freed, only later. Objects that exist at the call, mostly modules, are never visited
    again.

    The setting affects the whole process. The runtime therefore does not change it: the program calls this function
    once, after its imports and before the first episode.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
