"""Contract of an inference engine: the client of one or more inference servers."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
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
"""Function that returns the current servers: name to address (`http://host:port`).

It may block, for example on a shared file system. An empty result means that the servers are unknown.
"""


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """Python program of a kind of inference server, and its requirements on the machine."""

    python: str
    """Path of the Python interpreter; empty for the interpreter of the command."""
    module: str
    """Module that the interpreter must be able to import."""
    distributions: tuple[str, ...]
    """Names of the packages that provide the module; one of them must be installed."""
    remedy: str
    """Advice to the user, in sentences, if none of the packages is installed."""
    min_version: str = ""
    """Lowest supported version, such as `0.32`; empty for any. Comparisons ignore suffixes such as `rc1`."""
    below_version: str = ""
    """Lowest version that is too new to be supported; empty for none."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that the import requires."""

    @property
    def describe_requirements(self) -> str:
        """Supported packages and versions as text, for example `vllm >=0.20,<0.33`."""
        bounds = [f"{sign}{number}" for sign, number in ((">=", self.min_version), ("<", self.below_version)) if number]
        return f"{' or '.join(self.distributions)} {','.join(bounds)}".rstrip()

    def accepts(self, version: str) -> bool:
        """Return whether a version is supported."""
        too_new = self.below_version and not _numbers(version) < _numbers(self.below_version)
        return not too_new and _numbers(version) >= _numbers(self.min_version)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Self-description of a running server."""

    model_path: str
    """Model that the server was started with: a directory or a hub id; empty if not reported."""
    version: int = 0
    """Version of the weights that the server serves."""
    weights_dir: str | None = None
    """Directory from which the server reads weight updates. Empty: it accepts no updates. None: it reads any directory.
    """
    program: str = ""
    """Program of the server and its version, such as `vllm 0.32.0`; empty if not reported."""

    def check(self, spec: ServeSpec, program: ServerProgram | None, stored: bool) -> None:
        """Reject a server that a run cannot use, whatever its weight version. Reads the `config.json` of the models.

        Args:
            spec: expected values; empty ones are not compared.
            program: expected program, or None to skip the comparison.
            stored: whether weight updates are files, so that the server must read from the run's directory.

        Raises:
            InferenceError: the server does not match. The message is a clause that begins with "it".
        """
        name, _, version = self.program.partition(" ")
        if program is not None and name and not (name in program.distributions and program.accepts(version)):
            raise InferenceError(f"it runs {self.program}, but this run requires {program.describe_requirements}")
        if self.model_path and spec.model_path and not same_model(self.model_path, spec.model_path):
            raise InferenceError(f"it serves the model {self.model_path}, but this run requires {spec.model_path}")
        if self.weights_dir == "":
            raise InferenceError("it does not accept weight updates")
        must_match = stored and self.weights_dir and spec.weights_dir
        if must_match and Path(str(self.weights_dir)).resolve() != Path(spec.weights_dir).resolve():
            raise InferenceError(
                f"it reads weight updates from {self.weights_dir}, but this run writes them to {spec.weights_dir}"
            )


def is_address(text: str) -> bool:
    """Return whether a text is the address of a server, such as `http://host:port`."""
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and bool(parts.netloc)


@dataclass
class ServerConfig(Settings):
    """Base class of the settings of one kind of server, which complement the run's settings (`ServeSpec`).

    An engine `XxxEngine` requires a subclass `XxxEngineConfig` in the same module.
    """

    addresses: list[str] = field(
        default_factory=list,
        metadata={"expected": "a list of http://host:port", "holds": lambda urls: all(map(is_address, urls))},
    )
    """Addresses (`http://host:port`) of running servers to use, as many as the allocation has. The run checks them and
    starts none. `RL_RUN_KEY` must contain their key. Empty: the launcher starts the servers."""

    def program(self) -> ServerProgram | None:
        """Return the program that must be installed where the servers run, or None to check nothing.

        The command checks it before anything starts.
        """
        return None

    def check(self, spec: ServeSpec) -> None:
        """Reject settings that these servers do not support. Called for the resolved config of a run, before it starts.

        Raises:
            ConfigError: two settings conflict; the message names both and the fix.
        """

    def max_concurrent_completions(self, device: str = "cpu", memory: float = 0.0) -> int | None:
        """Return the maximum number of concurrent completions per server, or None if only memory limits it.

        Args:
            device: `cpu`, `cuda`, or the name of a GPU, such as `H100`.
            memory: bytes of memory of the device; 0 if unknown.
        """
        return None

    def cache_bytes(self, memory: float, weights: float) -> float:
        """Return the bytes of a device's memory that the KV cache gets, for `rl plan`.

        Args:
            memory: bytes of memory of the device.
            weights: bytes of model weights on the device.
        """
        return max(0.9 * memory - weights, 0.0)

    def sleeping_bytes(self, memory: float, weights: float) -> float:
        """Return the bytes of a device that a server keeps while it sleeps, for `rl plan`: by default all its bytes.

        Args:
            memory, weights: see `cache_bytes`.
        """
        return weights + self.cache_bytes(memory, weights)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional features of a kind of server.

    A caller checks a feature here before it uses it, and reports a missing one. A call that requires a
    missing feature raises an `InferenceError`. The defaults describe a server that implements exactly the required
    methods of the contract.
    """

    routes: tuple[str, ...] = ROUTES
    """Supported weight routes."""
    staged_load: bool = True
    """True if a new version is loaded while the current one is served. If False, the commit loads it in place."""
    checksums: bool = True
    """True if receipts and `live_receipts` contain a checksum of each parameter.

    If False, receipts are empty and a `Canary` checks the served weights. This must be False without `staged_load`,
    because then a receipt would arrive after the weights are served.
    """
    live_checksums: bool = True
    """True if `live_receipts` computes checksums of the tensors that the server computes with.

    If False, it returns the checksums of the last load, and the diagnosis of a log-prob gap ignores them.
    """
    version_stamps: bool = True
    """True if servers report the version of each token. If False, tokens get the oldest version that is possible."""
    version_stamps_at_end: bool = False
    """True if the versions arrive only in the last message of a completion.

    If the server is lost before that message, tokens get their versions as without `version_stamps`.
    """
    any_score_temperature: bool = True
    """True if `score` accepts every temperature; if False, only 1."""
    scores_previous_weights: bool = False
    """True if `score_previous_weights` is supported."""
    truncated_logprobs: bool = False
    """True if top-p, top-k, min-p and penalties change the log-probs; if True, requests with them are rejected."""
    max_temperature: float = math.inf
    """Highest sampling temperature that the servers accept."""
    seeds: bool = True
    """True if a seed makes sampling reproducible; if False, seeds are ignored."""
    seeds_by_position: bool = True
    """True if a resumed completion samples the same tokens as without interruption.

    If False, each attempt has a different seed.
    """
    resumes_completions: bool = True
    """True if a resumed completion keeps the state of its stop strings and penalties.

    If False, the client detects stop strings itself, with the tokenizer of `ServeSpec.model_path`, and rejects
    penalties.
    """
    keeps_cache: bool = True
    """True if `interrupt="keep"` continues with the KV cache of the old weights; if False, the server recomputes it."""
    heartbeats: bool = True
    """True if a server sends a heartbeat every few seconds while it works on a request; if False, the client probes
    `/health`."""
    lora: bool = False
    """True if weight updates may contain only adapters (`WeightUpdateMeta.adapter`)."""
    sleeps: bool = False
    """True if `sleep` and `wake` are supported."""
    schemas: bool = False
    """True if completions can be constrained to a JSON schema (`ModelRequest.schema`)."""
    images: bool = False
    """True if prompts may have images (`ModelRequest.images`)."""

    def __post_init__(self) -> None:
        expected = "False with staged_load=False, which serves weights before a receipt can be compared"
        require(self.staged_load or not self.checksums, "capabilities.checksums", expected, self.checksums)


@dataclass(frozen=True, slots=True)
class CanaryCompletion:
    """Results of the canary prompt on one server, for the weights that it serves now."""

    server: str
    """Name of the server."""
    scores: list[float]
    """Log-probs of the prompt's tokens at temperature 1; entry 0 is 0."""
    output_ids: list[int]
    """Greedy completion of the prompt."""
    logprobs: list[float]
    """Log-probs of `output_ids` at temperature 1."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Check of the served weights after an update, for servers without checksums, before they get requests again.

    Every server completes the same prompt before and after the update. The first completion puts the prompt into the
    server's prefix cache, so that the second one reveals a stale cache.
    """

    input_ids: list[int]
    """Token ids of the prompt, several hundred."""
    tokens: int
    """Number of greedy tokens to generate."""
    judge: Callable[[int, list[CanaryCompletion]], Awaitable[None]]
    """Function called with the version and the servers' results.

    A commit calls the function with the results of all servers. When a server loads the same version later, the client
    calls the function with the result of that server. For wrong results, the function raises a `WeightUpdateError` that
    names the server and the difference.
    """


class InferenceEngine(ABC):
    """Client of all servers of one role. Its coroutines must run on one event loop. `async with` ends with `destroy`.

    The client does all retries: a request that a server loses is resumed on another server with the tokens received so
    far. A deadline limits the time without progress (no token, no byte), not the duration of a completion.
    """

    __slots__ = ()  # keeps the per-episode handles small

    @abstractmethod
    def __init__(self, config: Any, spec: ServeSpec, client: ClientConfig) -> None:
        """Create a client without servers; `initialize` sets them.

        Args:
            config: settings of the servers, an instance of this engine's `ServerConfig` subclass.
            spec: settings of the run.
            client: deadlines of the client.
        """

    @classmethod
    @abstractmethod
    def server_spec(cls, config: Any, spec: ServeSpec) -> JobSpec:
        """Return the job that a launcher starts for the servers of this engine: command, readiness check, resources.

        Raises:
            ConfigError: these servers do not support `spec`.
        """

    @abstractmethod
    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Set the addresses of the servers (`http://host:port`) and the run key, without connecting.

        Raises:
            ConfigError: there is no address, or one is not a URL.
        """

    def follow_discovery(self, source: ServerSource) -> bool:
        """Keep the list of servers equal to the list from `source`. Call this once, after `initialize`.

        A new server gets requests only after a check that it serves the committed version. Removing a server does not
        count as a failure; its requests are resumed on other servers.

        Returns:
            False, the default, if this client cannot add or remove servers.
        """
        return False

    def stop_waiting_for_servers(self) -> None:  # noqa: B027 - optional
        """Make weight updates and scores fail immediately if no server is left. Called when the run is ending.

        Returns immediately. Safe in any thread and in a signal handler.
        """

    @property
    def capabilities(self) -> Capabilities:
        """Optional features of the servers, available before `initialize`."""
        return Capabilities()

    @property
    @abstractmethod
    def served_dtype(self) -> str:
        """Torch dtype of the servers' weights and computation, for example `"float32"`, or quantization (`"fp8"`)."""

    @property
    @abstractmethod
    def servers(self) -> list[str]:
        """Names of the live servers, as in `ModelResponse.server` and `WeightReceipt.holder`.

        The list may change during a run (`follow_discovery`).
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """Last version committed on all live servers; a group that starts now gets at least this version."""

    async def describe(self, server: str) -> ServedModel | None:
        """Return the self-description of one of `servers`, or None if this kind of server has none.

        A run calls this for each server that it did not start.

        Raises:
            InferenceError: the server does not respond, is of another kind, or rejects the key.
        """
        return None

    @abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one complete completion, resuming it after interruptions and lost servers.

        Raises:
            InferenceError: the request is invalid, or no server made progress before the deadline.
        """

    @abstractmethod
    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        """Return the log-prob of each input token at the current weights.

        Entry t is the log-prob of `input_ids[t]`; entry 0 is 0.

        Args:
            input_ids: token ids to score.
            temperature: sampling temperature; must be 1 unless `capabilities.any_score_temperature`.
            server: the only server to use, one of `servers`; None selects the least busy one.

        Raises:
            InferenceError: the request is invalid, all live servers failed, or `server` is not live or failed.
        """

    async def score_previous_weights(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the log-prob of each input token at the weights served before the last commit, for a diagnosis.

        Raises:
            InferenceError: no server has these weights any more, or this kind of server does not keep them.
        """
        raise InferenceError(f"{type(self).__name__} does not keep the weights of an earlier version.")

    async def live_receipts(self, server: str | None = None) -> list[WeightReceipt]:
        """Return checksums of the tensors that each server serves now, under all of their names, for a diagnosis.

        Args:
            server: the only server to use, one of `servers`; None selects all.

        Raises:
            InferenceError: no server responded, or this kind of server has no such checksums.
        """
        raise InferenceError(f"{type(self).__name__} does not report checksums of the served weights.")

    @abstractmethod
    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a new version on every server while the current one is served; `commit_weights` then switches to it.

        Without `capabilities.staged_load` this only checks that `commit_weights` can load the version.

        Returns:
            receipt of each server, without checksums if `capabilities.checksums` is False.

        Raises:
            WeightUpdateError: all live servers failed. If only some fail, they are evicted.
        """

    @abstractmethod
    async def commit_weights(self, version: int, interrupt: str = "keep", canary: Canary | None = None) -> float:
        """Pause every server, switch it to the staged version, and resume it.

        Args:
            version: the staged version.
            interrupt: handling of unfinished completions: `keep` (continue with the old KV cache), `recompute`
                (continue after rebuilding the KV cache with the new weights) or `wait` (finish them first).
            canary: check of the served weights before a server gets requests again. Required if
                `capabilities.checksums` is False.

        Returns:
            the longest time, in seconds, for which a server did not generate.

        Raises:
            WeightUpdateError: no live server committed, or the canary's judge raised it. A server that does not
                acknowledge the commit is evicted before any server resumes.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Pause generation on all servers, without aborting unfinished completions."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume generation after `pause`."""

    async def sleep(self) -> float:
        """Release the servers' device memory until the next commit or `wake`, for a trainer on the same devices.

        Requests wait meanwhile. Weights can be staged.

        Returns:
            number of bytes released, as measured by the servers; 0 if they do not measure it.

        Raises:
            InferenceError: these servers do not support it (`capabilities.sleeps`), or all of them failed.
        """
        raise InferenceError(f"{type(self).__name__}: these servers cannot release their memory (no `sleep`).")

    async def wake(self) -> None:
        """End `sleep` without a commit; the servers continue with the version that they served. No effect if awake.

        Raises:
            InferenceError: these servers do not support it (`capabilities.sleeps`), or all of them failed.
        """
        raise InferenceError(f"{type(self).__name__}: these servers cannot release their memory (no `sleep`).")

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """Return sums over the servers: `servers`, `running`, `waiting`, `generated_tokens`, `busy_seconds`.

        `generated_tokens` and `busy_seconds` never decrease, even when a server leaves. This also updates `version` in
        a client that did not publish the weights itself.
        """

    async def sync_version(self, version: int) -> None:
        """Register that another client has committed a version on the servers.

        Afterwards `version` is at least that version, and servers with an older version are not used. The default calls
        `stats`.
        """
        await self.stats()

    @abstractmethod
    async def destroy(self) -> None:
        """Close all connections. Waiting requests fail with an `InferenceError`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.destroy()


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (0, 32, 0) for `0.32.0rc1+cpu`."""
    release = re.match(r"[\d.]*", version)
    return tuple(int(number) for number in release[0].split(".") if number) if release else ()
