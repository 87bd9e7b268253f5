"""Settings of the commands, composed from the config of each component."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from rl_apps.settings.data import DataConfig
from rl_apps.settings.device_layout import ClusterConfig
from rl_apps.settings.evaluation_sets import EvaluationSettings
from rl_apps.settings.model import ModelConfig
from rl_contracts.config import (
    ClientConfig,
    GenerationConfig,
    MicroBatchConfig,
    OptimizerConfig,
    Settings,
    bounded,
    choice,
    require,
)
from rl_contracts.data import DTYPES, VISION_PARTS, FinetuneSpec
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.inference import ServerConfig
from rl_launchers import LauncherConfig
from rl_trainers.algorithms.config import AlgorithmConfig, RewardConfig
from rl_trainers.recovery.lookup import RecoverConfig
from rl_trainers.run_log.checkpoints import CheckpointConfig
from rl_trainers.run_log.evaluation import HeldOutConfig
from rl_trainers.run_log.rollouts import RolloutLogConfig, RolloutsConfig
from rl_trainers.run_log.tracking import TrackersConfig
from rl_trainers.weight_sync.gap.config import GapConfig
from rl_trainers.weight_sync.publisher import PublishConfig
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.rollout.config import RolloutConfig, RuntimeConfig

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "EvaluateConfig",
    "GRPOConfig",
    "RefConfig",
    "RolloutSettings",
    "RunConfig",
    "SFTConfig",
    "SamplingSettings",
    "ServedConfig",
    "ServingSettings",
]


@dataclass
class ActorConfig(Settings):
    """The trained model: optimizer, and split of a batch."""

    setting: ClassVar[str] = "actor"
    minibatches: int = bounded(1, "at least 1", lambda number: number >= 1)
    """Optimizer steps per training batch."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its learning-rate schedule."""
    micro_batch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    """Size of a micro-batch, which is one forward and backward pass. Never changes the gradient."""
    dtype: str = choice("", ("", *DTYPES))
    """Dtype in which the trained model computes: `float32`, or `bfloat16` with float32 master weights and reductions.
    Empty: `model.dtype`."""
    freeze: list[str] = field(
        default_factory=list,
        metadata={"expected": f"some of {VISION_PARTS}", "holds": lambda parts: {*parts} <= {*VISION_PARTS}},
    )
    """Parts of a vision-language model that are not trained: `vision_tower`, `projector` or both."""
    engine: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """Settings of the train engine. `allocation` selects the engine, which defines them."""


@dataclass
class ServingSettings(RuntimeConfig):
    """The inference servers, and the workflow and reward of an episode."""

    workflow: str = "rlvr"
    """Installed workflow, agent (`AgentWorkflow`) or environment (`Environment`), or a dotted path
    `package.module:Class`."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    """Endpoint that agents call. Used if the workflow is an agent."""
    reward: str = "gsm8k"
    """Installed reward function, or a dotted path."""
    reward_workers: int = bounded(1, "at least 1", lambda number: number >= 1)
    """Reward worker processes per data-parallel leader."""
    reward_timeout: float = bounded(30.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds for one reward. After that, its process is killed and the episode fails with a reward error."""
    invalid_text: str = choice("reject", ("reject", "replace"))
    """Handling of text from tools, environments and agents that is not valid UTF-8, such as half an emoji. `reject`
    fails the episode (an agent's call gets status 400); `replace` inserts U+FFFD."""
    trial_episode: bool = True
    """Run a trial episode before the run starts: workflow and reward on one example, with a synthetic
    completion. Set false for a workflow that only works with a real server."""
    interrupt: str = choice("keep", ("keep", "recompute", "wait"))
    """Unfinished completions at a weight update: `keep` (continue with the KV cache), `recompute` (rebuild the KV cache
    first) or `wait` (finish them first)."""
    port: int = bounded(0, "0 (any free one) to 65535", lambda port: 0 <= port <= 65535)
    """Port of the first server; the others use the following ports. 0: any free port."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Settings of the servers. `allocation` selects the inference engine, which defines them."""
    client: ClientConfig = field(default_factory=ClientConfig)
    """Client of the servers."""


@dataclass
class SamplingSettings(ServingSettings):
    """The inference servers, sampling, and the workflow and reward of an episode."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling parameters of the training completions."""


@dataclass
class RolloutSettings(SamplingSettings, RolloutConfig):
    """The rollout runtime, and the workflow and reward of an episode."""

    allow_biased_sampling: bool = False
    """Train on completions sampled with top-p, top-k, min-p or penalties. Their log-probs refer to the full
    distribution, so importance weights are biased."""


@dataclass
class RunConfig(Settings):
    """Settings of every command."""

    experiment: str = "rl"
    """Name of the experiment, of the directory of its runs, and of the project in trackers."""
    trial: str = ""
    """Name of this run (default: a timestamp)."""
    run_dir: str = ""
    """Directory of the run's files (default: `runs/<experiment>/<trial>`)."""
    resume_from: str = ""
    """Recovery checkpoint to start from: a step of this run, `RUN/recover/step_N`, or another run's directory (its
    newest recovery checkpoint). Default: the newest recovery checkpoint of this run. If you repeat the command, the run
    resumes from its own newest recovery checkpoint."""
    seed: int = 1
    """Seed for data generation, model initialization, shuffling and sampling."""
    deterministic: bool = False
    """Bitwise reproducible metrics for the same seed and settings, with equal log-probs on servers and trainer (see
    docs/numerics.md). Slow: runs every sequence separately, on one thread. Needs `rollout.max_staleness=0`, because
    asynchronous batches depend on timing."""
    total_steps: int = bounded(100, "0 (only evaluate) or more", lambda steps: steps >= 0)
    """Training steps. 0: evaluate the initial model and end."""
    total_epochs: int = bounded(0, "0 (no limit) or more", lambda epochs: epochs >= 0)
    """Maximum number of epochs; 0: no limit. The run ends at `total_steps` or `total_epochs`, whichever is first."""
    recipe: str = ""
    """Defaults for learning rate, warm-up, lengths and temperature: `embedded` for the tiny built-in models, or
    `pretrained` for other models. `pretrained` has the values of verl's GSM8K examples (`gsm8k-grpo`, `gsm8k-sft`) or
    TRL's examples (`hh-rlhf-dpo`, `hh-rlhf-rm`); `conf/` names the files. Default: depends on `model.path`. Other
    settings override the recipe."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The initial policy."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training data."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The trained model: engine, optimizer, micro-batches."""
    allocation: str = ""
    """Inference server and trainer, with the number of devices of each, for example `embedded:d1+fsdp:d2`."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The available machines and devices."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Starting and supervising processes; `launcher=NAME` is short for `launcher.kind=NAME`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Model checkpoints to keep."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Recovery checkpoints. A stopped run resumes from the newest one: same command, same `run_dir`."""
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    """Evaluation on held-out examples."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Trackers that receive the metrics besides `metrics.jsonl`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cluster.request_from(self.launcher)

    def model_paths(self) -> dict[str, str]:
        """Return the path of each model that the run loads, by setting."""
        return {"model.path": self.model.path}

    def steps_with(self, examples: int, form: str) -> int:
        """Return the number of steps of the run: `total_steps`, or fewer if `total_epochs` ends it earlier.

        Args:
            examples: number of training examples.
            form: form of the data, see `load_rows`. With `rl`, a batch may contain examples of two epochs; the other
                forms drop an incomplete last batch.
        """
        size, epochs = self.data.batch_size, self.total_epochs
        epoch_steps = -(-examples * epochs // size) if form == "rl" else examples // size * epochs
        return min(self.total_steps, epoch_steps) if epochs else self.total_steps

    def finetune_spec(self) -> FinetuneSpec:
        """Return the training settings for the engine of the trained model."""
        return FinetuneSpec(
            self.model.directory(),
            self.total_steps * self.actor.minibatches,
            self.seed,
            self.actor.optimizer,
            self.actor.micro_batch,
            self.actor.dtype,
            deterministic=self.deterministic,
            freeze=tuple(self.actor.freeze),
        )


def require_plain_sampling(rollout: RolloutSettings) -> None:
    """Reject sampling parameters that change the distribution, because log-probs refer to the full distribution.

    Raises:
        ConfigError: with the parameters that change the distribution, unless `allow_biased_sampling` is set.
    """
    generation = rollout.generation
    plain = GenerationConfig()
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    require(
        rollout.allow_biased_sampling or not (generation.truncates or generation.penalizes),
        "rollout.generation",
        "top_p=1, top_k=0, min_p=0 and no penalties, because log-probs refer to the full distribution and training "
        "on other samples is biased (rollout.allow_biased_sampling=true allows it)",
        {n: getattr(generation, n) for n in names if getattr(generation, n) != getattr(plain, n)},
    )


@dataclass
class RefConfig:
    """The frozen reference policy of the KL penalty. Loaded if `algorithm.kl` needs it."""

    path: str = ""
    """Hugging Face directory or hub id of the reference policy. Empty: `model.path`, the initial policy."""
    engine: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """Settings of the train engine of this model. Default of each setting: its value in `actor.engine`."""


@dataclass
class CriticConfig(Settings):
    """The value model. Loaded if `algorithm.advantage.kind=gae` needs it."""

    setting: ClassVar[str] = "critic"
    path: str = ""
    """Hugging Face directory or hub id of the initial critic. Empty: `model.path`. The value head starts at 0."""
    lr: float = bounded(1e-5, "0 or more", lambda rate: rate >= 0)
    """Peak learning rate of the critic. Other settings of its optimizer: those of `actor.optimizer`."""
    engine: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """Settings of the train engine of this model. Default of each setting: its value in `actor.engine`."""
    clip: float = bounded(0.2, "0 (off) or more", lambda distance: distance >= 0)
    """Clip range of the value loss around the value before the update; 0 disables clipping."""


@dataclass
class ServedConfig(RunConfig):
    """Settings of a run that has inference servers or may have some."""

    rollout: ServingSettings = field(default_factory=ServingSettings)
    """Inference servers, workflow and reward."""
    rollouts: RolloutLogConfig = field(default_factory=RolloutLogConfig)
    """Completions to store."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluation on held-out examples."""
    publish: PublishConfig = field(default_factory=PublishConfig)
    """Sending new weights to the servers."""
    gap: GapConfig = field(default_factory=GapConfig)
    """Limits of the log-prob gap between servers and trainer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.launcher.max_restarts == 0 or self.rollout.client.progress_timeout > self.launcher.health_timeout,
            "rollout.client.progress_timeout",
            f"more than launcher.health_timeout={self.launcher.health_timeout:g} s, because completions wait for the "
            "restart of a single server that hangs",
            self.rollout.client.progress_timeout,
        )

    @property
    def generation(self) -> GenerationConfig:
        """Default sampling parameters of the run: those of the evaluation."""
        return self.evaluation.sampling(GenerationConfig())


@dataclass
class GRPOConfig(ServedConfig):
    """Settings of reinforcement learning from verifiable rewards."""

    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Generation of groups of completions: servers, workflow, reward, staleness."""
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    """Completions to store."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and loss; `algorithm=PRESET` selects a preset."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy, for KL penalties."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model, for PPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.algorithm.resolve_proximal(self.actor.minibatches)
        self._check_algorithm()
        require(
            not self.deterministic or self.rollout.max_staleness == 0,
            "deterministic=true with rollout.max_staleness",
            "0, because asynchronous batches depend on the timing of processes; set rollout.max_staleness=0 or "
            "deterministic=false",
            self.rollout.max_staleness,
        )
        require_plain_sampling(self.rollout)
        require(
            self.rollout.generation.temperature > 0,
            "rollout.generation.temperature",
            "more than 0: greedy completions of one prompt are all equal and have no advantage",
            self.rollout.generation.temperature,
        )

    def _check_algorithm(self) -> None:
        """Reject combinations of algorithm and run settings that do not work."""
        algorithm, generation = self.algorithm, self.rollout.generation
        require(
            self.rollout.group_size > 1 or not algorithm.advantage.compares_groups,
            "rollout.group_size with algorithm.advantage.kind=outcome and its mean or std over the group",
            "at least 2: a single completion is its own baseline and has no advantage (or set algorithm.advantage.kind="
            "return or gae)",
            self.rollout.group_size,
        )
        require(
            algorithm.reward.overlong_max <= generation.max_new_tokens,
            "algorithm.reward.overlong_max",
            f"at most rollout.generation.max_new_tokens={generation.max_new_tokens}, the longest possible completion",
            algorithm.reward.overlong_max,
        )
        self._check_credit()
        self._check_unused_models()
        require(
            algorithm.reward.scale != 0 or bool(self.ref.path),
            "ref.path with algorithm.reward.scale=0",
            "a teacher: without the reward, the loss has only the KL to the reference, by default the initial policy",
            self.ref.path,
        )

    def _check_unused_models(self) -> None:
        """Reject settings of a reference or critic that the algorithm does not use."""
        critic = {name: getattr(self.critic, name) for name in ("path", "lr", "clip")}
        changed = {name: value for name, value in critic.items() if value != getattr(CriticConfig, name)}
        kind, place = self.algorithm.advantage.kind, self.algorithm.kl.place
        require(
            self.algorithm.needs_critic or not changed,
            f"critic with algorithm.advantage.kind={kind}",
            "the defaults, because only algorithm.advantage.kind=gae uses a critic",
            changed,
        )
        require(
            self.algorithm.needs_reference or not self.ref.path,
            f"ref.path with algorithm.kl.place={place}",
            "no path, because only a KL penalty uses a reference (set algorithm.kl.place and algorithm.kl.coef)",
            self.ref.path,
        )

    def _check_credit(self) -> None:
        """Reject rewards per turn that the estimator does not use or would discount twice."""
        credit, discount = self.rollout.endpoint.credit, self.rollout.endpoint.discount
        advantage, shaping = self.algorithm.advantage, self.algorithm.reward
        require(
            credit == "episode" or advantage.reads_tokens,
            f"rollout.endpoint.credit with algorithm.advantage.kind={advantage.kind}",
            "`episode`: that estimator uses one number per episode (or set algorithm.advantage.kind=return or gae)",
            credit,
        )
        undiscounted = advantage.kind != "gae" and advantage.gamma == 1 and shaping == RewardConfig()
        require(
            credit == "episode" or discount == 1 or undiscounted,
            "rollout.endpoint.discount with rollout.endpoint.credit=turn",
            "1; other values need algorithm.advantage.gamma=1, the defaults of algorithm.reward, and an "
            "algorithm.advantage.kind other than gae (with gae, set gamma and unit=turn instead)",
            discount,
        )

    @property
    def generation(self) -> GenerationConfig:
        """Sampling parameters of the training completions."""
        return self.rollout.generation

    def finetune_spec(self) -> FinetuneSpec:
        """Return `RunConfig.finetune_spec`, with a gradient of the entropy if there is an entropy bonus."""
        return replace(super().finetune_spec(), entropy_grad=bool(self.algorithm.entropy_coef))

    def model_paths(self) -> dict[str, str]:
        """Return `RunConfig.model_paths`, with reference policy and critic if the algorithm needs them."""
        paths = {
            "ref.path": self.algorithm.needs_reference and self.ref.path,
            "critic.path": self.algorithm.needs_critic and self.critic.path,
        }
        return super().model_paths() | {setting: path for setting, path in paths.items() if path}

    def reference_spec(self) -> FinetuneSpec:
        """Return the settings for the engine of the reference policy, which has no optimizer."""
        return replace(super().finetune_spec(), model_path=self.model.directory(self.ref.path), optimizer=None)

    def critic_spec(self) -> FinetuneSpec:
        """Return the settings for the engine of the critic, with a value head and its own learning rate."""
        path, optimizer = self.model.directory(self.critic.path), replace(self.actor.optimizer, lr=self.critic.lr)
        return replace(super().finetune_spec(), model_path=path, optimizer=optimizer, head="value")


@dataclass
class SFTConfig(ServedConfig):
    """Settings of supervised learning from conversations. Servers, if allocated, answer held-out questions."""


@dataclass
class EvaluateConfig(ServedConfig):
    """Settings of an evaluation without training."""

    experiment: str = "evaluate"
    """Name of the directory of evaluations in `runs/`."""
    allocation: str = "embedded:d1"
    """Inference servers, for example `vllm:d2`."""
    data: DataConfig = field(default_factory=lambda: DataConfig(name=""))
    """The examples of `data.test_split`. Without `data.name`, only `evaluation.sets` are evaluated."""
    rollout: SamplingSettings = field(default_factory=SamplingSettings)
    """Inference servers, sampling, workflow and reward."""
    by: list[str] = field(default_factory=list)
    """Columns of the data. The scores are also reported for each of their values."""

    @property
    def generation(self) -> GenerationConfig:
        """Sampling parameters, before `evaluation.temperature` and `evaluation.max_new_tokens` apply."""
        return self.rollout.generation
