"""States of a run's components other than its engines, in a recovery checkpoint.

Each rank writes one JSON file `<component>-<rank>.json` per component; its tensors are in the safetensors file of the
same name.
"""

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
"""Key under which the JSON of a state names a tensor in the safetensors file."""


@runtime_checkable
class Stateful(Protocol):
    """Component of a run that can be saved: its state is nested dicts and lists of JSON values and tensors.

    With another number of ranks, a component resumes if its state was the same on all ranks, or if it is
    `Reshardable`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` restores."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


@runtime_checkable
class Reshardable(Stateful, Protocol):
    """Component whose states differ between ranks, and that can resume with another number of ranks."""

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore the states of all saved ranks, in order of rank; their number may differ from this run's."""


@dataclass(frozen=True)
class ComponentState:
    """Copy of a component's state; later changes of the component do not affect it."""

    name: str
    """Name of the component."""
    text: str
    """State as JSON, which refers to tensors by name."""
    tensors: dict[str, torch.Tensor]
    """Copies of the tensors, by name."""

    @classmethod
    def capture(cls, name: str, component: Stateful) -> ComponentState:
        """Copy the state of a component.

        Raises:
            TypeError: the state holds a value that is neither a JSON value nor a tensor.
        """
        import torch

        tensors: dict[str, torch.Tensor] = {}

        def store_tensor(value: Any) -> dict[str, str]:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name}.state_dict: expected JSON values and tensors, found {type(value).__name__}.")
            tensors[str(len(tensors))] = value.clone(memory_format=torch.contiguous_format)
            return {_TENSOR: str(len(tensors) - 1)}

        return cls(name, json.dumps(component.state_dict(), default=store_tensor), tensors)

    def write(self, checkpoint: Path, rank: int) -> list[Path]:
        """Write this rank's files into the directory of a recovery checkpoint, and return them."""
        from safetensors.torch import save_file

        text, tensors = checkpoint / f"{self.name}-{rank}.json", checkpoint / f"{self.name}-{rank}.safetensors"
        if self.tensors:
            save_file(self.tensors, tensors)
        text.write_text(self.text, encoding="utf-8")
        return [text, tensors] if self.tensors else [text]


class SavedStates(Sequence[dict[str, Any]]):
    """States of one component on all ranks of the saved run, in order of rank; each is read on access.

    Args:
        checkpoint: directory of the recovery checkpoint.
        name: name of the component.

    Raises:
        EngineError: the manifest cannot be read, or the state of a rank is missing.
    """

    def __init__(self, checkpoint: Path, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        try:  # the directory is not listed, because a listing may omit recent files of other hosts
            self._ranks: int = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["ranks"]
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(checkpoint / MANIFEST, error) from error
        for rank in range(self._ranks):
            if not (checkpoint / f"{name}-{rank}.json").exists():
                raise _unreadable(checkpoint / f"{name}-{rank}.json", "no such file")

    def __len__(self) -> int:
        """Return the number of ranks of the saved run."""
        return self._ranks

    def __getitem__(self, rank: Any) -> Any:
        """Return the state of a rank."""
        return _read(self._checkpoint / f"{self._name}-{range(self._ranks)[rank]}")

    @property
    def differing(self) -> bool:
        """True if the state of any rank differs from the state of rank 0."""
        return any(len({path.read_bytes() for path in self._files(kind)}) > 1 for kind in ("json", "safetensors"))

    def _files(self, kind: str) -> list[Path]:
        return [
            path for rank in range(self._ranks) if (path := self._checkpoint / f"{self._name}-{rank}.{kind}").exists()
        ]


def restore_components(checkpoint: Path, components: Mapping[str, Stateful], parallel: ParallelContext) -> None:
    """Restore this rank's components from the states of all saved ranks, whose number may differ.

    Raises:
        EngineError: a state cannot be read.
        ConfigError: the number of ranks has changed, and a component can resume only with the saved number.
    """
    for name, component in components.items():
        states = SavedStates(checkpoint, name)
        if isinstance(component, Reshardable):
            component.load_states(states)
        elif len(states) == parallel.world_size:
            component.load_state_dict(states[parallel.rank])
        elif states.differing:
            raise ConfigError(
                f"{checkpoint}: component {name} ({type(component).__name__}) saved different states on "
                f"{len(states)} trainer processes and has no load_states; resume with {len(states)} trainer processes "
                f"instead of {parallel.world_size}."
            )
        else:
            component.load_state_dict(states[0])


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        text = Path(f"{path}.json").read_text(encoding="utf-8")
        tensors = load_file(f"{path}.safetensors") if Path(f"{path}.safetensors").exists() else {}
        result: dict[str, Any] = json.loads(
            text, object_hook=lambda value: tensors[value[_TENSOR]] if value.keys() == {_TENSOR} else value
        )
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return result


def _unreadable(path: Path, reason: object) -> EngineError:
    return EngineError(
        f"{path}: this file of the recovery checkpoint cannot be read: {reason}. To start over, set "
        "recover.resume=false."
    )
