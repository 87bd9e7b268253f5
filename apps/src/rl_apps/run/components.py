"""The parts of a trainer process, each made from the config of its run. What becomes of them is up to the program."""

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
from rl_contracts import registry
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.data import FinetuneSpec, ServeSpec
from rl_contracts.errors import InferenceError, RLError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.runtime.logging import get_logger
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec
from rl_contracts.workflow import AgentWorkflow, Environment
from rl_launchers.supervise.interrupts import ONE_REQUEST
from rl_launchers.supervise.server_health import probe
from rl_monitor.run_directory import names_of

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.engine import TrainEngine, TrainEngineConfig
    from rl_contracts.inference import InferenceEngine, ServerSource
    from rl_contracts.rollout import RolloutRuntime
    from rl_contracts.workflow import RolloutWorkflow
    from rl_trainers.run_log.evaluation import Evaluation

__all__ = ["Components"]

log = get_logger("apps.parts")

CLOSE_SECONDS = 10.0
"""Time for a part to close when a run ends."""

STUCK_EXIT_CODE = 70
"""Of a trainer process that was ended because its training thread was stuck."""


def _is(part: Any, kind: type) -> bool:
    return isinstance(part, type) and issubclass(part, kind)


class Destroyable(Protocol):
    """Anything that must be taken down."""

    def destroy(self) -> None:
        """Free what it holds."""


class SigtermHandler:
    """A handler of SIGTERM for a trainer in the making: ends it by the ordinary way out, so that everything closes what
    it opened. Where an import swallows that, `Components.recover` sees that it was asked."""

    asked = False

    def __call__(self, number: int, _: object) -> None:
        self.asked = True
        sys.exit(128 + number)


class Components(ExitStack):
    """Makes the parts of a trainer process, and takes them down in reverse order, whatever happens.

    Example:
        with Parts(run) as parts:
            engine = parts.engine()
    """

    def __init__(self, run: Run[Any]) -> None:
        super().__init__()
        self.run, self.config = run, run.config
        self.steps: int = run.config.total_steps
        """Of the run, over which learning rates decay; `rows` of the training data may lower it."""
        self.stop_requested = threading.Event()
        self._at_stop: list[Callable[[], None]] = []

    def add[D: Destroyable](self, component: D) -> D:
        """Register a part and return it."""
        self.callback(component.destroy)
        return component

    def engine(self, settings: TrainEngineConfig | None = None, spec: FinetuneSpec | None = None) -> TrainEngine:
        """A train engine of this rank, initialised.

        Args:
            settings, spec: of a model beside the one that learns (a reference, a critic); None: that one's.
        """
        made = registry.load("rl.train_engines", self.run.layout.actor.backend)
        engine: TrainEngine = made(settings or self.config.actor.engine, self.run.layout.actor.strategy)
        spec = replace(spec or self.config.finetune_spec(), device=self.run.device)
        self.add(engine).initialize(replace(spec, total_steps=self.steps * self.config.actor.minibatches))
        return engine

    @cached_property
    def loop(self) -> LoopThread:
        """The event loop on which client, rewards and runtime live."""
        return self.enter_context(LoopThread("rollout"))

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the run's model."""
        return read_tokenizer(self.run.tokenizer)

    @cached_property
    def max_length(self) -> int:
        """Tokens of a row at most."""
        return longest_row(self.config.data, self.config.model.directory())

    def rows(self, split: str, form: str, first: int | None = None) -> Rows:
        """The rows of one split, without those that are too long; see `load_rows`.

        Ask for those of the training data before `engine`, whose learning rate is to end with them.

        Args:
            first: only so many of them, see `held_out_rows`.
        """
        config = self.config
        if first == 0:
            return []
        rows = load_rows(config.data, split, form, config.seed)
        rows = rows if first is None else held_out_rows(rows, first)
        if config.data.overlong != "refuse" and rows:  # else the command has looked
            rows = lengths_of(self.run, form, self.tokenizer).fit(rows, split)[0]
        if split == "train":
            self.steps = config.steps_with(len(rows), form)
        return rows

    def renderer(self) -> ChatRenderer:
        """The chat template of the run's model."""
        return ChatRenderer(self.tokenizer)

    def client(self, engine: TrainEngine) -> InferenceEngine:
        """The client of the servers, once they are ready (collective); heads use it. It waits for servers to come back
        only where somebody may restart them."""
        assert self.run.layout.rollout is not None
        made = registry.load("rl.inference_engines", self.run.layout.rollout.backend)
        settings, loop = self.config.rollout.client, self.loop
        ranks = engine.parallel
        if not attached(self.config, self.run.layout):  # the command has asked those
            self.await_servers(made.server_spec(self.config.rollout.server, serve_spec(self.run)), ranks)
            if not self.config.launcher.max_restarts:
                settings = replace(settings, rejoin_timeout=0.0)
        settings = settings.shared_by(ranks.dp_size)
        client: InferenceEngine = made(self.config.rollout.server, serve_spec(self.run), settings)
        client.initialize(list(self.run.servers), os.environ.get(RUN_KEY_VARIABLE, ""))
        self._at_stop.append(client.stop_waiting_for_servers)
        if not attached(self.config, self.run.layout) and not client.follow_discovery(server_source(self.run)):
            log.info("the servers of this run stay those of its start: its client takes in no others")
        self.callback(lambda: loop.run(client.destroy(), CLOSE_SECONDS))
        return client

    def await_servers(self, spec: JobSpec, ranks: ParallelContext) -> None:
        """Return when all servers are ready, which start while the trainers load their model; one that was moved
        meanwhile is not waited for. Rank 0 asks them and tells the others after each answer, so that none waits in a
        collective for longer than its group allows.

        Raises:
            InferenceError: one was not ready in time; on every rank.
        """
        deadline = time.monotonic() + spec.ready_timeout
        for server in map(urlsplit, self.run.servers if spec.ready_path else ()):
            log.info("waiting for the server at %s", server.netloc)
            while True:
                said = probe(server.hostname or "", server.port or 80, str(spec.ready_path)) if ranks.is_main else None
                if said and (named := server_source(self.run)().values()) and server.geturl() not in named:
                    said = None  # it comes up elsewhere, and the client takes it in
                problem, late = ranks.broadcast_json([said, time.monotonic() > deadline])
                if not problem:
                    break
                if late:
                    raise InferenceError(
                        f"{server.netloc} was not ready within {spec.ready_timeout:g} s: {problem}. See its log."
                    )
                time.sleep(0.1)

    def reward(self) -> AsyncRewardWrapper:
        """The reward function, in worker processes of its own."""
        settings, loop = self.config.rollout, self.loop
        first, heads = int(os.environ.get("RANK", "0")) * settings.reward_workers, self.run.layout.actor.strategy.data
        (directory := self.run.directory / "logs").mkdir(parents=True, exist_ok=True)
        logs = [directory / f"reward-{first + i}.log" for i in range(settings.reward_workers)]
        reward = AsyncRewardWrapper(settings.reward, settings.reward_workers, settings.reward_timeout, logs, heads)
        self.callback(lambda: loop.run(reward.aclose(), CLOSE_SECONDS))
        return reward

    def workflow(self, reward: AsyncRewardWrapper) -> RolloutWorkflow:
        """What happens in an episode."""
        settings = self.config.rollout
        made = registry.load("rl.workflows", settings.workflow)
        if _is(made, AgentWorkflow):
            return self._agent(made(reward))  # type: ignore[call-arg]  # its own constructor
        kind = partial(rl_workflows.EnvironmentWorkflow, environment=made) if _is(made, Environment) else made
        workflow: RolloutWorkflow = kind(self.tokenizer, self.config.generation, reward, self.max_length)
        workflow.max_length, workflow.invalid_text = self.max_length, settings.invalid_text
        return workflow

    def _agent(self, agent: AgentWorkflow) -> RolloutWorkflow:
        """An agent's episodes, and the endpoint that it talks to."""
        from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

        loop, rollout = self.loop, self.config.rollout
        endpoint = HttpRolloutEndpoint(self.tokenizer, rollout.endpoint, invalid_text=rollout.invalid_text)
        self.callback(lambda: loop.run(endpoint.destroy(), CLOSE_SECONDS))
        self.callback(lambda: loop.run(agent.close(), CLOSE_SECONDS))
        http = None
        if importlib.util.find_spec("openai") is not None:  # one client for all: its making costs tens of milliseconds
            from openai import DefaultAsyncHttpxClient

            http = DefaultAsyncHttpxClient()
            self.callback(lambda: loop.run(http.aclose(), CLOSE_SECONDS))
        settings, generation = rollout.endpoint, self.config.generation
        more: Any = {"per": settings.rows, "deadline": settings.session_seconds, "http_client": http}
        return rl_workflows.AgentEpisodeWorkflow(agent, endpoint, generation, self.max_length, **more)

    def writer(self, engine: TrainEngine) -> rl_trainers.RolloutWriter:
        """What keeps answers in the run directory."""
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
        """What turns prompts into batches: of this rank's share of the data, none for evaluation alone."""
        said, known = self.config.rollout, fields(rl_workflows.RolloutConfig)
        settings = {item.name: getattr(said, item.name) for item in known if hasattr(said, item.name)}
        settings["seed"] = said.seed + self.config.seed
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
            # the log has the error; nothing else ends the thread that is stuck
            on_stuck_trainer=lambda error: os._exit(STUCK_EXIT_CODE),
            stop=self.stop_requested.is_set,
        )
        rl_workflows.tune_garbage_collection()
        return self.add(rollout)

    def actor(self, engine: TrainEngine) -> rl_trainers.PolicyActor:
        """The learner: the policy in `engine`, and a reference and a critic where the algorithm has them."""
        config, reference, critic = self.config, None, None
        if config.algorithm.needs_reference:
            reference = self.engine(config.ref.engine, config.reference_spec())
        if config.algorithm.needs_critic:
            values = self.engine(config.critic.engine, config.critic_spec())
            critic = rl_trainers.Critic(values, config.critic.clip, config.actor.minibatches)
        return rl_trainers.PolicyActor(engine, config.algorithm, config.actor.minibatches, reference, critic)

    def publisher(self, engine: TrainEngine, client: InferenceEngine) -> rl_trainers.WeightPublisher:
        """The way of new weights to the servers."""
        settings, interrupt, dtype = self.config.publish, self.config.rollout.interrupt, self.config.actor.dtype
        directory = str(weights_directory(self.run.directory, settings.route))
        return self.add(rl_trainers.WeightPublisher(engine, client, self.loop, settings, directory, interrupt, dtype))

    def memory_sharing(self, engine: TrainEngine, client: InferenceEngine) -> rl_trainers.MemorySharing | None:
        """What lets the servers sleep while the trainer learns, where both are on the same devices (`|`)."""
        if not self.run.layout.shared:
            return None
        return rl_trainers.MemorySharing(engine, client, self.loop, self.config.rollout.client.update_timeout)

    def gate(
        self, engine: TrainEngine, client: InferenceEngine, sharing: rl_trainers.MemorySharing | None = None
    ) -> rl_trainers.GapGate:
        """What notices when servers and trainer disagree."""
        dtypes = self.config.actor.dtype, client.served_dtype
        return rl_trainers.GapGate(engine, client, self.loop, self.config.gap, *dtypes, sharing)

    def completion_evaluation(self, engine: TrainEngine, rollout: RolloutRuntime) -> rl_trainers.CompletionEvaluation:
        """The evaluation of answers on held-out rows."""
        rows = self.rows("test", "rl", self.config.evaluation.rows)
        return rl_trainers.CompletionEvaluation(
            rollout, rows, self.config.evaluation, engine.parallel, self.writer(engine)
        )

    def recover(
        self,
        engines: Mapping[str, TrainEngine],
        parts: Mapping[str, Any],
        epochs: Callable[[], int] | None = None,
    ) -> rl_trainers.RecoveryCheckpoints:
        """What saves and restores the run. From here on a request to stop waits for the end of the step (a wait for
        answers, or for servers to come back, ends at once), as long as the command that asked is there to wait for it;
        a second one abandons the step.

        Args:
            engines, parts, epochs: see `rl_trainers.RecoveryCheckpoints`.
        """
        asked, launcher = self.stop_requested, os.getppid()

        def stopping() -> bool:
            if asked.is_set() and os.getppid() != launcher:  # which may have been about to die when the signal came
                sys.exit(128 + signal.SIGTERM)
            return asked.is_set()

        def stop(*_: object) -> None:
            asked.set()
            if stopping():
                for tell in self._at_stop:
                    tell()

        self._hear_again(next(iter(engines.values())).parallel)
        before = signal.signal(signal.SIGTERM, stop)
        if isinstance(before, SigtermHandler) and before.asked:
            sys.exit(128 + signal.SIGTERM)
        return rl_trainers.RecoveryCheckpoints(
            self.run.directory, self.config.recover, engines, parts, stopping, epochs
        )

    def _hear_again(self, ranks: ParallelContext) -> None:
        """Let a second request to stop abandon the running step. A thread hears it: the training thread, in which
        Python handles signals, may be waiting for other ranks."""
        from rl_contracts.models.step_gate import STEP, largest_of_ranks

        ours, written = socket.socketpair()
        written.setblocking(False)
        before, seconds = signal.set_wakeup_fd(written.fileno()), self.config.launcher.grace_seconds

        def hear() -> None:
            first = 0.0
            while received := ours.recv(1):
                if received[0] != signal.SIGTERM:
                    continue
                now = time.monotonic()
                first = first or now
                if now <= first + ONE_REQUEST:
                    continue
                log.warning("asked to stop again: abandoning the running step")
                try:
                    STEP.abandon(partial(largest_of_ranks, parallel=ranks, seconds=seconds))
                except (RLError, RuntimeError) as error:
                    log.warning("the running step cannot be abandoned: %s", error)
                return

        self.callback(written.close)
        self.callback(signal.set_wakeup_fd, before)
        threading.Thread(target=hear, name="stop", daemon=True).start()

    def run_log(self, engine: TrainEngine, evaluations: Sequence[Evaluation], **more: Any) -> rl_trainers.RunLog:
        """Metrics, evaluations and checkpoints; `more` goes to `rl_trainers.RunLog`."""
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
    """Addresses of servers that run already and that a run of such a config uses; none where it starts its own."""
    return tuple(config.rollout.server.addresses) if layout.rollout is not None else ()


def server_source(run: Run[Any]) -> ServerSource:
    """Says the addresses of the servers of a run by name, as its launcher keeps them; none where it does not."""
    assert run.layout.rollout is not None
    return partial(names_of(run.directory).children, f"servers/{run.layout.rollout.name}")


def server_jobs(run: Run[Any], devices: Devices) -> list[JobSpec]:
    """The servers to start, as a role; none where none are allocated, or they run already."""
    servers = run.layout.rollout
    if servers is None or attached(run.config, run.layout):
        return []
    return [server_job(run, devices.cores_each * servers.strategy.model_size)]


def server_job(run: Run[Any], cpus: int = 0) -> JobSpec:
    """What the servers of a run are: which program and model, how many, where they read new weights.

    Args:
        cpus: cores of each server, all of its ranks together; 0: not said.
    """
    servers, settings = run.layout.rollout, run.config.rollout
    assert servers is not None
    spec = replace(serve_spec(run), cpus=cpus)
    job: JobSpec = registry.load("rl.inference_engines", servers.backend).server_spec(settings.server, spec)
    return replace(job, role=servers.name, port=settings.port or None, scratch=memory_of(run))


def serve_spec(run: Run[Any]) -> ServeSpec:
    """What the rest of the run says about its servers."""
    assert run.layout.rollout is not None
    return ServeSpec(
        run.config.model.directory(),
        run.layout.rollout.strategy,
        str(weights_directory(run.directory, run.config.publish.route)),
        gpus=run.layout.rollout.strategy.model_size if run.device == "cuda" else 0,
        device=run.device,
        shared=run.layout.shared and not attached(run.config, run.layout),
        deterministic=run.config.deterministic,
    )


def memory_of(run: Run[Any]) -> tuple[str, ...]:
    """What of `weights_directory` lies in the memory of the machine that trainers and servers share, and must not
    outlive them: a server that starts takes what it finds there for this run's."""
    if run.layout.rollout is None or attached(run.config, run.layout) or run.config.publish.route != "shm":
        return ()
    directory = weights_directory(run.directory)
    return () if directory.is_relative_to(run.directory) else (str(directory),)


def weights_directory(directory: Path, route: str = "shm") -> Path:
    """Where a run's new weights and the record of the last commit lie: of route `shm` in the memory file system, where
    there is one, named after the run directory; else in the run directory."""
    memory = Path("/dev/shm")
    if route != "shm" or not memory.is_dir():
        return directory / "weights"
    return memory / f"rl-{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
