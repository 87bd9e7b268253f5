"""The contract of an inference engine: the client side of one or more servers that generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rl_contracts.config import ClientConfig, Settings
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_contracts.scheduler import JobSpec


@dataclass
class ServerConfig(Settings):
    """Base of the settings of one kind of inference server: what can be chosen about it and does not follow from the
    run. An engine `XxxEngine` brings a subclass `XxxEngineConfig` beside it."""

    def check(self, spec: ServeSpec) -> None:
        """Refuse what these servers cannot do. Called when a run's config is resolved, before anything starts.

        Raises:
            ConfigError: names both settings, and the fix.
        """


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

    @property
    @abstractmethod
    def served_dtype(self) -> str:
        """Name of the torch dtype in which the servers hold weights and compute, for example `"float32"`."""

    @property
    @abstractmethod
    def servers(self) -> list[str]:
        """Names of the live servers, as `ModelResponse.server` and `WeightReceipt.holder` have them."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The last version committed on all live servers; what a group that starts now may count on."""

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
            server: the one of `servers` that is asked, and no other; None: whichever has the least to do.

        Raises:
            InferenceError: refused as invalid, no live server could, or the one that was named is not live or failed.
        """

    async def score_before(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
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
        """Load a version beside the served one on every server, while they go on generating.

        Returns:
            each server's receipt. Nothing is served from the new weights before `commit_weights`.

        Raises:
            WeightUpdateError: no live server could stage. A server that could not while others did is evicted.
        """

    @abstractmethod
    async def commit_weights(self, version: int, interrupt: str = "keep") -> float:
        """pause -> swap -> commit -> resume the staged version on every server.

        Args:
            interrupt: what happens to unfinished generations: `keep` (go on, old KV cache), `recompute` (go on, KV
                cache rebuilt with the new weights) or `wait` (finish them first).

        Returns:
            the longest time, in seconds, that a server did not generate.

        Raises:
            WeightUpdateError: no live server committed. A server that does not acknowledge is evicted before any
                resumes.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating on all servers; unfinished answers stay where they are."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo `pause`."""

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """Sums over the servers: `servers`, `running`, `waiting`, `generated_tokens`, `busy_seconds`.

        Also refreshes `version`, for a client beside the one that published.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Close connections. Requests that still wait fail with an `InferenceError`."""
