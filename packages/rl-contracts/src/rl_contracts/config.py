"""Configs that more than one package reads. All others lie beside the component that they configure."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from rl_contracts.errors import ConfigError

__all__ = [
    "ClientConfig",
    "ComponentConfig",
    "GenerationConfig",
    "MicroBatchConfig",
    "OptimizerConfig",
    "Reads",
    "Settings",
    "bounded",
    "choice",
    "field_docstrings",
    "require",
    "require_choice",
]


def require(condition: bool, field_name: str, expected: str, found: object) -> None:
    """Raise a `ConfigError` that names the field, what was expected and what was found, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field_name}: expected {expected}, found {found!r}.")


def require_choice(field_name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a `ConfigError` unless `value` is one of `choices`."""
    require(value in choices, field_name, "one of " + ", ".join(choices), value)


def field_docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, its base classes included, by field name: what `--help` shows."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = _statements(base)
        for statement, following in zip(body, [*body[1:], None], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _statements(cls: type) -> list[ast.stmt]:
    """What stands in the body of a class."""
    known = _classes(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    if cls.__qualname__ in known:
        return known[cls.__qualname__]
    found = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(found, ast.ClassDef)
    return found.body


@cache
def _classes(module: ModuleType) -> dict[str, list[ast.stmt]]:
    """The bodies of the classes at the top of a module: parsed once, for help reads dozens of them."""
    body = ast.parse(inspect.getsource(module)).body
    return {statement.name: statement.body for statement in body if isinstance(statement, ast.ClassDef)}


def bounded(default: Any, expected: str, holds: Callable[[Any], bool]) -> Any:
    """A field of `Settings` with its default, and what its value must be: in words, and as a condition."""
    return field(default=default, metadata={"expected": expected, "holds": holds})


def choice(default: str, choices: Iterable[str]) -> Any:
    """A field of `Settings` that is one of a few names."""
    names = tuple(choices)
    return bounded(default, "one of " + ", ".join(names), lambda value: value in names)


Reads = Mapping[str, Mapping[str, set[str]]]
"""See `Settings.reads`."""


class Settings:
    """Base of dataclasses of settings, frozen or not, whose fields say themselves what they may be (`bounded`,
    `choice`)."""

    setting: ClassVar[str] = ""
    """Where they stand, for messages."""
    reads: ClassVar[Reads] = {}
    """For each field that selects a part or a method, and each of its values: the settings that this value reads, of
    those that not all values read. A value that is not listed may read all of them."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            if "holds" in item.metadata:
                value = getattr(self, item.name)
                require(item.metadata["holds"](value), self._key(item.name), item.metadata["expected"], value)
        for selector in self.reads:
            selected = getattr(self, selector)
            unread = self.unread(selector, selected)
            for item in fields(self):  # type: ignore[arg-type]
                value = getattr(self, item.name)
                require(
                    item.name not in unread or value == item.default,
                    f"{self._key(item.name)} with {self._key(selector)}={selected}",
                    f"{item.default!r}, since it is not read there",
                    value,
                )

    def _key(self, name: str) -> str:
        return f"{self.setting}.{name}".removeprefix(".")

    @classmethod
    def unread(cls, selector: str, value: str) -> set[str]:
        """The settings that are not read where the field `selector` has this value (several values joined by `+`)."""
        reads = cls.reads.get(selector, {})
        values = value.split("+")
        if not reads.keys() >= set(values):
            return set()
        return set().union(*reads.values()).difference(*(reads[each] for each in values))


@dataclass
class ComponentConfig(Settings):
    """Settings of a part that is found by name (`rl_contracts.registry.load_components`). What it takes as keyword
    arguments are their fields, by name, and `options`."""

    group: ClassVar[str]
    """Entry-point group in which the name is looked up."""
    kind: str = "none"
    """An installed name, or a dotted path `package.module:attribute`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further constants, by the names of its keyword arguments; null stands for its own default."""

    def constants(self) -> dict[str, Any]:
        """What the part may take as keyword arguments."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)} | self.options
        return {name: value for name, value in settings.items() if value is not None}


@dataclass
class GenerationConfig(Settings):
    """How answers are sampled."""

    setting: ClassVar[str] = "generation"
    max_new_tokens: int = bounded(256, "at least 1", lambda tokens: tokens >= 1)
    """Tokens generated at most, at least 1."""
    min_new_tokens: int = 0
    """Tokens before an end token may be sampled."""
    temperature: float = bounded(1.0, "0 (greedy) or 1e-4 to 1e4", lambda value: value == 0 or 1e-4 <= value <= 1e4)
    """Divides the logits; 0 is greedy decoding. Beyond 1e-4 and 1e4 nothing is left of them in float32."""
    top_p: float = bounded(1.0, "in (0, 1]", lambda mass: 0 < mass <= 1)
    """Smallest set of tokens with this probability mass; 1 switches it off."""
    top_k: int = bounded(0, "0 (off) or more", lambda number: number >= 0)
    """The k likeliest tokens; 0 switches it off."""
    min_p: float = bounded(0.0, "in [0, 1)", lambda fraction: 0 <= fraction < 1)
    """Tokens with at least this fraction of the likeliest one's probability; 0 switches it off."""
    presence_penalty: float = bounded(0.0, "in [-2, 2]", lambda penalty: -2 <= penalty <= 2)
    """Subtracted from the logits of every token that the answer already has; -2 to 2, 0 switches it off."""
    frequency_penalty: float = bounded(0.0, "in [-2, 2]", lambda penalty: -2 <= penalty <= 2)
    """The same, times how often the answer has it; -2 to 2, 0 switches it off."""
    repetition_penalty: float = bounded(1.0, "in [0.01, 100] (1 is off)", lambda factor: 0.01 <= factor <= 100)
    """Divides the positive logits, and multiplies the negative ones, of every token that prompt or answer already have;
    0.01 to 100, 1 switches it off."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the answer where they appear in its text."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end the answer, besides the tokenizer's own end tokens."""
    ignore_eos: bool = False
    """Go on after an end token, to `max_new_tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "generation.min_new_tokens",
            f"between 0 and max_new_tokens ({self.max_new_tokens})",
            self.min_new_tokens,
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
class OptimizerConfig(Settings):
    """The optimizer and its learning-rate schedule."""

    setting: ClassVar[str] = "optimizer"
    group: ClassVar[str] = "rl.optimizers"
    reads: ClassVar[Reads] = {
        "name": {
            "adamw": {"beta1", "beta2", "eps"},
            "adamw8bit": {"beta1", "beta2", "eps"},
            "muon": {"beta1", "beta2", "eps", "momentum"},
            "sgd": {"momentum"},
        },
        "schedule": {"constant": set(), "linear": {"min_lr_ratio"}, "cosine": {"min_lr_ratio"}},
    }
    name: str = "adamw"
    """`adamw`; `sgd`; `muon` (for the matrices of the decoder layers, AdamW for the rest); `adamw8bit` (moments in 8
    bits; needs torchao); or anybody's, also as a dotted path such as `torch.optim:Adagrad`."""
    lr: float = bounded(1e-6, "0 or more", lambda rate: rate >= 0)
    """Peak learning rate."""
    weight_decay: float = bounded(0.01, "0 or more", lambda decay: decay >= 0)
    """Weight decay, decoupled but with `sgd`; not applied to biases and norms."""
    momentum: float | None = bounded(None, "in [0, 1)", lambda decay: decay is None or 0 <= decay < 1)
    """Decay of the momentum of `sgd` and `muon`. None: their own, 0 and 0.95."""
    beta1: float = bounded(0.9, "in [0, 1)", lambda beta: 0 <= beta < 1)
    """Decay of AdamW's first moment."""
    beta2: float = bounded(0.95, "in [0, 1)", lambda beta: 0 <= beta < 1)
    """Decay of its second moment."""
    eps: float = bounded(1e-8, "more than 0", lambda eps: eps > 0)
    """Added to its denominator."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further constants of an optimizer, by the names of its keyword arguments."""
    schedule: str = choice("constant", ("constant", "linear", "cosine"))
    """After the warm-up: `constant`, or `linear` or `cosine` towards `min_lr_ratio * lr`, which the step after the last
    one would have."""
    warmup_steps: float = bounded(0.0, "0 or more", lambda steps: steps >= 0)
    """Optimizer steps over which the rate rises linearly from 0; the first step already uses lr / warmup_steps. A
    number below 1 is a fraction of the run's steps."""
    min_lr_ratio: float = bounded(0.0, "in [0, 1]", lambda ratio: 0 <= ratio <= 1)
    """Rate at the end over the peak rate."""
    max_grad_norm: float = bounded(1.0, "0 (off) or more", lambda norm: norm >= 0)
    """Global norm to which gradients are clipped; 0 switches clipping off."""
    max_skipped_steps: int = bounded(8, "0 or more", lambda steps: steps >= 0)
    """Consecutive steps with non-finite gradients that may be skipped before the run stops."""

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        The warm-up ends at the peak rate, at the last step at the latest. What follows decays to `min_lr_ratio` times
        the peak at step `total_steps`, one after the last, so that no step is without effect (as in torchtitan).
        """
        warmup = min(self.warmup_steps if self.warmup_steps >= 1 else self.warmup_steps * total_steps, total_steps)
        warmup = math.ceil(warmup)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "constant":
            return self.lr
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        decay = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * decay)


@dataclass
class MicroBatchConfig(Settings):
    """How a minibatch is cut so that it fits into memory. It never changes the gradient."""

    setting: ClassVar[str] = "micro_batch"
    max_tokens: int = bounded(16384, "at least 1", lambda tokens: tokens >= 1)
    """Tokens in one packed micro-batch at most; a single longer row is refused."""


@dataclass
class ClientConfig(Settings):
    """How a client treats inference servers of any kind: deadlines, retries, probes, routing. How many requests are
    open at once is up to who asks: in a run to `rollout.max_concurrent`."""

    setting: ClassVar[str] = "client"
    # servers show that they are alive every half second; a launcher starts one that is silent anew before this
    progress_timeout: float = bounded(120.0, "1 s or more", lambda seconds: seconds >= 1)
    """Seconds without a byte (generation) or an answer (control) after which a server counts as lost, and after which a
    request that no server moves on fails."""
    update_timeout: float = bounded(300.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds within which a server must have staged a version."""
    connect_timeout: float = bounded(5.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds for a connection to a server."""
    retry_seconds: float = bounded(0.2, "seconds above 0", lambda seconds: seconds > 0)
    """First pause before a request tries again; doubles up to 5 s."""
    probe_interval: float = bounded(2.0, "0 (never) or more", lambda seconds: seconds >= 0)
    """Seconds between two questions to each server whether it is well; one that was evicted is asked four times as
    often, and may come back. 0: never asked, and evicted for good."""
    discover_interval: float = bounded(1.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds between two looks at which servers there are, where a run tells (never where `probe_interval` is 0)."""
    probe_timeout: float = bounded(5.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds for such an answer."""
    rejoin_timeout: float = 0.0
    """Seconds for which requests and updates wait when all servers are lost, until one is back. 0: nobody restarts
    them, so fail at once."""
    affinity_slack: int = 32
    """A group follows its first member's server unless that has so many more open requests than the least busy one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rejoin_timeout == 0 or (self.rejoin_timeout > 0 and self.probe_interval > 0),
            "client.rejoin_timeout",
            "0 or more seconds, and 0 where client.probe_interval is 0, for then nobody sees a server come back",
            self.rejoin_timeout,
        )

    def shared_by(self, clients: int) -> ClientConfig:
        """For each of several clients of the same servers: together they probe, and look which servers there are, as
        often as one would alone, up to the number at which each would have less than four probes within
        `progress_timeout` (and `rejoin_timeout`), which it needs to notice in time that a server is silent or back.
        What fails is asked about at once in any case."""
        longest = min(self.progress_timeout, self.rejoin_timeout or self.progress_timeout) / 4

        def shared(interval: float) -> float:
            return min(clients * interval, max(interval, longest))

        probe, discover = shared(self.probe_interval), shared(self.discover_interval)
        return replace(self, probe_interval=probe, discover_interval=discover)
