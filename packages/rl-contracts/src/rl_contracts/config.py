"""Settings that several packages read. All other settings are defined next to the component that they configure."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
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


def require(condition: bool, field_name: str, expected: str, value: object) -> None:
    """Raise a `ConfigError` with the field, the expected and the actual value, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field_name}: expected {expected}, found {value!r}.")


def require_choice(field_name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a `ConfigError` unless `value` is one of `choices`."""
    require(value in choices, field_name, "one of " + ", ".join(filter(None, choices)), value)


def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its base classes, by field name, for `--help`."""
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
    """Return the statements in the body of a class."""
    bodies = _classes(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    if cls.__qualname__ in bodies:
        return bodies[cls.__qualname__]
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    return definition.body


@cache
def _classes(module: ModuleType) -> dict[str, list[ast.stmt]]:
    """Return the bodies of a module's top-level classes by name. Cached, because `--help` reads dozens of classes."""
    body = ast.parse(inspect.getsource(module)).body
    return {statement.name: statement.body for statement in body if isinstance(statement, ast.ClassDef)}


def bounded(default: Any, expected: str, holds: Callable[[Any], bool]) -> Any:
    """Return a field of `Settings` whose values must satisfy `holds`, which `expected` describes in error messages."""
    return field(default=default, metadata={"expected": expected, "holds": holds})


def choice(default: str, choices: Iterable[str]) -> Any:
    """Return a field of `Settings` whose value must be one of `choices`."""
    names = tuple(choices)
    return bounded(default, "one of " + ", ".join(filter(None, names)), lambda value: value in names)


Reads = Mapping[str, Mapping[str, set[str]]]
"""Type of `Settings.reads`: for each selecting field, the settings that each of its values uses."""


class Settings:
    """Base class of settings dataclasses, frozen or not. Fields made by `bounded` and `choice` are validated."""

    setting: ClassVar[str] = ""
    """Prefix of the field names in error messages, for example `optimizer`."""
    reads: ClassVar[Reads] = {}
    """Settings that each value of a selecting field uses: selecting field -> value -> settings.

    A selecting field chooses a component or a method. Settings that every value uses are not listed. A value that is
    not listed may use all settings. A setting that the selected value does not use must keep its default.
    """

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
                    f"{item.default!r}, because {self._key(selector)}={selected} does not use it",
                    value,
                )

    def _key(self, name: str) -> str:
        return f"{self.setting}.{name}".removeprefix(".")

    @classmethod
    def unread(cls, selector: str, value: str) -> set[str]:
        """Return the settings that are not used if the field `selector` has this value.

        Several values may be joined with `+`.
        """
        reads = cls.reads.get(selector, {})
        values = value.split("+")
        if not reads.keys() >= set(values):
            return set()
        return set().union(*reads.values()).difference(*(reads[each] for each in values))


@dataclass
class ComponentConfig(Settings):
    """Settings of a component that is selected by name (see `rl_contracts.registry.load_components`).

    The component receives as keyword arguments those fields and entries of `options` whose names it accepts.
    """

    group: ClassVar[str]
    """Entry-point group that contains the component's name."""
    kind: str = "none"
    """Name of an installed component, or a dotted path `package.module:attribute`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the component, by name. null selects the component's default."""

    def constants(self) -> dict[str, Any]:
        """Return the values that the component may take as keyword arguments."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)} | self.options
        return {name: value for name, value in settings.items() if value is not None}


@dataclass
class GenerationConfig(Settings):
    """Sampling settings of completions."""

    setting: ClassVar[str] = "generation"
    max_new_tokens: int = bounded(256, "at least 1", lambda tokens: tokens >= 1)
    """Maximum number of tokens to generate per completion, at least 1."""
    min_new_tokens: int = 0
    """Minimum number of tokens to generate before an end token may be sampled."""
    temperature: float = bounded(1.0, "0 (greedy) or 1e-4 to 1e4", lambda value: value == 0 or 1e-4 <= value <= 1e4)
    """Sampling temperature: divides the logits. 0 is greedy decoding; other values must be in [1e-4, 1e4], the range in
    which float32 logits keep their information."""
    top_p: float = bounded(1.0, "in (0, 1]", lambda mass: 0 < mass <= 1)
    """Nucleus sampling: keep the smallest set of tokens with this probability mass. 1 disables it."""
    top_k: int = bounded(0, "0 (off) or more", lambda number: number >= 0)
    """Number of most likely tokens to sample from. 0 disables the limit."""
    min_p: float = bounded(0.0, "in [0, 1)", lambda fraction: 0 <= fraction < 1)
    """Minimum probability of a token, as a fraction of the most likely token's probability. 0 disables it."""
    presence_penalty: float = bounded(0.0, "in [-2, 2]", lambda penalty: -2 <= penalty <= 2)
    """Penalty subtracted from the logit of every token that is already in the completion, in [-2, 2]. 0 disables it."""
    frequency_penalty: float = bounded(0.0, "in [-2, 2]", lambda penalty: -2 <= penalty <= 2)
    """Penalty subtracted from a token's logit once per occurrence in the completion, in [-2, 2]. 0 disables it."""
    repetition_penalty: float = bounded(1.0, "in [0.01, 100] (1 is off)", lambda factor: 0.01 <= factor <= 100)
    """Factor for tokens that are already in the prompt or the completion, in [0.01, 100]. It divides positive logits
    and multiplies negative ones. 1 disables it."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the completion as soon as they appear in its text."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end the completion, in addition to the tokenizer's end tokens."""
    ignore_eos: bool = False
    """Continue after an end token, up to `max_new_tokens`."""

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
        """True if decoding is greedy (temperature 0)."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if top-p, top-k or min-p exclude tokens that the behavior log-probs still include."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """True if a penalty changes the sampling distribution; behavior log-probs do not include penalties."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass
class OptimizerConfig(Settings):
    """Optimizer and learning-rate schedule."""

    setting: ClassVar[str] = "optimizer"
    group: ClassVar[str] = "rl.optimizers"
    reads: ClassVar[Reads] = {
        "name": {
            "adamw": {"beta1", "beta2", "eps"},
            "adamw8bit": {"beta1", "beta2", "eps"},
            "muon": {"beta1", "beta2", "eps"},
            "sgd": set(),
        },
        "schedule": {"constant": set(), "linear": {"min_lr_ratio"}, "cosine": {"min_lr_ratio"}},
    }
    name: str = "adamw"
    """Optimizer: `adamw`, `sgd`, `muon`, `adamw8bit`, another installed name, or a dotted path such as
    `torch.optim:Adagrad`. `muon` updates the matrices of the decoder layers, and AdamW the other parameters.
    `adamw8bit` keeps 8-bit moments and requires torchao."""
    lr: float = bounded(1e-6, "0 or more", lambda rate: rate >= 0)
    """Peak learning rate."""
    weight_decay: float = bounded(0.01, "0 or more", lambda decay: decay >= 0)
    """Weight decay: decoupled, except with `sgd`. Biases and norms have none."""
    beta1: float = bounded(0.9, "in [0, 1)", lambda beta: 0 <= beta < 1)
    """Decay of the first moment of AdamW."""
    beta2: float = bounded(0.95, "in [0, 1)", lambda beta: 0 <= beta < 1)
    """Decay of the second moment of AdamW."""
    eps: float = bounded(1e-8, "more than 0", lambda eps: eps > 0)
    """Constant added to the denominator of AdamW."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer, by name, such as `momentum` of `sgd` (default: 0) and `muon`
    (default: 0.95)."""
    schedule: str = choice("constant", ("constant", "linear", "cosine"))
    """Learning-rate schedule after the warm-up: `constant`, or `linear` or `cosine` decay. The decay reaches
    `min_lr_ratio * lr` one step after the last step."""
    warmup_steps: float = bounded(0.0, "0 or more", lambda steps: steps >= 0)
    """Optimizer steps of linear warm-up; the first step uses lr / warmup_steps. A number below 1 is a fraction of the
    run's steps."""
    min_lr_ratio: float = bounded(0.0, "in [0, 1]", lambda ratio: 0 <= ratio <= 1)
    """Final learning rate, as a fraction of the peak learning rate."""
    max_grad_norm: float = bounded(1.0, "0 (off) or more", lambda norm: norm >= 0)
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 disables clipping."""

    def rate(self, step: int, total_steps: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0.

        The warm-up ends at the peak rate, no later than the last step. The decay then reaches `min_lr_ratio` times the
        peak at step `total_steps`, one after the last, so that every step has an effect (as in torchtitan).
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
    """Division of a minibatch into micro-batches that fit into memory. It does not change the gradient."""

    setting: ClassVar[str] = "micro_batch"
    max_tokens: int = bounded(16384, "at least 1", lambda tokens: tokens >= 1)
    """Maximum number of tokens in a packed micro-batch. A single sequence longer than this is an error."""


@dataclass
class ClientConfig(Settings):
    """Deadlines of a client of inference servers, for any kind of server.

    The client does not limit the number of open requests. In a run `rollout.max_concurrent` does.
    """

    setting: ClassVar[str] = "client"
    # servers send a heartbeat every 0.5 s; the launcher restarts a silent server before this timeout
    progress_timeout: float = bounded(120.0, "1 s or more", lambda seconds: seconds >= 1)
    """Seconds without progress after which a server counts as lost: no byte during generation, no response to a control
    request. A request that no server advances fails after the same time."""
