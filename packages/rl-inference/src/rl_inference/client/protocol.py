"""Requests and responses of inference servers, as pure functions over bytes and JSON without a connection.

Each kind of server has a subclass of `ServerProtocol`. All kinds share `rl_inference.client.engine.HttpEngine`, with
routing, retries and weight updates. `ServerProtocol.capabilities` describes their differences.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlencode

import msgspec

from rl_contracts.config import GenerationConfig
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.images import Image
from rl_contracts.inference import Capabilities, ServedModel


@dataclass(frozen=True)
class Call[T]:
    """HTTP request without the address of a server."""

    path: str
    """Path of the URL."""
    parse: Callable[[bytes], T]
    """Function that parses the response, or each line of a stream in order.

    It may keep state between the lines, because a streaming call is made only once. It raises ValueError, LookupError
    or TypeError if the bytes do not follow the protocol.
    """
    body: dict[str, Any] | None = None
    """JSON body, or None for no body."""
    query: dict[str, str] = field(default_factory=dict)
    """Query parameters of the URL."""
    method: str = ""
    """HTTP method; empty for POST with a body and GET without one."""

    @property
    def target(self) -> str:
        """Path and query of the URL."""
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path

    @property
    def verb(self) -> str:
        """HTTP method to use."""
        return self.method or ("GET" if self.body is None else "POST")


type Exchange[T] = Generator[Call[Any], Any, T]
"""Generator that makes one or more calls in order.

It yields each `Call`, receives the parsed response and returns the combined result. Every call must be safe to repeat.
The generator may raise an `InferenceError` if a response reports a failure.
"""


@dataclass
class GenerationChunk:
    """Tokens that one message of a stream adds to a completion."""

    output_ids: list[int] = field(default_factory=list)
    """New tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each new token: log_softmax(logits / temperature) over the full vocabulary."""
    versions: list[int] = field(default_factory=list)
    """Version of each new token; empty if the server reports versions at the end of the stream (`stamps`)."""
    finish: str | None = None
    """Reason for the end of the stream, `stop`, `length` or `abort`; None while it continues."""
    error: str | None = None
    """Error of the server during generation, or None."""
    stamps: list[int] | None = None
    """Version of every token of this stream, in the last message of a server with `version_stamps_at_end`, or None."""


@dataclass(frozen=True)
class Health:
    """Result of a health probe."""

    version: int | None
    """Version that the server serves, or None if not reported."""
    open: int | None = None
    """Number of open requests of all clients, or None if not reported."""


@dataclass(frozen=True)
class Stats:
    """Metrics of one server."""

    version: int
    """Version that the server serves."""
    paused: bool
    """True if generation is paused."""
    running: float
    """Number of completions in generation."""
    waiting: float
    """Number of queued requests."""
    generated_tokens: float
    """Number of tokens generated since the server started."""
    busy_seconds: float
    """Seconds of generation since the server started."""


class ServerProtocol(ABC):
    """Protocol of one kind of server. All requests except `generate` are an `Exchange`."""

    capabilities: Capabilities
    """Optional features of these servers."""
    counts_tokens: ClassVar[bool] = False
    """True if `Stats.generated_tokens` grows with each token and not only with each finished completion.

    If True, a server with open requests that generates no token within the progress timeout counts as lost, even if its
    health probes succeed.
    """
    life_header: ClassVar[str] = ""
    """Response header that identifies the process of the server, different after each restart; empty for none."""

    @abstractmethod
    def generate(
        self,
        rid: str,
        input_ids: list[int],
        generation: GenerationConfig,
        seed: int | None,
        resumed: int,
        schema: dict[str, Any] | None = None,
        images: Sequence[Image] = (),
    ) -> Call[GenerationChunk | None]:
        """Return a streaming request that continues `input_ids`. Lines without tokens parse to None.

        Args:
            rid: id of this attempt.
            input_ids: tokens of the prompt, followed by the tokens of an interrupted completion.
            generation: settings of the request, with `max_new_tokens` and `min_new_tokens` reduced to the missing
                tokens. Without `capabilities.resumes_completions` they contain no stop strings, because the client
                detects them.
            seed: seed of this attempt, or None.
            resumed: number of tokens in `input_ids` that belong to an interrupted completion.
            schema: JSON schema of the completion, or None; only with `capabilities.schemas`.
            images: images of the prompt; only with `capabilities.images`.

        Raises:
            InferenceError: the server does not support the request as specified.
        """

    def abort(self, rid: str) -> Exchange[None]:
        """Abort one attempt. Its stream then ends with `finish="abort"` and the versions of all its tokens.

        Used only with `capabilities.version_stamps_at_end`; for other servers the client closes the connection.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        """Request the log-prob of each input token; entry 0 is 0. The caller checks `capabilities` first.

        Args:
            input_ids: tokens to score.
            temperature: divisor of the logits.
            before: whether to use the weights that were served before the last commit.
        """

    @abstractmethod
    def health(self) -> Exchange[Health]:
        """Request the health of the server. The response must be fast, even while it generates, loads or is paused."""

    @abstractmethod
    def stats(self) -> Exchange[Stats]:
        """Request the metrics of the server."""

    def describe(self) -> Exchange[ServedModel | None]:
        """Request the self-description of the server; the default makes no call and returns None."""
        yield from ()
        return None

    @abstractmethod
    def pause(self, mode: str, lease: float) -> Exchange[float | None]:
        """Pause generation. Requests that arrive during the pause wait.

        Args:
            mode: `keep`: unfinished completions stay on the server and continue after `resume`. `recompute`: their
                streams end with `finish="abort"` after the tokens generated so far. `wait`: they finish first.
            lease: seconds after which the server resumes automatically, unless the call is repeated. Servers without
                leases ignore it.

        Returns:
            None once the server is paused. A server that responds earlier returns its number of generated tokens.
        """

    @abstractmethod
    def resume(self) -> Exchange[float | None]:
        """Resume generation and return the seconds for which it was paused, or None if not reported."""

    @abstractmethod
    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        """Load a version of the weights within `timeout` seconds.

        With `capabilities.staged_load` it is loaded next to the served version. Otherwise it replaces the served
        weights, and the server is paused.

        Returns:
            receipt of the server, or None without `capabilities.checksums`.

        Raises:
            InferenceError: the server reported that it did not load the version.
        """

    @abstractmethod
    def commit(self, version: int, mode: str) -> Exchange[None]:
        """Serve the loaded version.

        From then on, `health` and token versions report it, and no prefix cache of the old weights is used for a new
        prompt.
        """

    def receipt(self) -> Exchange[WeightReceipt]:
        """Request checksums of the served weights. Used only with `capabilities.checksums`."""
        raise NotImplementedError

    def sleep(self) -> Exchange[float]:
        """Release device memory and return the number of released bytes, 0 if unknown.

        Used only with `capabilities.sleeps`, on a paused server without unfinished completions.
        """
        raise NotImplementedError

    def wake(self) -> Exchange[None]:
        """End `sleep`; the server then serves the same version as before."""
        raise NotImplementedError

    def error_message(self, body: bytes) -> str:
        """Return the message of an error response: the field of the OpenAI API, or else the text of the body."""
        try:
            return str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = body.decode(errors="replace").strip()
            if text.startswith("<"):
                return "a page of HTML, so this is another kind of server"
            return text[:500] or "no reason given"


def as_object(body: bytes) -> dict[str, Any]:
    """Parse a response that must be a JSON object.

    Raises:
        ValueError, TypeError: the response is not a JSON object.
    """
    value = msgspec.json.decode(body)  # called for each message of a stream; several times faster than `json`
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, found {type(value).__name__}")
    return value


def ignored(body: bytes) -> None:
    """Ignore the body of a response that only has a status."""


def event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line of a server-sent event stream, or None if the line has none.

    Raises:
        ValueError, TypeError: the data is not a JSON object.
    """
    text = line[5:].strip() if line.startswith(b"data:") else b""
    return None if text in (b"", b"[DONE]") else as_object(text)


def expand(spans: list[dict[str, Any]], initial: int) -> list[int]:
    """Expand spans `[{"version", "start", "end"}]`, as vLLM and SGLang report them, to one version per token.

    Args:
        spans: spans in the order of the tokens.
        initial: version of the weights that the server was started with. Spans call this version `default`.
    """
    numbered = [(initial if span["version"] == "default" else int(span["version"]), span) for span in spans]
    return [version for version, span in numbered for _ in range(span["start"], span["end"])]
