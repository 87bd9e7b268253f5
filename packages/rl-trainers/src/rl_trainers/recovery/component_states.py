"""What the parts of a run other than its engines say of themselves, in a recover point: of each rank and part the JSON
file `<part>-<rank>.json`, with its tensors in the safetensors file beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.runtime.run_files import MANIFEST

if TYPE_CHECKING:
    import torch

    from rl_contracts.batch.parallel import ParallelContext

_TENSOR = "$tensor"
"""Key under which the JSON of a state names a tensor that lies in the safetensors file beside it."""


@runtime_checkable
class Stateful(Protocol):
    """A part of a run that goes on from a saved state: nested dicts and lists of JSON values and tensors.

    With another number of ranks a part goes on where its state was the same on all of them, or where it is
    `Reshardable`.
    """

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@runtime_checkable
class Reshardable(Stateful, Protocol):
    """A part whose states differ between ranks, and that another number of them can go on from."""

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from what all ranks said, in order of rank; their number may be this run's, or another."""


@dataclass(frozen=True)
class ComponentState:
    """A part's state as it was when it was described; what the part does later does not change it."""

    name: str
    """Of the part."""
    text: str
    """JSON, in which tensors are named."""
    tensors: dict[str, torch.Tensor]
    """Copies, by these names."""

    @classmethod
    def describe(cls, name: str, part: Stateful) -> ComponentState:
        """Describe a part.

        Raises:
            TypeError: its state holds something else than JSON values and tensors.
        """
        import torch

        tensors: dict[str, torch.Tensor] = {}

        def named(value: Any) -> dict[str, str]:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name}: expected JSON values and tensors, found {type(value).__name__}.")
            tensors[str(len(tensors))] = value.clone(memory_format=torch.contiguous_format)
            return {_TENSOR: str(len(tensors) - 1)}

        return cls(name, json.dumps(part.state_dict(), default=named), tensors)

    def write(self, point: Path, rank: int) -> list[Path]:
        """Write this rank's files into the directory of a point; which they are."""
        from safetensors.torch import save_file

        text, tensors = point / f"{self.name}-{rank}.json", point / f"{self.name}-{rank}.safetensors"
        if self.tensors:
            save_file(self.tensors, tensors)
        text.write_text(self.text, encoding="utf-8")
        return [text, tensors] if self.tensors else [text]


class SavedStates(Sequence[dict[str, Any]]):
    """What all ranks of the saved run said of one part, in order of rank; each state is read where it is asked for.

    Args:
        point: directory of the point.
        name: of the part.

    Raises:
        EngineError: there is none, or those of some ranks are missing.
    """

    def __init__(self, point: Path, name: str) -> None:
        self._point, self._name = point, name
        try:  # a host may list another one's files later than it finds them by name
            self._ranks: int = json.loads((point / MANIFEST).read_text(encoding="utf-8"))["ranks"]
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(point / MANIFEST, error) from error
        for rank in range(self._ranks):
            if not (point / f"{name}-{rank}.json").exists():
                raise _unreadable(point / f"{name}-{rank}", "it is missing")

    def __len__(self) -> int:
        """Ranks of the saved run."""
        return self._ranks

    def __getitem__(self, rank: Any) -> Any:
        """The state of a rank."""
        return _read(self._point / f"{self._name}-{range(self._ranks)[rank]}")

    @property
    def differing(self) -> bool:
        """Whether some rank said something else than rank 0."""
        return any(len({path.read_bytes() for path in self._files(kind)}) > 1 for kind in ("json", "safetensors"))

    def _files(self, kind: str) -> list[Path]:
        return [path for rank in range(self._ranks) if (path := self._point / f"{self._name}-{rank}.{kind}").exists()]


def restore_components(point: Path, parts: Mapping[str, Stateful], parallel: ParallelContext) -> None:
    """Let the parts of this rank go on from what all ranks said in a point, whatever their number was.

    Raises:
        EngineError: a state cannot be read.
        ConfigError: the run had another number of ranks, and a part can go on with that number alone.
    """
    for name, part in parts.items():
        states = SavedStates(point, name)
        if isinstance(part, Reshardable):
            part.load_states(states)
        elif len(states) == parallel.world_size:
            part.load_state_dict(states[parallel.rank])
        elif states.differing:
            raise ConfigError(
                f"{point}: {name} ({type(part).__name__}) has another state on each of {len(states)} trainer processes "
                f"and no load_states, so that {parallel.world_size} cannot go on from them. Resume with {len(states)}."
            )
        else:
            part.load_state_dict(states[0])


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        text = Path(f"{path}.json").read_text(encoding="utf-8")
        tensors = load_file(f"{path}.safetensors") if Path(f"{path}.safetensors").exists() else {}
        result: dict[str, Any] = json.loads(
            text, object_hook=lambda found: tensors[found[_TENSOR]] if found.keys() == {_TENSOR} else found
        )
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return result


def _unreadable(path: Path, why: object) -> EngineError:
    return EngineError(
        f"{path}: this part of the recover point cannot be read: {why}. Start a new run (recover.resume=false)."
    )
