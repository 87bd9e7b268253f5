"""Allocations: the assignment of backends to devices, and the parallel layout of each backend.

    allocation := group ("+" group)*               separate devices
    group      := component ("|" component)*       shared devices, used in turn
    component  := backend ["[" name "]"] ":" (dims | hybrid)
    backend    := installed name | module ":" class
    dims       := one or more of d<n> t<n> p<n> c<n> e<n>, each at most once; a missing size is 1
    hybrid     := "(attn:" dims "|ffn:" dims ")"   separate layouts for attention and for the experts of an MoE; by
                                                   default ffn has the p of attn and a d that fills the ranks of attn

Example: `sglang[r]:d2+fsdp[actor]:d4|fsdp[critic]:d4` gives two devices to the servers `r`, and four devices to actor
and critic, which share them.

A name in the entry-point group `rl.inference_engines` is a server backend, a name in `rl.train_engines` a train
backend. For a dotted path the class is imported: a class with `server_spec` is a server backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rl_contracts import registry
from rl_contracts.allocation_grammar import ParsedComponent, Reader, with_caret
from rl_contracts.errors import ConfigError

__all__ = ["Allocation", "Component", "ComponentKind", "ParallelStrategy"]


class ComponentKind(StrEnum):
    """Purpose of a component."""

    INFERENCE = "inference"
    TRAIN = "train"


GROUPS = {ComponentKind.INFERENCE: "rl.inference_engines", ComponentKind.TRAIN: "rl.train_engines"}
"""Entry-point group of the backends of each kind."""

DEFAULT_NAMES = {ComponentKind.INFERENCE: "rollout", ComponentKind.TRAIN: "actor"}
"""Default name of a component of each kind."""


@dataclass(frozen=True, slots=True)
class ParallelStrategy:
    """Parallel layout of one model on `world_size` = data * tensor * pipeline * context ranks.

    The expert layers use the same ranks, so `expert` does not multiply the world size. A pipeline stage has
    data * tensor * context ranks. An expert group has expert * expert_tensor ranks, and a stage has `expert_data` such
    groups, each with a replica of the experts. This is the parallel folding of Megatron-Core. In the hybrid form `attn`
    and `ffn` use the same ranks: attn d*t*p*c == ffn d*t*p*e, with the same p.

    Raises:
        ConfigError: a size is below one, or expert groups do not fill a pipeline stage evenly.
    """

    data: int = 1
    """Number of servers, or of replicas in training; with fully sharded data parallelism, the number of shards."""

    tensor: int = 1
    """Ranks over which each matrix is split."""

    pipeline: int = 1
    """Stages over which the layers are split."""

    context: int = 1
    """Ranks over which each sequence is split."""

    expert: int = 1
    """Ranks over which the experts of a layer are distributed."""

    expert_tensor: int | None = None
    """Ranks over which each matrix of an expert is split (`t` of ffn), or None to let the backend decide."""

    def __post_init__(self) -> None:
        sizes = (self.data, self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor or 1)
        if min(sizes) < 1 or self.expert_tensor == 0:
            raise ConfigError(f"parallel strategy: every size must be at least 1, found {sizes}")
        stage = self.data * self.tensor * self.context
        group = self.expert * (self.expert_tensor or 1)
        if stage % group:
            raise ConfigError(
                f"parallel strategy: the size of an expert group, {group} (expert {self.expert} * expert tensor "
                f"{self.expert_tensor or 1}), must divide the {stage} ranks of a pipeline stage (data {self.data} * "
                f"tensor {self.tensor} * context {self.context}); change the expert or expert tensor size"
            )

    @property
    def world_size(self) -> int:
        """Total number of ranks: data * tensor * pipeline * context."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def model_size(self) -> int:
        """Ranks of one replica: tensor * pipeline * context."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_data(self) -> int:
        """Number of replicas of each expert; an `expert_tensor` of None counts as 1."""
        return self.data * self.tensor * self.context // (self.expert * (self.expert_tensor or 1))

    def __str__(self) -> str:
        if self.expert_tensor is None:
            return _dims(d=self.data, t=self.tensor, p=self.pipeline, c=self.context, e=self.expert)
        attention = _dims(d=self.data, t=self.tensor, p=self.pipeline, c=self.context)
        experts = _dims(d=self.expert_data, t=self.expert_tensor, p=self.pipeline, e=self.expert)
        return f"(attn:{attention}|ffn:{experts})"


@dataclass(frozen=True, slots=True)
class Component:
    """One backend and its devices, for example the actor's trainer or the rollout servers."""

    backend: str
    """Entry-point name or dotted path of the engine, for example `fsdp` or `my_package:MyEngine`."""

    name: str
    """Role, unique in the allocation. Default: `actor` for training, `rollout` for inference."""

    strategy: ParallelStrategy
    """Parallel layout of the model."""

    kind: ComponentKind
    """Purpose: inference or training."""

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.strategy.world_size

    def __str__(self) -> str:
        name = "" if self.name == DEFAULT_NAMES[self.kind] else f"[{self.name}]"
        return f"{self.backend}{name}:{self.strategy}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device groups; the components of a group share its devices.

    Example:
        >>> kinds = {"sglang": ComponentKind.INFERENCE, "fsdp": ComponentKind.TRAIN}
        >>> allocation = Allocation.parse("sglang:d4t2+fsdp:d8", kinds)
        >>> allocation.world_size
        16
        >>> allocation.component("rollout").strategy.tensor
        2
        >>> [component.name for component in allocation.train]
        ['actor']
        >>> allocation.devices("actor")
        range(8, 16)

    Raises:
        ConfigError: there is no component, two have the same name, or two that share devices differ in world size.
    """

    groups: tuple[tuple[Component, ...], ...]

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ConfigError("allocation: expected at least one component in every device group, found none")
        names, at = set[str](), 0
        for group, component in ((g, c) for g in self.groups for c in g):
            if component.name in names:
                raise with_caret(
                    str(self),
                    f"two components are called {component.name!r}; give each its own name, "
                    f"for example {component.backend}[{component.name}2]:{component.strategy}",
                    at,
                )
            if component.world_size != group[0].world_size:
                raise with_caret(
                    str(self),
                    f"components joined with '|' share their devices, so their world sizes must be equal: "
                    f"{group[0].name} has {group[0].world_size}, {component.name} has "
                    f"{component.world_size}; change d, t, p or c, or join them with '+'",
                    at,
                )
            names.add(component.name)
            at += len(str(component)) + 1

    @classmethod
    def parse(cls, text: str, kinds: Mapping[str, ComponentKind] | None = None) -> Allocation:
        """Parse an allocation such as `"sglang:d4t2+fsdp:d8"`. Spaces between tokens are allowed.

        Args:
            text: the allocation, in the grammar of this module's docstring.
            kinds: purpose of each backend by name. Default: the installed backends.

        Raises:
            ConfigError: the text does not follow the grammar, a backend is not installed, or the components conflict.
                The message shows the text (or, for a conflict, its normalized form) with a caret under the wrong
                character, and the expected text.
        """
        if kinds is None:
            kinds = {name: kind for kind, group in GROUPS.items() for name in registry.available(group)}
        return cls(tuple(tuple(_component(parsed, text, kinds) for parsed in group) for group in Reader(text).groups()))

    @property
    def components(self) -> tuple[Component, ...]:
        """All components, in the order of the text."""
        return tuple(component for group in self.groups for component in group)

    @property
    def inference(self) -> tuple[Component, ...]:
        """Inference components."""
        return tuple(c for c in self.components if c.kind is ComponentKind.INFERENCE)

    @property
    def train(self) -> tuple[Component, ...]:
        """Training components."""
        return tuple(c for c in self.components if c.kind is ComponentKind.TRAIN)

    @property
    def world_size(self) -> int:
        """Total number of devices: components of a group share devices, groups do not."""
        return sum(group[0].world_size for group in self.groups)

    def component(self, key: str) -> Component:
        """Return the component named `key`, or else the only component whose backend is `key`.

        Raises:
            ConfigError: no component matches, or several components have that backend.
        """
        named = [c for c in self.components if c.name == key]
        matches = named or [c for c in self.components if c.backend == key]
        if len(matches) == 1:
            return matches[0]
        listing = ", ".join(f"{c.name} ({c.backend})" for c in self.components)
        problem = f"several components run on {key!r}; use a name" if matches else f"no component is called {key!r}"
        raise ConfigError(f"allocation {self}: {problem}. Components: {listing}.")

    def devices(self, key: str) -> range:
        """Return the indices of a component's devices, counted over the groups in the order of the text."""
        component = self.component(key)
        position = next(index for index, group in enumerate(self.groups) if component in group)
        start = sum(group[0].world_size for group in self.groups[:position])
        return range(start, start + component.world_size)

    def __str__(self) -> str:
        return "+".join("|".join(str(component) for component in group) for group in self.groups)


def _component(parsed: ParsedComponent, text: str, kinds: Mapping[str, ComponentKind]) -> Component:
    at = parsed.at
    try:
        kind = kinds.get(parsed.backend) or _kind_of_path(parsed.backend)
        at = parsed.sizes_at
        strategy = ParallelStrategy(**parsed.sizes)
    except ConfigError as error:
        raise with_caret(text, str(error), at) from error
    return Component(parsed.backend, parsed.name or DEFAULT_NAMES[kind], strategy, kind)


def _kind_of_path(backend: str) -> ComponentKind:
    """Return the kind of a backend given as a dotted path, by importing its class."""
    if ":" not in backend:
        raise ConfigError(registry.unknown_name_error(backend, *GROUPS.values()))
    engine = registry.load(" or ".join(GROUPS.values()), backend)
    return ComponentKind.INFERENCE if hasattr(engine, "server_spec") else ComponentKind.TRAIN


def _dims(**sizes: int) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size != 1) or "d1"
