"""Which backend runs on which devices, and how it is split over them.

    allocation := group ("+" group)*               separate devices
    group      := component ("|" component)*       the same devices, shared in turn
    component  := backend ["[" name "]"] ":" (dims | hybrid)
    backend    := installed name | module ":" class
    dims       := one or more of d<n> t<n> p<n> c<n> e<n>, each at most once; what is missing is 1
    hybrid     := "(attn:" dims "|ffn:" dims ")"   mixture-of-experts layers split apart from attention; the p of ffn is
                                                   that of attn, and its d what is left, where they are missing

`sglang[r]:d2+fsdp[actor]:d4|fsdp[critic]:d4` is two devices for the servers `r`, and four that actor and critic
share. What a backend does follows from what is installed: names in the entry-point group `rl.inference_engines` serve,
those in `rl.train_engines` train. Of a dotted path the class is imported; one with `server_spec` serves.
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
    """What a component does with its devices."""

    INFERENCE = "inference"
    TRAIN = "train"


GROUPS = {ComponentKind.INFERENCE: "rl.inference_engines", ComponentKind.TRAIN: "rl.train_engines"}
"""The entry-point group in which the backends of a kind are found."""

DEFAULT_NAMES = {ComponentKind.INFERENCE: "rollout", ComponentKind.TRAIN: "actor"}
"""The name of a component that is written without one."""


@dataclass(frozen=True, slots=True)
class ParallelStrategy:
    """How one model is split over `world_size` = data * tensor * pipeline * context ranks.

    The layers of experts are split over those same ranks, so `expert` never multiplies the world size. Inside
    a pipeline stage lie data * tensor * context ranks; an expert group takes expert * expert_tensor of them,
    and what remains replicates the experts (`expert_data`). This is the parallel folding of Megatron-Core: in
    the hybrid form the ranks of `attn` and `ffn` are the same, hence attn d*t*p*c == ffn d*t*p*e with the
    same p.

    Raises:
        ConfigError: a size below one, or expert groups that do not fill a pipeline stage evenly.
    """

    data: int = 1
    """Replicas (or shards of one replica, with fully sharded data parallelism); for servers, their number."""

    tensor: int = 1
    """Ranks over which each matrix is split."""

    pipeline: int = 1
    """Stages over which the layers are split."""

    context: int = 1
    """Ranks over which each sequence is split."""

    expert: int = 1
    """Ranks over which the experts of a layer are spread."""

    expert_tensor: int | None = None
    """Ranks over which each matrix of an expert is split (`t` of ffn); None leaves it to the backend."""

    def __post_init__(self) -> None:
        sizes = (self.data, self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor or 1)
        if min(sizes) < 1 or self.expert_tensor == 0:
            raise ConfigError(f"parallel strategy: every size must be at least 1, found {sizes}")
        stage = self.data * self.tensor * self.context
        group = self.expert * (self.expert_tensor or 1)
        if stage % group:
            raise ConfigError(
                f"parallel strategy: an expert group of {group} ranks must divide the {stage} ranks of a "
                f"pipeline stage (data {self.data} * tensor {self.tensor} * context {self.context}); "
                f"choose e that divides {stage}"
            )

    @property
    def world_size(self) -> int:
        """Ranks in all: data * tensor * pipeline * context."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica together: tensor * pipeline * context."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_data(self) -> int:
        """Replicas of each expert, `expert_tensor` taken as 1 where the backend decides."""
        return self.data * self.tensor * self.context // (self.expert * (self.expert_tensor or 1))

    def __str__(self) -> str:
        if self.expert_tensor is None:
            return _dims(d=self.data, t=self.tensor, p=self.pipeline, c=self.context, e=self.expert)
        attention = _dims(d=self.data, t=self.tensor, p=self.pipeline, c=self.context)
        experts = _dims(d=self.expert_data, t=self.expert_tensor, p=self.pipeline, e=self.expert)
        return f"(attn:{attention}|ffn:{experts})"


@dataclass(frozen=True, slots=True)
class Component:
    """One backend on its devices, for example the trainer of the actor or the rollout servers."""

    backend: str
    """Entry-point name or dotted path of the engine, for example `fsdp` or `my_package:MyEngine`."""

    name: str
    """Role, unique in the allocation; `actor` or `rollout` where none is written."""

    strategy: ParallelStrategy
    """How the model is split."""

    kind: ComponentKind
    """Whether it serves or trains."""

    @property
    def world_size(self) -> int:
        """Devices that it uses."""
        return self.strategy.world_size

    def __str__(self) -> str:
        name = "" if self.name == DEFAULT_NAMES[self.kind] else f"[{self.name}]"
        return f"{self.backend}{name}:{self.strategy}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device groups, each a tuple of the components that share its devices.

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
        ConfigError: no component, two of one name, or components that share devices but not their number.
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
                    f"components joined by '|' share their devices, so their world sizes must be equal: "
                    f"{group[0].name} has {group[0].world_size}, {component.name} has "
                    f"{component.world_size}; change d, t, p or c, or join them by '+'",
                    at,
                )
            names.add(component.name)
            at += len(str(component)) + 1

    @classmethod
    def parse(cls, text: str, kinds: Mapping[str, ComponentKind] | None = None) -> Allocation:
        """Read an allocation such as `"sglang:d4t2+fsdp:d8"`. Blanks between its parts are allowed.

        Args:
            text: the allocation; the grammar heads this module.
            kinds: what each backend does, by name. Default: what is installed.

        Raises:
            ConfigError: the text does not follow the grammar, a backend is not installed, or components cannot stand
                side by side; shows the text (or, in the last case, how it was understood) with a mark under the
                character where it went wrong, and what was expected there.
        """
        if kinds is None:
            kinds = {name: kind for kind, group in GROUPS.items() for name in registry.available(group)}
        return cls(tuple(tuple(_component(part, text, kinds) for part in group) for group in Reader(text).groups()))

    @property
    def components(self) -> tuple[Component, ...]:
        """All components, in the order written."""
        return tuple(component for group in self.groups for component in group)

    @property
    def inference(self) -> tuple[Component, ...]:
        """The components that serve."""
        return tuple(c for c in self.components if c.kind is ComponentKind.INFERENCE)

    @property
    def train(self) -> tuple[Component, ...]:
        """The components that train."""
        return tuple(c for c in self.components if c.kind is ComponentKind.TRAIN)

    @property
    def world_size(self) -> int:
        """Devices in all: components of a group share theirs, groups do not."""
        return sum(group[0].world_size for group in self.groups)

    def component(self, key: str) -> Component:
        """The component called `key`, or else the only one whose backend is `key`.

        Raises:
            ConfigError: there is none, or several components have that backend.
        """
        named = [c for c in self.components if c.name == key]
        found = named or [c for c in self.components if c.backend == key]
        if len(found) == 1:
            return found[0]
        listing = ", ".join(f"{c.name} ({c.backend})" for c in self.components)
        problem = f"several components run on {key!r}; use a name" if found else f"no component is called {key!r}"
        raise ConfigError(f"allocation {self}: {problem}. Components: {listing}.")

    def devices(self, key: str) -> range:
        """Indices of a component's devices, counted over the groups in the order written."""
        wanted = self.component(key)
        place = next(place for place, group in enumerate(self.groups) if wanted in group)
        start = sum(group[0].world_size for group in self.groups[:place])
        return range(start, start + wanted.world_size)

    def __str__(self) -> str:
        return "+".join("|".join(str(component) for component in group) for group in self.groups)


def _component(written: ParsedComponent, text: str, kinds: Mapping[str, ComponentKind]) -> Component:
    at = written.at
    try:
        kind = kinds.get(written.backend) or _kind_of_path(written.backend)
        at = written.sizes_at
        strategy = ParallelStrategy(**written.sizes)
    except ConfigError as error:
        raise with_caret(text, str(error), at) from error
    return Component(written.backend, written.name or DEFAULT_NAMES[kind], strategy, kind)


def _kind_of_path(backend: str) -> ComponentKind:
    """What a backend does that is no installed name."""
    if ":" not in backend:
        raise ConfigError(registry.unknown_name_error(backend, *GROUPS.values()))
    engine = registry.load(" or ".join(GROUPS.values()), backend)
    return ComponentKind.INFERENCE if hasattr(engine, "server_spec") else ComponentKind.TRAIN


def _dims(**sizes: int) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size != 1) or "d1"
