"""The parts of a trainer process, each made from the config of its run. What becomes of them is up to the program."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import rl_trainers
import rl_workflows
from rl_apps.app import Run
from rl_apps.data import first_rows, load_rows
from rl_apps.layout import Devices
from rl_contracts import registry
from rl_contracts.aio import LoopThread
from rl_contracts.data import FinetuneSpec, ServeSpec
from rl_contracts.rendering import ChatRenderer
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine, TrainEngineConfig
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.rollout import RolloutRuntime
    from rl_contracts.workflow import RolloutWorkflow
    from rl_trainers.evaluation import Evaluation

CLOSE_SECONDS = 10.0
"""Time for a part to close when a run ends."""

STUCK_EXIT_CODE = 70
"""Of a trainer process that was ended because its training thread was stuck."""


class Destroyable(Protocol):
    """Anything that must be taken down."""

    def destroy(self) -> None:
        """Free what it holds."""


class Parts(ExitStack):
    """Makes the parts of a trainer process, and takes them down in reverse order, whatever happens.

    Example:
        with Parts(run) as parts:
            engine = parts.engine()
    """

    def __init__(self, run: Run[Any]) -> None:
        super().__init__()
        self.run, self.config = run, run.config

    def add[D: Destroyable](self, part: D) -> D:
        """Register a part and return it."""
        self.callback(part.destroy)
        return part

    def engine(self, settings: TrainEngineConfig | None = None, spec: FinetuneSpec | None = None) -> TrainEngine:
        """A train engine of this rank, initialised.

        Args:
            settings, spec: of a model beside the one that learns (a reference, a critic); None: that one's.
        """
        made = registry.load("rl.train_engines", self.run.layout.actor.backend)
        engine: TrainEngine = made(settings or self.config.actor.engine, self.run.layout.actor.strategy)
        self.add(engine).initialize(replace(spec or self.config.finetune_spec(), device=self.run.device))
        return engine

    @cached_property
    def loop(self) -> LoopThread:
        """The event loop on which client, rewards and runtime live."""
        return self.enter_context(LoopThread("rollout"))

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the run's model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.model.path)

    def renderer(self) -> ChatRenderer:
        """The chat template of the run's model."""
        return ChatRenderer(self.tokenizer)

    def client(self) -> InferenceEngine:
        """The client of the servers. It waits for servers to come back only where somebody restarts them."""
        assert self.run.layout.rollout is not None
        made = registry.load("rl.inference_engines", self.run.layout.rollout.backend)
        settings, loop = self.config.rollout.client, self.loop
        if not self.config.launcher.max_restarts:
            settings = replace(settings, rejoin_timeout=0.0)
        client: InferenceEngine = made(self.config.rollout.server, serve_spec(self.run), settings)
        client.initialize(list(self.run.servers), os.environ.get(RUN_KEY_VARIABLE, ""))
        self.callback(lambda: loop.run(client.destroy(), CLOSE_SECONDS))
        return client

    def reward(self) -> AsyncRewardWrapper:
        """The reward function, in worker processes of its own."""
        settings, loop = self.config.rollout, self.loop
        reward = AsyncRewardWrapper(settings.reward, settings.reward_workers, settings.reward_timeout)
        self.callback(lambda: loop.run(reward.aclose(), CLOSE_SECONDS))
        return reward

    def workflow(self, reward: AsyncRewardWrapper) -> RolloutWorkflow:
        """What happens in an episode."""
        settings = self.config.rollout
        made = registry.load("rl.workflows", settings.workflow)
        workflow: RolloutWorkflow = made(self.tokenizer, settings.generation, reward, self.config.data.max_length)
        return workflow

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
        settings = {item.name: getattr(self.config.rollout, item.name) for item in fields(rl_workflows.RolloutConfig)}
        settings["seed"] += self.config.seed
        rollout = rl_workflows.DistRollout(
            client,
            workflow,
            prompts,
            batch_size=self.config.data.batch_size,
            config=rl_workflows.RolloutConfig(**settings),
            parallel=engine.parallel,
            minibatches=self.config.actor.minibatches,
            on_answers=self.writer(engine).training,
            loop=self.loop,
            version=engine.version,
            # the log has the error; nothing else ends the thread that is stuck
            on_stuck_trainer=lambda error: os._exit(STUCK_EXIT_CODE),
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
        settings = self.config.publish
        directory = str(weights_directory(self.run.directory, settings.route))
        return self.add(
            rl_trainers.WeightPublisher(engine, client, self.loop, settings, directory, self.config.rollout.interrupt)
        )

    def gate(self, engine: TrainEngine, client: InferenceEngine) -> rl_trainers.GapGate:
        """What notices when servers and trainer disagree."""
        return rl_trainers.GapGate(
            engine, client, self.loop, self.config.gap, self.config.actor.dtype, client.served_dtype
        )

    def answer_evaluation(self, engine: TrainEngine, rollout: RolloutRuntime) -> rl_trainers.AnswerEvaluation:
        """The evaluation of answers on held-out rows."""
        rows = first_rows(load_rows(self.config.data, "test", "rl", self.config.seed), self.config.evaluation.rows)
        return rl_trainers.AnswerEvaluation(rollout, rows, self.config.evaluation, engine.parallel, self.writer(engine))

    def books(self, engine: TrainEngine, evaluations: Sequence[Evaluation], **more: Any) -> rl_trainers.Books:
        """Metrics, evaluations and checkpoints; `more` goes to `rl_trainers.Books`."""
        return rl_trainers.Books(
            engine,
            self.run.directory,
            self.config.checkpoint,
            evaluations=evaluations,
            evaluate_every=self.config.evaluation.every,
            tokenizer_path=self.config.model.path,
            **more,
        )


def server_jobs(run: Run[Any], devices: Devices) -> list[JobSpec]:
    """The servers as a role (none where none are allocated): which model, how many, where they read new weights."""
    servers = run.layout.rollout
    if servers is None:
        return []
    settings = run.config.rollout
    spec = replace(serve_spec(run), cpus=devices.cores_each, gpus=devices.gpus(servers.strategy.model_size))
    job: JobSpec = registry.load("rl.inference_engines", servers.backend).server_spec(settings.server, spec)
    return [replace(job, role=servers.name, port=settings.port or None)]


def serve_spec(run: Run[Any]) -> ServeSpec:
    """What the rest of the run says about its servers."""
    assert run.layout.rollout is not None
    return ServeSpec(
        run.config.model.path,
        run.layout.rollout.strategy,
        str(weights_directory(run.directory, run.config.publish.route)),
        device=run.device,
        deterministic=run.config.deterministic,
    )


def weights_directory(directory: Path, route: str = "shm") -> Path:
    """Where a run's new weights and the record of the last commit lie: of route `shm` in the memory file system, where
    there is one, named after the run directory; else in the run directory."""
    memory = Path("/dev/shm")
    if route != "shm" or not memory.is_dir():
        return directory / "weights"
    return memory / f"rl-{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
