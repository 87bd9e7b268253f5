"""The parts of a trainer process, made from the config: engine, client, runtime, publishing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rl_apps.app import Run
from rl_apps.config import RolloutSettings, RunConfig
from rl_apps.data import head, load_rows
from rl_apps.layout import Devices
from rl_contracts import registry
from rl_contracts.config import ClientConfig
from rl_contracts.data import FinetuneSpec, ServeSpec
from rl_contracts.errors import ConfigError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec
from rl_trainers.gap.gate import GapConfig
from rl_trainers.publish import PublishConfig
from rl_workflows import RolloutConfig

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine, TrainEngineConfig
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.rendering import ChatRenderer
    from rl_contracts.rollout import RolloutRuntime
    from rl_trainers import AnswerEvaluation, GapGate, WeightPublisher


CLOSE_SECONDS = 10.0
"""Time for a part to close when a run ends."""

STUCK_EXIT_CODE = 70
"""Of a trainer process that was ended because its training thread was stuck."""


class Destroyable(Protocol):
    """Anything that must be taken down."""

    def destroy(self) -> None:
        """Free what it holds."""
        ...


class Closing(ExitStack):
    """Takes parts down in reverse order, whatever happens."""

    def add[D: Destroyable](self, part: D) -> D:
        """Register a part and return it."""
        self.callback(part.destroy)
        return part


def make_engine(
    run: Run[Any], settings: TrainEngineConfig | None = None, spec: FinetuneSpec | None = None
) -> TrainEngine:
    """A train engine of this rank, initialised.

    Args:
        settings, spec: of a model beside the one that learns (a reference, a critic); None: that one's.
    """
    settings, spec = settings or run.config.actor.engine, spec or run.config.finetune_spec()
    made = registry.load("rl.train_engines", run.layout.actor.backend)
    engine: TrainEngine = made(settings, run.layout.actor.strategy)
    engine.initialize(replace(spec, device=run.device))
    return engine


def make_renderer(config: RunConfig) -> ChatRenderer:
    """The chat template of the run's model."""
    from rl_contracts.rendering import ChatRenderer

    return ChatRenderer(make_tokenizer(config.model.path))


def make_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a model directory or hub id."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def check_rollout(settings: RolloutSettings) -> None:
    """Refuse unknown workflows and rewards.

    Raises:
        ConfigError: names the setting.
    """
    registry.load("rl.workflows", settings.workflow)
    registry.load("rl.rewards", settings.reward)


def check_publish(publish: PublishConfig, allocation: str) -> None:
    """Refuse a route that this allocation cannot have.

    Raises:
        ConfigError: names both settings.
    """
    if publish.route == "ipc" and "|" not in allocation:
        raise ConfigError(
            f"publish.route=ipc needs trainer and server on one CUDA device, but allocation={allocation} gives each "
            "devices of its own. Use publish.route=shm on one host, or publish.route=broadcast."
        )


def check_servers(run: Run[Any]) -> None:
    """Refuse what the servers of a run cannot do.

    Raises:
        ConfigError: names the settings.
    """
    if run.layout.rollout is not None:
        run.config.rollout.server.check(serve_spec(run))


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
        str(weights_directory(run.directory, publish_config(run.config).route)),
        device=run.device,
        deterministic=run.config.deterministic,
    )


def client_config(config: RunConfig, settings: RolloutSettings) -> ClientConfig:
    """The client's settings; nobody waits for servers that nobody restarts."""
    return settings.client if config.launcher.max_restarts else replace(settings.client, rejoin_timeout=0.0)


def publish_config(config: RunConfig) -> PublishConfig:
    """How new weights reach the servers; the default where a command has no such setting."""
    found: PublishConfig = getattr(config, "publish", PublishConfig())
    return found


def weights_directory(run_dir: Path, route: str = "shm") -> Path:
    """Where new weights and the record of the last commit lie: of route `shm` in the memory file system, where there is
    one, named after the run directory; else in the run directory."""
    memory = Path("/dev/shm")
    if route != "shm" or not memory.is_dir():
        return run_dir / "weights"
    return memory / f"rl-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def make_answering(
    stack: Closing,
    run: Run[Any],
    engine: TrainEngine,
    *,
    prompts: Iterable[dict[str, Any]] = (),
    minibatches: int = 1,
    gap: GapConfig | None = None,
) -> tuple[RolloutRuntime, WeightPublisher, GapGate]:
    """The client of the servers, the rollout runtime on top of it, and the way of new weights to the servers."""
    from rl_contracts.aio import LoopThread
    from rl_trainers import GapGate, RolloutWriter, WeightPublisher
    from rl_workflows import DistRollout, tune_garbage_collection

    assert run.layout.rollout is not None
    config, settings, run_dir = run.config, run.config.rollout, run.directory
    loop = LoopThread("rollout")
    stack.callback(loop.close)
    client: InferenceEngine = registry.load("rl.inference_engines", run.layout.rollout.backend)(
        settings.server, serve_spec(run), client_config(config, settings)
    )
    client.initialize(list(run.servers), os.environ.get(RUN_KEY_VARIABLE, ""))
    stack.callback(lambda: loop.run(client.destroy(), CLOSE_SECONDS))
    reward = AsyncRewardWrapper(settings.reward, settings.reward_workers, settings.reward_timeout)
    stack.callback(lambda: loop.run(reward.aclose(), CLOSE_SECONDS))
    tokenizer = make_tokenizer(config.model.path)
    workflow = registry.load("rl.workflows", settings.workflow)(
        tokenizer, settings.generation, reward, config.data.max_length
    )
    writer = stack.add(RolloutWriter(run_dir / "rollouts", engine.parallel.rank, config.rollouts))
    rollout = DistRollout(
        client,
        workflow,
        prompts,
        batch_size=config.data.batch_size,
        config=runtime_config(config, settings),
        parallel=engine.parallel,
        minibatches=minibatches,
        on_answers=writer.training,
        loop=loop,
        version=engine.version,
        on_stuck_trainer=lambda error: os._exit(
            STUCK_EXIT_CODE
        ),  # the log has the error; nothing else ends this thread
    )
    stack.callback(rollout.destroy)
    tune_garbage_collection()
    publishing = replace(publish_config(config), interrupt=settings.interrupt)
    directory = str(weights_directory(run_dir, publishing.route))
    publisher = stack.add(WeightPublisher(engine, client, loop, publishing, directory))
    exact = config.actor.dtype == client.served_dtype == "float32"
    gate = GapGate(engine, client, loop.run, gap or GapConfig(), low_precision=not exact)
    return rollout, publisher, gate


def runtime_config(config: RunConfig, settings: RolloutSettings) -> RolloutConfig:
    """The runtime's part of the rollout settings, seeded by the run's seed."""
    values = {item.name: getattr(settings, item.name) for item in fields(RolloutConfig)}
    return RolloutConfig(**{**values, "seed": config.seed + settings.seed})


def answer_evaluation(stack: Closing, run: Run[Any], engine: TrainEngine, rollout: RolloutRuntime) -> AnswerEvaluation:
    """The evaluation of answers on held-out rows."""
    from rl_trainers import AnswerEvaluation, RolloutWriter

    config = run.config
    rows = head(load_rows(config.data, "test", "rl", config.seed), config.evaluation.rows)
    writer = stack.add(RolloutWriter(run.directory / "rollouts", engine.parallel.rank, config.rollouts))
    return AnswerEvaluation(rollout, rows, config.evaluation, engine.parallel, writer)
