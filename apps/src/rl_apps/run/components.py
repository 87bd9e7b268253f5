"""Components of a trainer process, each built from the config of its run. The app's program connects them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import rl_trainers
import rl_workflows
from rl_apps.run.app import Run
from rl_apps.run.chat_template import read_tokenizer
from rl_apps.run.sequence_lengths import lengths_of, longest_row
from rl_apps.settings.data import Rows, held_out_rows, load_rows
from rl_apps.settings.device_layout import Devices, Layout
from rl_apps.settings.evaluation_sets import evaluated_configs
from rl_contracts import registry
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.data import FinetuneSpec, ServeSpec
from rl_contracts.errors import InferenceError, RLError
from rl_contracts.models.directory import image_token
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.runtime.logging import get_logger
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec
from rl_contracts.workflow import AgentWorkflow, Environment
from rl_launchers.supervise.interrupts import ONE_REQUEST
from rl_launchers.supervise.server_health import probe
from rl_monitor.run_directory import names_of

if TYPE_CHECKING:
    from rl_apps.settings.config import RunConfig
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.engine import TrainEngine, TrainEngineConfig
    from rl_contracts.inference import InferenceEngine, ServerSource
    from rl_contracts.rollout import RolloutRuntime
    from rl_contracts.workflow import RolloutWorkflow
    from rl_datasets import PromptLoader
    from rl_trainers.run_log.evaluation import Evaluation

__all__ = ["Components"]

log = get_logger("apps.components")

CLOSE_SECONDS = 10.0
"""Seconds to wait for a component to close when a run ends."""

_UPDATE_FRACTION = 0.9
"""Fraction of `publish.timeout` after which the client evicts a server that stages a version, so that the publication
can still succeed with the other servers."""

_REJOIN_MARGIN = 60.0
"""Seconds, in addition to the `ready_timeout` of a restarted server, to notice its loss and to load the committed
weights."""

STUCK_EXIT_CODE = 70
"""Exit code of a trainer process that was ended because its training thread was stuck."""


def _is_subclass(component: Any, base: type) -> bool:
    return isinstance(component, type) and issubclass(component, base)


class Destroyable(Protocol):
    """Component with a `destroy` method."""

    def destroy(self) -> None:
        """Release its resources."""


class SigtermHandler:
    """SIGTERM handler while a trainer is being built. It exits normally, so that all open components are closed.

    If an import swallows the SystemExit, `Components.recovery` sees the request in `received` and exits.
    """

    received = False

    def __call__(self, number: int, _: object) -> None:
        self.received = True
        sys.exit(128 + number)


class Components(ExitStack):
    """Builds the components of a trainer process, and destroys them in reverse order, also after an error.

    Example:
        with Components(run) as components:
            engine = components.engine()
    """

    def __init__(self, run: Run[Any]) -> None:
        super().__init__()
        self.run, self.config = run, run.config
        self.steps: int = run.config.total_steps
        """Steps of the run, over which learning rates decay. `rows` of the training data may lower it."""
        self.stop_requested = threading.Event()
        self._at_stop: list[Callable[[], None]] = []

    def add[D: Destroyable](self, component: D) -> D:
        """Return a component, and register it to be destroyed at the end."""
        self.callback(component.destroy)
        return component

    def engine(self, settings: TrainEngineConfig | None = None, spec: FinetuneSpec | None = None) -> TrainEngine:
        """Build and initialize a train engine of this rank.

        Args:
            settings: settings of the engine of another model, such as a reference; None: of the trained model.
            spec: training settings of another model; None: of the trained model.
        """
        engine_class = registry.load("rl.train_engines", self.run.layout.actor.backend)
        engine: TrainEngine = engine_class(settings or self.config.actor.engine, self.run.layout.actor.strategy)
        spec = replace(spec or self.config.finetune_spec(), device=self.run.device)
        self.add(engine).initialize(replace(spec, total_steps=self.steps * self.config.actor.minibatches))
        return engine

    @cached_property
    def loop(self) -> LoopThread:
        """Event loop of client, rewards and rollout runtime."""
        return self.enter_context(LoopThread("rollout"))

    @cached_property
    def tokenizer(self) -> Any:
        """Hugging Face tokenizer of the run's model, or the processor of a vision-language model."""
        return read_tokenizer(self.run.tokenizer)

    @cached_property
    def max_length(self) -> int:
        """Maximum tokens of an example."""
        return longest_row(self.config.data, self.config.model.directory())

    def rows(self, split: str, form: str, first: int | None = None, config: RunConfig | None = None) -> Rows:
        """Load the examples of one split that are not too long; see `load_rows`.

        Load the training data before building `engine`: this may lower `steps`, over which the learning rates decay.

        Args:
            first: number of examples to use, see `held_out_rows`; None: all.
            config: config of a named evaluation set, see `rl_apps.settings.evaluation_sets`; None: of the run.
        """
        config = config or self.config
        if first == 0:
            return []
        rows = load_rows(config.data, split, form, config.seed)
        rows = rows if first is None else held_out_rows(rows, first)
        if config.data.overlong != "reject" and rows:  # with "reject", the command has already checked them
            rows = lengths_of(replace(self.run, config=config), form, self.tokenizer).fit(rows, split)[0]
        if split == "train":
            self.steps = config.steps_with(len(rows), form)
        return rows

    def renderer(self) -> ChatRenderer:
        """Return the renderer of the model's chat template."""
        return ChatRenderer(self.tokenizer)

    def prompts(self, examples: Rows, engine: TrainEngine) -> PromptLoader:
        """Return the loader of this rank's shard of the prompts."""
        from rl_datasets import PromptLoader

        epochs, ranks = self.config.total_epochs or None, engine.parallel
        return PromptLoader(
            examples, seed=self.config.seed, epochs=epochs, num_shards=ranks.dp_size, shard=ranks.dp_rank
        )

    def client(self, engine: TrainEngine) -> InferenceEngine:
        """Wait until the servers are ready, and build their client (collective). Only data-parallel leaders use it."""
        assert self.run.layout.rollout is not None
        engine_class = registry.load("rl.inference_engines", self.run.layout.rollout.backend)
        settings, loop = self.config.rollout.client, self.loop
        ranks = engine.parallel
        if not attached(self.config, self.run.layout):  # the command has already checked attached servers
            self.await_servers(engine_class.server_spec(self.config.rollout.server, serve_spec(self.run)), ranks)
        spec = replace(serve_spec(self.run), clients=ranks.dp_size)
        client: InferenceEngine = engine_class(self.config.rollout.server, spec, settings)
        client.initialize(list(self.run.servers), os.environ.get(RUN_KEY_VARIABLE, ""))
        self._at_stop.append(client.stop_waiting_for_servers)
        if not attached(self.config, self.run.layout) and not client.follow_discovery(server_source(self.run)):
            log.info("this inference engine cannot add or remove servers during a run")
        self.callback(lambda: loop.run(client.destroy(), CLOSE_SECONDS))
        return client

    def await_servers(self, spec: JobSpec, ranks: ParallelContext) -> None:
        """Wait until all servers are ready, while trainers load their model (collective).

        This does not wait for a server that moved to another machine meanwhile. Rank 0 probes the servers and
        broadcasts every result, so that no rank waits in a collective longer than the timeout of its process group.

        Raises:
            InferenceError: on every rank, if a server is not ready in time.
        """
        deadline = time.monotonic() + spec.ready_timeout
        for server in map(urlsplit, self.run.servers if spec.ready_path else ()):
            log.info("waiting for the server at %s", server.netloc)
            while True:
                problem = (
                    probe(server.hostname or "", server.port or 80, str(spec.ready_path)) if ranks.is_main else None
                )
                if problem and (addresses := server_source(self.run)().values()) and server.geturl() not in addresses:
                    problem = None  # it starts on another machine, and the client discovers it there
                problem, late = ranks.broadcast_json([problem, time.monotonic() > deadline])
                if not problem:
                    break
                if late:
                    raise InferenceError(
                        f"{server.netloc} was not ready within {spec.ready_timeout:g} s: {problem}. See its log."
                    )
                time.sleep(0.1)

    def reward(self, name: str = "", role: str = "reward") -> AsyncRewardWrapper:
        """Build the reward function, which runs in separate worker processes.

        Args:
            name: reward of an evaluation set; empty: `rollout.reward`.
            role: first part of the names of the logs.
        """
        settings, loop = self.config.rollout, self.loop
        first, replicas = (
            int(os.environ.get("RANK", "0")) * settings.reward_workers,
            self.run.layout.actor.strategy.data,
        )
        (directory := self.run.directory / "logs").mkdir(parents=True, exist_ok=True)
        logs = [directory / f"{role}-{first + i}.log" for i in range(settings.reward_workers)]
        reward = AsyncRewardWrapper(
            name or settings.reward, settings.reward_workers, settings.reward_timeout, logs, replicas
        )
        self.callback(lambda: loop.run(reward.aclose(), CLOSE_SECONDS))
        return reward

    def workflow(self, reward: AsyncRewardWrapper) -> RolloutWorkflow:
        """Build the workflow that runs each episode."""
        settings = self.config.rollout
        component = registry.load("rl.workflows", settings.workflow)
        if _is_subclass(component, AgentWorkflow):
            return self._agent_workflow(component(reward))  # type: ignore[call-arg]  # its own constructor
        kind = (
            partial(rl_workflows.EnvironmentWorkflow, environment=component)
            if _is_subclass(component, Environment)
            else component
        )
        workflow: RolloutWorkflow = kind(self.tokenizer, self.config.generation, reward, self.max_length)
        workflow.max_length, workflow.invalid_text = self.max_length, settings.invalid_text
        return workflow

    def _agent_workflow(self, agent: AgentWorkflow) -> RolloutWorkflow:
        """Build the workflow that runs an agent, with the endpoint that the agent calls."""
        from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

        loop, rollout = self.loop, self.config.rollout
        endpoint = HttpRolloutEndpoint(self.tokenizer, rollout.endpoint, invalid_text=rollout.invalid_text)
        self.callback(lambda: loop.run(endpoint.destroy(), CLOSE_SECONDS))
        self.callback(lambda: loop.run(agent.close(), CLOSE_SECONDS))
        http = None
        if importlib.util.find_spec("openai") is not None:  # shared, because creating a client takes tens of ms
            from openai import DefaultAsyncHttpxClient

            http = DefaultAsyncHttpxClient()
            self.callback(lambda: loop.run(http.aclose(), CLOSE_SECONDS))
        settings, generation = rollout.endpoint, self.config.generation
        options: Any = {"per": settings.sequences_per, "deadline": settings.session_seconds, "http_client": http}
        return rl_workflows.AgentEpisodeWorkflow(agent, endpoint, generation, self.max_length, **options)

    def writer(self, engine: TrainEngine) -> rl_trainers.RolloutWriter:
        """Build the writer of completions in the run directory."""
        return self.add(
            rl_trainers.RolloutWriter(self.run.directory / "rollouts", engine.parallel.rank, self.config.rollouts)
        )

    def runtime(
        self,
        client: InferenceEngine,
        workflow: RolloutWorkflow,
        engine: TrainEngine,
        prompts: Iterable[dict[str, Any]] = (),
    ) -> RolloutRuntime:
        """Build the rollout runtime, which turns this rank's shard of the prompts into batches.

        Without prompts, it only serves evaluation.
        """
        source, known_fields = self.config.rollout, fields(rl_workflows.RolloutConfig)
        settings = {item.name: getattr(source, item.name) for item in known_fields if hasattr(source, item.name)}
        rollout = rl_workflows.DistRollout(
            client,
            workflow,
            prompts,
            batch_size=self.config.data.batch_size,
            config=rl_workflows.RolloutConfig(**settings),
            parallel=engine.parallel,
            minibatches=self.config.actor.minibatches,
            on_completions=self.writer(engine).write_training,
            loop=self.loop,
            version=engine.version,
            # a stuck thread cannot be ended otherwise; the log has the error
            on_stuck_trainer=lambda error: os._exit(STUCK_EXIT_CODE),
            stop=self.stop_requested.is_set,
            seed=self.config.seed,
        )
        rl_workflows.tune_garbage_collection()
        return self.add(rollout)

    def actor(self, engine: TrainEngine) -> rl_trainers.PolicyActor:
        """Build the learner: the policy in `engine`, with reference and critic if the algorithm needs them."""
        config, reference, critic = self.config, None, None
        if config.algorithm.needs_reference:
            reference = self.engine(config.ref.engine, config.reference_spec())
        if config.algorithm.needs_critic:
            value_engine = self.engine(config.critic.engine, config.critic_spec())
            critic = rl_trainers.Critic(value_engine, config.critic.clip, config.actor.minibatches)
        longest = config.rollout.generation.max_new_tokens
        return rl_trainers.PolicyActor(engine, config.algorithm, config.actor.minibatches, reference, critic, longest)

    def servers(
        self, run_log: rl_trainers.RunLog, engine: TrainEngine, client: InferenceEngine
    ) -> rl_trainers.ServerSync:
        """Connect the servers to the training loop: weight publisher, log-prob gap gate and memory sharing.

        With shared GPUs (`|` in the allocation), servers sleep during training.
        """
        config, loop = self.config, self.loop
        dtype, interrupt = config.actor.dtype, config.rollout.interrupt
        directory = str(weights_directory(self.run.directory, config.publish.route))
        # a publication may wait for a server to rejoin
        publish = replace(config.publish, timeout=config.publish.timeout + rejoin_timeout(self.run))
        publisher = rl_trainers.WeightPublisher(engine, client, loop, publish, directory, interrupt, dtype)
        sharing = None
        if self.run.layout.shared:
            sharing = rl_trainers.MemorySharing(engine, client, loop, config.publish.timeout)
        token = image_token(config.model.directory())
        gap = rl_trainers.GapGate(engine, client, loop, config.gap, dtype, client.served_dtype, sharing, token)
        return rl_trainers.ServerSync(run_log, self.add(publisher), gap, sharing)

    def completion_evaluations(
        self, engine: TrainEngine, rollout: RolloutRuntime
    ) -> list[rl_trainers.CompletionEvaluation]:
        """Build the evaluations of completions: on held-out examples of the data, and on each named set."""
        configs = evaluated_configs(self.config)
        writer = self.writer(engine) if configs else None
        return [self._evaluation(name, config, engine, rollout, writer) for name, config in configs.items()]

    def _evaluation(
        self, name: str, config: Any, engine: TrainEngine, rollout: RolloutRuntime, writer: Any
    ) -> rl_trainers.CompletionEvaluation:
        """Build the evaluation of completions on one set of examples; the name is empty for the run's own."""
        settings, reward = config.evaluation, config.rollout.reward
        workflow = (
            self.workflow(self.reward(reward, f"reward-{name}")) if reward != self.config.rollout.reward else None
        )
        votes = any(k > 1 for k in settings.ks)
        extract = getattr(registry.load("rl.rewards", reward), "extract_answer", None) if votes else None
        split = "test" if self.run.layout.trains and not name else "set"
        rows = self.rows(split, "rl", settings.examples, config)
        return rl_trainers.CompletionEvaluation(
            *(rollout, rows, settings, config.generation, engine.parallel, writer),
            name=name,
            workflow=workflow,
            extract_answer=extract,
        )

    def recovery(
        self, engines: Mapping[str, TrainEngine], components: Mapping[str, Any]
    ) -> rl_trainers.RecoveryCheckpoints:
        """Build the component that saves and restores the run, and handle SIGTERM from here on.

        A request to stop takes effect at the end of the step. Waiting for completions or for servers ends immediately.
        A second request abandons the step. If the command that started this process is gone, the process exits
        immediately.

        Args:
            engines: see `rl_trainers.RecoveryCheckpoints`.
            components: see `rl_trainers.RecoveryCheckpoints`.
        """
        requested, launcher = self.stop_requested, os.getppid()

        def stopping() -> bool:
            # checked again between steps: the command may have been about to die when the signal came
            if requested.is_set() and os.getppid() != launcher:
                sys.exit(128 + signal.SIGTERM)
            return requested.is_set()

        def stop(*_: object) -> None:
            requested.set()
            if stopping():
                for callback in self._at_stop:
                    callback()

        self._abandon_at_second_request(next(iter(engines.values())).parallel)
        before = signal.signal(signal.SIGTERM, stop)
        if isinstance(before, SigtermHandler) and before.received:
            sys.exit(128 + signal.SIGTERM)
        return rl_trainers.RecoveryCheckpoints(self.run.directory, self.config.recover, engines, components, stopping)

    def _abandon_at_second_request(self, ranks: ParallelContext) -> None:
        """Let a second request to stop abandon the running step.

        Python handles signals in the training thread, which may be waiting for other ranks. A separate thread therefore
        receives the second request.
        """
        from rl_contracts.models.step_gate import STEP, largest_of_ranks

        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        before, seconds = signal.set_wakeup_fd(sender.fileno()), self.config.launcher.grace_seconds

        def receive() -> None:
            first = 0.0
            while received := receiver.recv(1):
                if received[0] != signal.SIGTERM:
                    continue
                now = time.monotonic()
                first = first or now
                if now <= first + ONE_REQUEST:
                    continue
                log.warning("second request to stop: abandoning the running step")
                try:
                    STEP.abandon(partial(largest_of_ranks, parallel=ranks, seconds=seconds))
                except (RLError, RuntimeError) as error:
                    log.warning("the running step cannot be abandoned: %s", error)
                return

        self.callback(sender.close)
        self.callback(signal.set_wakeup_fd, before)
        threading.Thread(target=receive, name="stop", daemon=True).start()

    def run_log(self, engine: TrainEngine, evaluations: Sequence[Evaluation], **more: Any) -> rl_trainers.RunLog:
        """Build the run log: metrics, evaluations and checkpoints. `more` is passed to `rl_trainers.RunLog`."""
        return rl_trainers.RunLog(
            engine,
            self.run.directory,
            self.config.checkpoint,
            evaluations=evaluations,
            evaluate_every=self.config.evaluation.every,
            tokenizer_path=self.run.tokenizer,
            **more,
        )


def attached(config: Any, layout: Layout) -> tuple[str, ...]:
    """Return the addresses of running servers that a run uses; empty if the run starts its own servers."""
    return tuple(config.rollout.server.addresses) if layout.rollout is not None else ()


def server_source(run: Run[Any]) -> ServerSource:
    """Return a function that reads the addresses of a run's servers by name, as published by its launcher."""
    assert run.layout.rollout is not None
    return partial(names_of(run.directory).children, f"servers/{run.layout.rollout.name}")


def server_jobs(run: Run[Any], devices: Devices) -> list[JobSpec]:
    """Return the job of the servers to start; empty if none are allocated, or if they already run."""
    servers = run.layout.rollout
    if servers is None or attached(run.config, run.layout):
        return []
    return [server_job(run, devices.cores_each * servers.strategy.model_size)]


def server_job(run: Run[Any], cpus: int = 0) -> JobSpec:
    """Return the job of a run's servers: program, model, number of servers, and directory of new weights.

    Args:
        cpus: cores of each server, over all of its ranks; 0: unspecified.
    """
    servers, settings = run.layout.rollout, run.config.rollout
    assert servers is not None
    spec = replace(serve_spec(run), cpus=cpus)
    job: JobSpec = registry.load("rl.inference_engines", servers.backend).server_spec(settings.server, spec)
    return replace(job, role=servers.name, port=settings.port or None, scratch=memory_of(run))


def serve_spec(run: Run[Any]) -> ServeSpec:
    """Return the serving settings of a run."""
    assert run.layout.rollout is not None
    return ServeSpec(
        run.config.model.directory(),
        run.layout.rollout.strategy,
        str(weights_directory(run.directory, run.config.publish.route)),
        gpus=run.layout.rollout.strategy.model_size if run.device == "cuda" else 0,
        device=run.device,
        shared=run.layout.shared and not attached(run.config, run.layout),
        deterministic=run.config.deterministic,
        update_timeout=_UPDATE_FRACTION * run.config.publish.timeout,
        rejoin_timeout=rejoin_timeout(run),
    )


def rejoin_timeout(run: Run[Any]) -> float:
    """Return the seconds for which a run without servers waits for one; 0 if the launcher restarts none.

    The owner of attached servers restarts them, within the same time.
    """
    if not run.config.launcher.max_restarts and not attached(run.config, run.layout):
        return 0.0
    ready_timeout: float = getattr(run.config.rollout.server, "ready_timeout", JobSpec.ready_timeout)
    return ready_timeout + _REJOIN_MARGIN


def memory_of(run: Run[Any]) -> tuple[str, ...]:
    """Return the `weights_directory` of the run if it is in shared memory, else an empty tuple.

    The directory must be removed with the run, because a starting server would load the weights in it.
    """
    if run.layout.rollout is None or attached(run.config, run.layout) or run.config.publish.route != "shm":
        return ()
    directory = weights_directory(run.directory)
    return () if directory.is_relative_to(run.directory) else (str(directory),)


def weights_directory(directory: Path, route: str = "shm") -> Path:
    """Return the directory of a run's new weights and of its commit record.

    With route `shm`, the directory is in /dev/shm if that exists, named by a hash of the path of the run directory.
    Otherwise, it is in the run directory.
    """
    memory = Path("/dev/shm")
    if route != "shm" or not memory.is_dir():
        return directory / "weights"
    return memory / f"rl-{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
