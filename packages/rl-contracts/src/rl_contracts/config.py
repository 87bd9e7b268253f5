"""Configs that more than one package reads. All others lie beside the component that they configure."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

from rl_contracts.errors import ConfigError


def require(condition: bool, field_name: str, expected: str, found: object) -> None:
    """Raise a `ConfigError` that names the field, what was expected and what was found, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field_name}: expected {expected}, found {found!r}.")


def require_choice(field_name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a `ConfigError` unless `value` is one of `choices`."""
    require(value in choices, field_name, "one of " + ", ".join(choices), value)


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, its base classes included, by field name: what `--help` shows."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, [*body.body[1:], None], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def bounded(default: Any, expected: str, holds: Callable[[Any], bool]) -> Any:
    """A field of `Settings` with its default, and what its value must be: in words, and as a condition."""
    return field(default=default, metadata={"expected": expected, "holds": holds})


def choice(default: str, choices: Iterable[str]) -> Any:
    """A field of `Settings` that is one of a few names."""
    names = tuple(choices)
    return bounded(default, "one of " + ", ".join(names), lambda value: value in names)


@dataclass
class Settings:
    """Base of settings whose fields say themselves what they may be (`bounded`, `choice`)."""

    setting: ClassVar[str]
    """Where they stand, for messages."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if "holds" in item.metadata:
                value = getattr(self, item.name)
                require(item.metadata["holds"](value), f"{self.setting}.{item.name}", item.metadata["expected"], value)


@dataclass
class GenerationConfig:
    """How answers are sampled."""

    max_new_tokens: int = 256
    """Tokens generated at most, at least 1."""
    min_new_tokens: int = 0
    """Tokens before an end token may be sampled."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability mass; 1 switches it off."""
    top_k: int = 0
    """The k likeliest tokens; 0 switches it off."""
    min_p: float = 0.0
    """Tokens with at least this share of the likeliest one's probability; 0 switches it off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of every token that the answer already has; -2 to 2, 0 switches it off."""
    frequency_penalty: float = 0.0
    """The same, times how often the answer has it; -2 to 2, 0 switches it off."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of every token that prompt or answer already have;
    more than 0, 1 switches it off."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the answer where they appear in its text."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end the answer, besides the tokenizer's own end tokens."""
    ignore_eos: bool = False
    """Go on after an end token, to `max_new_tokens`."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "generation.max_new_tokens", "at least 1", self.max_new_tokens)
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "generation.min_new_tokens",
            f"between 0 and max_new_tokens ({self.max_new_tokens})",
            self.min_new_tokens,
        )
        require(self.temperature >= 0, "generation.temperature", "0 (greedy) or more", self.temperature)
        require(0 < self.top_p <= 1, "generation.top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "generation.top_k", "0 (off) or more", self.top_k)
        require(0 <= self.min_p < 1, "generation.min_p", "in [0, 1)", self.min_p)
        require(-2 <= self.presence_penalty <= 2, "generation.presence_penalty", "in [-2, 2]", self.presence_penalty)
        require(-2 <= self.frequency_penalty <= 2, "generation.frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        require(
            0 < self.repetition_penalty < math.inf,
            "generation.repetition_penalty",
            "more than 0 (1 is off) and finite",
            self.repetition_penalty,
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether sampling leaves out tokens that the behaviour log-probs still count (top-p, top-k, min-p)."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether tokens are drawn after penalties that the behaviour log-probs do not have."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine` down to `min_lr_ratio * lr` at the last step."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0; the first step already uses lr / warmup_steps."""
    min_lr_ratio: float = 0.0
    """Rate at the last step over the peak rate."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped; 0 switches clipping off."""
    max_skipped_steps: int = 8
    """Consecutive steps with non-finite gradients that may be skipped before the run stops."""

    def __post_init__(self) -> None:
        require(self.lr >= 0, "optimizer.lr", "0 or more", self.lr)
        require(self.weight_decay >= 0, "optimizer.weight_decay", "0 or more", self.weight_decay)
        require(self.eps > 0, "optimizer.eps", "more than 0", self.eps)
        require_choice("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", "0 or more", self.warmup_steps)
        require(0 <= self.min_lr_ratio <= 1, "optimizer.min_lr_ratio", "in [0, 1]", self.min_lr_ratio)
        require(self.max_grad_norm >= 0, "optimizer.max_grad_norm", "0 (off) or more", self.max_grad_norm)
        require(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "optimizer.beta1/beta2",
            "in [0, 1)",
            (self.beta1, self.beta2),
        )
        require(self.max_skipped_steps >= 0, "optimizer.max_skipped_steps", "0 or more", self.max_skipped_steps)


@dataclass
class MicroBatchConfig:
    """How a minibatch is cut so that it fits into memory. It never changes the gradient."""

    max_tokens: int = 16384
    """Tokens in one packed micro-batch at most; a single longer row is refused."""

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "micro_batch.max_tokens", "at least 1", self.max_tokens)


@dataclass
class ClientConfig:
    """How a client treats inference servers of any kind: deadlines, retries, probes, routing."""

    max_concurrent: int = 1024
    """Requests that the client has open at the same time, over all servers."""
    progress_timeout: float = 60.0
    """Seconds without a byte (generation) or an answer (control) after which a server counts as lost, and after which a
    request that no server moves on fails."""
    update_timeout: float = 300.0
    """Seconds within which a server must have staged a version."""
    connect_timeout: float = 5.0
    """Seconds for a connection to a server."""
    retry_seconds: float = 0.2
    """First pause before a request tries again; doubles up to 5 s."""
    probe_interval: float = 2.0
    """Seconds between two questions to each server whether it is well; then also one that was evicted may come back.
    0: never asked, and evicted for good."""
    probe_timeout: float = 5.0
    """Seconds for such an answer."""
    rejoin_timeout: float = 0.0
    """Seconds for which requests and updates wait when all servers are lost, until one is back. 0: nobody restarts
    them, so fail at once."""
    affinity_slack: int = 32
    """A group follows its first member's server unless that has so many more open requests than the least busy one."""

    def __post_init__(self) -> None:
        require(self.max_concurrent >= 1, "client.max_concurrent", "at least 1", self.max_concurrent)
        # servers show that they are alive every half second
        require(self.progress_timeout >= 1, "client.progress_timeout", "1 s or more", self.progress_timeout)
        require(self.update_timeout > 0, "client.update_timeout", "seconds above 0", self.update_timeout)
        require(self.connect_timeout > 0, "client.connect_timeout", "seconds above 0", self.connect_timeout)
        require(self.retry_seconds > 0, "client.retry_seconds", "seconds above 0", self.retry_seconds)
        require(self.probe_interval >= 0, "client.probe_interval", "0 (never) or more", self.probe_interval)
        require(self.probe_timeout > 0, "client.probe_timeout", "seconds above 0", self.probe_timeout)
        require(
            self.rejoin_timeout == 0 or (self.rejoin_timeout > 0 and self.probe_interval > 0),
            "client.rejoin_timeout",
            "0 or more seconds, and 0 where client.probe_interval is 0, for then nobody sees a server come back",
            self.rejoin_timeout,
        )
