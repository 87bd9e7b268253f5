"""What is said to a server, and what its answers say: pure functions over bytes and JSON, without a connection.

A server is a subclass of `ServerProtocol`. Routing, retries, the state machine of an update and the rest of
`rl_inference.client.engine.HttpEngine` are the same for all of them; where they differ, `ServerProtocol.capabilities`
says so.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlencode

import msgspec

from rl_contracts.config import GenerationConfig
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.inference import Capabilities, ServedModel


@dataclass(frozen=True)
class Call[T]:
    """A request without its server."""

    path: str
    parse: Callable[[bytes], T]
    """What the answer says, or of a stream each line in turn: then it may remember those before, since a call is made
    once. Raises ValueError, LookupError or TypeError for what is no answer of this protocol."""
    body: dict[str, Any] | None = None
    """JSON; None: no body."""
    query: dict[str, str] = field(default_factory=dict)
    """Arguments after the path."""
    method: str = ""
    """Of HTTP; empty: POST with a body, else GET."""

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path

    @property
    def verb(self) -> str:
        """The method that is used."""
        return self.method or ("GET" if self.body is None else "POST")


type Exchange[T] = Generator[Call[Any], Any, T]
"""One or several calls in a row: yields each, is sent what its answer says, and returns what they say together. Each
must bear to be repeated, and may raise an `InferenceError` for what the answer says."""


@dataclass
class GenerationChunk:
    """What one message of a stream adds to an answer."""

    output_ids: list[int] = field(default_factory=list)
    """New tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Of each new token: log_softmax(logits / temperature) over the full vocabulary."""
    versions: list[int] = field(default_factory=list)
    """Of each new token, as the server stamped it; empty where it says that at the end (`stamps`)."""
    finish: str | None = None
    """`stop`, `length` or `abort`; None while it goes on."""
    error: str | None = None
    """The server failed while it generated."""
    stamps: list[int] | None = None
    """Version of every token of this stream, in the last message of a server that says them there."""


@dataclass(frozen=True)
class Health:
    """How a server is, where it answers at all."""

    version: int | None
    """Which version it serves; None where it does not say."""
    open: int | None = None
    """Requests that it works on, whoever sent them; None where it does not say."""


@dataclass(frozen=True)
class Stats:
    """A server's figures."""

    version: int
    """Which version it serves."""
    paused: bool
    """Whether it stands still."""
    running: float
    """Answers that it generates."""
    waiting: float
    """Requests that wait."""
    generated_tokens: float
    """Since it started."""
    busy_seconds: float
    """Seconds in which it generated, since it started."""


class ServerProtocol(ABC):
    """One kind of server. All methods but `generate` give an `Exchange`."""

    capabilities: Capabilities
    """What these servers can do."""
    counts_tokens: ClassVar[bool] = False
    """Whether `Stats.generated_tokens` grows with each token, not with each answer: a server that is asked for tokens
    and makes none for the progress timeout is lost, however well it says it is."""
    life_header: ClassVar[str] = ""
    """Header with which every answer names the life of the server's process; empty: there is none."""

    @abstractmethod
    def generate(
        self,
        rid: str,
        input_ids: list[int],
        generation: GenerationConfig,
        seed: int | None,
        resumed: int,
        schema: dict[str, Any] | None = None,
    ) -> Call[GenerationChunk | None]:
        """Continue `input_ids`; a stream comes back. Lines that say nothing parse to None.

        Args:
            rid: names this attempt.
            input_ids: the prompt, and what an interrupted answer already had.
            generation: `max_new_tokens` and `min_new_tokens` of what is missing, else as asked for. Has no stop strings
                where `capabilities.continues` is false: the client looks for them.
            seed: of this attempt.
            resumed: how many of `input_ids` are an interrupted answer's.
            schema: that the answer is kept to; only where `capabilities.schemas`.

        Raises:
            InferenceError: the server would do something else than what is asked for.
        """

    def abort(self, rid: str) -> Exchange[None]:
        """End one attempt, whose stream then ends by `abort`, with the stamps of all of its tokens. Asked where
        `capabilities.version_stamps_at_end`; other servers see that the connection was closed."""
        raise NotImplementedError

    @abstractmethod
    def score(self, input_ids: list[int], temperature: float, before: bool = False) -> Exchange[list[float]]:
        """Log-probs of given tokens; entry 0 is 0. What `capabilities` rules out is never asked.

        Args:
            before: at the weights served before the last commit.
        """

    @abstractmethod
    def health(self) -> Exchange[Health]:
        """How it is. Fast, also while it generates, loads or is paused."""

    @abstractmethod
    def stats(self) -> Exchange[Stats]:
        """Its figures."""

    def describe(self) -> Exchange[ServedModel | None]:
        """What it serves, and where it looks for updates; None: it does not say."""
        yield from ()
        return None

    @abstractmethod
    def pause(self, mode: str, lease: float) -> Exchange[float | None]:
        """Stop generating. Requests that come meanwhile wait.

        Args:
            mode: `keep`: unfinished answers stay in the server, and go on after `resume`; `recompute`: their streams
                end by `abort`, with all tokens so far; `wait`: they end first.
            lease: seconds after which a server that can goes on by itself, unless it is asked again.

        Returns:
            None once it stands still. Until then, where it answers earlier, how many tokens it has generated.
        """

    @abstractmethod
    def resume(self) -> Exchange[float | None]:
        """Generate again; how many seconds it stood still, or None where it does not say."""

    @abstractmethod
    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        """Load a version within `timeout` seconds: beside the served one or, where `capabilities.staged_load` is
        false, over it; the server is paused then.

        Returns:
            its receipt, or None where `capabilities.checksums` is false.

        Raises:
            InferenceError: an answer says that it was not loaded.
        """

    @abstractmethod
    def commit(self, version: int, mode: str) -> Exchange[None]:
        """Serve the version that was loaded: from here on it is in stamps and `health`, and nothing that was computed
        from the weights before is used for a new prompt (prefix caches)."""

    def receipt(self) -> Exchange[WeightReceipt]:
        """Checksums of the served weights. Asked where `capabilities.checksums`."""
        raise NotImplementedError

    def sleep(self) -> Exchange[float]:
        """Free the device's memory; how many bytes, 0 where that is not known. Asked where `capabilities.sleeps`, of a
        paused server that works on nothing."""
        raise NotImplementedError

    def wake(self) -> Exchange[None]:
        """Undo `sleep`; it serves what it served."""
        raise NotImplementedError

    def error_message(self, body: bytes) -> str:
        """The sentence in a refusal: here as the OpenAI API has it, else the text."""
        try:
            return str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = body.decode(errors="replace").strip()
            if text.startswith("<"):
                return "a page of HTML, so this is another kind of server"
            return text[:500] or "no reason given"


def as_object(body: bytes) -> dict[str, Any]:
    """An answer that is a JSON object."""
    value = msgspec.json.decode(body)  # each message of a stream comes here: several times faster than `json`
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, found {type(value).__name__}")
    return value


def ignored(body: bytes) -> None:
    """An answer of which the status is all."""


def event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line of a stream of events; None where it says nothing.

    Raises:
        ValueError, TypeError: it is none.
    """
    text = line[5:].strip() if line.startswith(b"data:") else b""
    return None if text in (b"", b"[DONE]") else as_object(text)


def expand(spans: list[dict[str, Any]], initial: int) -> list[int]:
    """Version per token of `[{"version", "start", "end"}]`, as vLLM and SGLang write them.

    Args:
        initial: what `default` stands for, the weights with which the server was started.
    """
    named = [(initial if span["version"] == "default" else int(span["version"]), span) for span in spans]
    return [version for version, span in named for _ in range(span["start"], span["end"])]
