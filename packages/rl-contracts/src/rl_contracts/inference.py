"""The contract of an inference engine: the client side of one or more servers that generate."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_contracts.config import ClientConfig, Settings, require
from rl_contracts.data import ROUTES, ModelRequest, ModelResponse, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_contracts.models.directory import same_model
from rl_contracts.scheduler import JobSpec

__all__ = [
    "Canary",
    "CanaryCompletion",
    "Capabilities",
    "InferenceEngine",
    "ServedModel",
    "ServerConfig",
    "ServerProgram",
    "ServerSource",
    "is_address",
]

type ServerSource = Callable[[], Mapping[str, str]]
"""Says which servers there are now: address (`http://host:port`) by name. It may block, on a shared file system for
example. Empty: it cannot say."""


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """The Python program that a kind of server is, and what it needs where it runs."""

    python: str
    """Interpreter; empty: that of the command."""
    module: str
    """What the interpreter must be able to import."""
    distributions: tuple[str, ...]
    """Names under which that is installed; one of them must be."""
    remedy: str
    """What to do where it is not."""
    min_version: str = ""
    """First version that will do, by its numbers, such as `0.32`; empty: any."""
    below_version: str = ""
    """First version that will not do any more; empty: none."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the import needs."""

    @property
    def describe_requirements(self) -> str:
        """Which packages of which versions will do, in words."""
        bounds = [f"{sign}{number}" for sign, number in ((">=", self.min_version), ("<", self.below_version)) if number]
        return f"{' or '.join(self.distributions)} {','.join(bounds)}".rstrip()

    def accepts(self, version: str) -> bool:
        """Whether a version will do."""
        late = self.below_version and not _numbers(version) < _numbers(self.below_version)
        return not late and _numbers(version) >= _numbers(self.min_version)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a running server says of itself."""

    model_path: str
    """What it was started with: a directory or a hub id; empty: it does not say."""
    version: int = 0
    """Of the weights that it serves."""
    weights_dir: str | None = None
    """Directory in which it looks for updates; empty: it takes none; None: it takes them from anywhere."""
    program: str = ""
    """The program that it is, and its version, such as `vllm 0.32.0`; empty: it does not say."""

    def check(self, spec: ServeSpec, program: ServerProgram | None, stored: bool) -> None:
        """Refuse a server that a run cannot use, whatever its version. Reads the models' settings.

        Args:
            spec: what the run expects; what is empty there is not compared.
            program: the one that the run is made for; None: not compared.
            stored: whether new weights come as files, which the server must look for where they lie.

        Raises:
            InferenceError: in words that go on a sentence about it.
        """
        name, _, version = self.program.partition(" ")
        if program is not None and name and not (name in program.distributions and program.accepts(version)):
            raise InferenceError(f"it is {self.program}, and this run is made for {program.describe_requirements}")
        if self.model_path and spec.model_path and not same_model(self.model_path, spec.model_path):
            raise InferenceError(f"it serves the model {self.model_path}, and the run is about {spec.model_path}")
        if self.weights_dir == "":
            raise InferenceError("it takes no updates of its weights")
        compared = stored and self.weights_dir and spec.weights_dir
        if compared and Path(str(self.weights_dir)).resolve() != Path(spec.weights_dir).resolve():
            raise InferenceError(
                f"it looks for updates in {self.weights_dir}, and this run puts them into {spec.weights_dir}"
            )


def is_address(text: str) -> bool:
    """Whether a text is the address of a server, `http://host:port`."""
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and bool(parts.netloc)


@dataclass
class ServerConfig(Settings):
    """Base of the settings of one kind of inference server: what can be chosen about it and does not follow from the
    run. An engine `XxxEngine` brings a subclass `XxxEngineConfig` beside it."""

    addresses: list[str] = field(
        default_factory=list,
        metadata={"expected": "http://host:port of each", "holds": lambda given: all(map(is_address, given))},
    )
    """Servers that run already (`http://host:port`), as many as the allocation says: they are looked at and used, and
    none is started. Their key is expected in `RL_RUN_KEY`. Empty: the launcher starts them."""

    def program(self) -> ServerProgram | None:
        """What must be installed where the servers run; the command looks before anything starts. None: nothing that
        could be looked for."""
        return None

    def check(self, spec: ServeSpec) -> None:
        """Refuse what these servers cannot do. Called when a run's config is resolved, before anything starts.

        Raises:
            ConfigError: names both settings, and the fix.
        """

    def max_concurrent_completions(self) -> int | None:
        """Answers that one server generates at the same time at most, for `rl plan`; None: what its memory holds."""
        return None

    def cache_bytes(self, memory: float, weights: float) -> float:
        """Bytes of a device's memory that are for keys and values, for `rl plan`.

        Args:
            memory: of the device.
            weights: bytes of the model that lie on it.
        """
        return max(0.9 * memory - weights, 0.0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What servers can do. Whoever wants something that not all of them can asks here first, and says so where it is
    left out; what is asked for nevertheless raises an `InferenceError`. The defaults are what a method of the contract
    promises that an implementation must have."""

    routes: tuple[str, ...] = ROUTES
    """Ways on which weights can come."""
    staged_load: bool = True
    """A new version is loaded beside the served one, while answers are generated. Else over it, in the commit."""
    checksums: bool = True
    """Receipts, and `live_receipts`, have a checksum of each parameter. Else receipts are empty, and a `Canary` shows
    what is served; so it is for all that do not stage beside, whose receipts would come too late."""
    live_checksums: bool = True
    """Those of `live_receipts` are of what is computed with. Else of what was loaded last, which a diagnosis is not
    shown: it says nothing of what is served."""
    version_stamps: bool = True
    """Servers say which version made which token. Else tokens count for the oldest version that can have made them."""
    version_stamps_at_end: bool = False
    """They say it in the last message of an answer: of one whose server is lost the same as without `stamps`."""
    any_score_temperature: bool = True
    """`score` takes every temperature. Else 1 alone."""
    scores_previous_weights: bool = False
    """`score_previous_weights` works."""
    truncated_logprobs: bool = False
    """After top-p, top-k, min-p and penalties, log-probs are of what these left: such requests are refused."""
    seeds: bool = True
    """A seed decides the tokens. Else it counts for nothing."""
    seeds_by_position: bool = True
    """A resumed answer draws what it would have drawn uninterrupted. Else each attempt has a seed of its own."""
    resumes_completions: bool = True
    """A resumed answer goes on with its stop strings and penalties. Else the client looks for stop strings itself,
    which takes the tokenizer of `ServeSpec.model_path`, and penalties are refused."""
    keeps_cache: bool = True
    """`interrupt="keep"` goes on with the KV cache of the old weights. Else it is computed anew in the server, which no
    answer notices."""
    heartbeats: bool = True
    """Whoever answers shows at least every few seconds that it does. Else silence says nothing, and `/health` is asked.
    """
    lora: bool = False
    """Updates may carry adapters alone (`WeightUpdateMeta.adapter`)."""
    sleeps: bool = False
    """`sleep` and `wake` work."""
    schemas: bool = False
    """Answers can be kept to a JSON schema (`ModelRequest.schema`)."""

    def __post_init__(self) -> None:
        expected = "False where staged_load is, because a receipt is compared before anything is served"
        require(self.staged_load or not self.checksums, "capabilities.checksums", expected, self.checksums)


@dataclass(frozen=True, slots=True)
class CanaryCompletion:
    """What one server showed of the weights that it serves now."""

    server: str
    """Its name."""
    scores: list[float]
    """Log-probs of the prompt's tokens at temperature 1; entry 0 is 0."""
    output_ids: list[int]
    """Greedy tokens after the prompt."""
    logprobs: list[float]
    """Their log-probs at temperature 1."""


@dataclass(frozen=True, slots=True)
class Canary:
    """How servers without checksums show after an update what they serve, before they get requests again: the same
    prompt is answered on each before the update (so that it lies in its prefix cache) and after it."""

    input_ids: list[int]
    """Several hundred tokens."""
    tokens: int
    """Greedy tokens to generate after them."""
    judge: Callable[[int, list[CanaryCompletion]], Awaitable[None]]
    """Called with the version and what servers showed of it: in a commit with all of them; later with one that was
    brought up to the same version. Raises a `WeightUpdateError` that names the server and what differs."""


class InferenceEngine(ABC):
    """Client of all servers of one role. Every method but `initialize` and `server_spec` is a coroutine of one event
    loop.

    The client owns retries: a request that a server loses is continued elsewhere with the tokens it already has. A
    deadline limits the time without progress (no token, no byte), never the length of an answer.
    """

    __slots__ = ()  # so that a handle per episode can be small

    @abstractmethod
    def __init__(self, config: Any, spec: ServeSpec, client: ClientConfig) -> None:
        """
        Args:
            config: the servers' own settings, of the `ServerConfig` subclass that comes with this class.
            spec: what follows from the run.
            client: deadlines, retries, probes, routing.
        """

    @classmethod
    @abstractmethod
    def server_spec(cls, config: Any, spec: ServeSpec) -> JobSpec:
        """What a launcher must know to start the servers of this engine: command, readiness check, resources.

        Raises:
            ConfigError: these servers cannot do what `spec` asks for.
        """

    @abstractmethod
    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Remember the servers (`http://host:port`) and the run key. Connects to nothing yet.

        Raises:
            ConfigError: no address, or one that is not a URL.
        """

    def follow_discovery(self, source: ServerSource) -> bool:
        """From now on take in servers that `source` names, and let those go that it names no more; called once, after
        `initialize`. A server that comes in holds the committed version, and has shown it, before it is used; one that
        goes is no failure, and its answers go on elsewhere.

        Returns:
            False where this client does not: its servers stay those of `initialize`.
        """
        return False

    def stop_waiting_for_servers(self) -> None:  # noqa: B027 - a client that waits for no server has nothing to do
        """The run is about to end: nobody starts servers again, so an update of the weights or a score that finds none
        fails at once. Returns at once, on any thread, also from a signal handler."""

    @property
    def capabilities(self) -> Capabilities:
        """What the servers can do; known before `initialize`."""
        return Capabilities()

    @property
    @abstractmethod
    def served_dtype(self) -> str:
        """Name of the torch dtype in which the servers hold weights and compute, for example `"float32"`; or how they
        quantise them (`"fp8"`)."""

    @property
    @abstractmethod
    def servers(self) -> list[str]:
        """Names of the live servers, as `ModelResponse.server` and `WeightReceipt.holder` have them. They may come and
        go (`follow`)."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The last version committed on all live servers; what a group that starts now may count on."""

    async def describe(self, server: str) -> ServedModel | None:
        """Ask one of `servers` what it is; a run asks each that it did not start itself. None: this kind does not say.

        Raises:
            InferenceError: it does not answer, or not as servers of this kind do, or refuses the key.
        """
        return None

    @abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one answer, through interruptions and lost servers, to its end.

        Raises:
            InferenceError: refused as invalid, or no server made progress before the deadline.
        """

    @abstractmethod
    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        """Log-probs of given tokens at the current weights: entry t is that of `input_ids[t]`; entry 0 is 0.

        Args:
            temperature: 1, unless `capabilities.any_score_temperature`.
            server: the one of `servers` that is asked, and no other; None: whichever has the least to do.

        Raises:
            InferenceError: refused as invalid, no live server could, or the one that was named is not live or failed.
        """

    async def score_previous_weights(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """As `score`, at the weights that were served before the last commit. A diagnosis asks for it.

        Raises:
            InferenceError: no server holds them any more, or this kind of server never does.
        """
        raise InferenceError(f"{type(self).__name__} keeps no weights of an earlier version.")

    async def live_receipts(self, server: str | None = None) -> list[WeightReceipt]:
        """Checksums of the tensors that each server serves now, under all of their names. A diagnosis asks for them.

        Args:
            server: the one of `servers` that is asked; None: all.

        Raises:
            InferenceError: no server answered, or this kind of server has no such checksums.
        """
        raise InferenceError(f"{type(self).__name__} gives no checksums of served tensors.")

    @abstractmethod
    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a version beside the served one on every server, while they go on generating; or, where
        `capabilities.staged_load` is false, see that `commit_weights` will be able to load it.

        Returns:
            each server's receipt, without checksums where `capabilities.checksums` is false. Nothing is served from the
            new weights before `commit_weights`.

        Raises:
            WeightUpdateError: no live server could stage. A server that could not while others did is evicted.
        """

    @abstractmethod
    async def commit_weights(self, version: int, interrupt: str = "keep", canary: Canary | None = None) -> float:
        """pause -> swap -> commit -> resume the staged version on every server.

        Args:
            interrupt: what happens to unfinished generations: `keep` (go on, old KV cache), `recompute` (go on, KV
                cache rebuilt with the new weights) or `wait` (finish them first).
            canary: what each server has to show before it gets requests again. Always given where
                `capabilities.checksums` is false.

        Returns:
            the longest time, in seconds, that a server did not generate.

        Raises:
            WeightUpdateError: no live server committed, or the canary's judge raised it. A server that does not
                acknowledge is evicted before any resumes.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating on all servers; unfinished answers stay where they are."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo `pause`."""

    async def sleep(self) -> float:
        """Give the servers' memory back until weights are committed, or `wake`, for a trainer on the same devices;
        requests wait. Weights can be staged meanwhile.

        Returns:
            how many bytes less they have then, as they measure it; 0 where they do not.

        Raises:
            InferenceError: these servers cannot (`capabilities.sleeps`), or none did.
        """
        raise InferenceError(f"{type(self).__name__}: these servers cannot give their memory back for a while.")

    async def wake(self) -> None:
        """Undo `sleep` without a commit: the servers go on with the version that they served. Does nothing where they
        are awake.

        Raises:
            InferenceError: these servers cannot (`capabilities.sleeps`), or none did.
        """
        raise InferenceError(f"{type(self).__name__}: these servers cannot give their memory back for a while.")

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """Sums over the servers: `servers`, `running`, `waiting`, `generated_tokens`, `busy_seconds`. The last two
        never go down, whoever leaves.

        Also refreshes `version`, for a client beside the one that published.
        """

    async def sync_version(self, version: int) -> None:
        """Hear that another client has committed a version on the servers: from now on `version` is at least that, and
        no server that is behind it is used. Here `stats` finds out."""
        await self.stats()

    @abstractmethod
    async def destroy(self) -> None:
        """Close connections. Requests that still wait fail with an `InferenceError`."""


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: `0.32.0rc1+cpu` is (0, 32, 0)."""
    release = re.match(r"[\d.]*", version)
    return tuple(int(number) for number in release[0].split(".") if number) if release else ()
