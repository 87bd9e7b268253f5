"""What the parts of a run other than its engines say of themselves, in a recover point: of each rank and part the JSON
file `<part>-<rank>.json`, with its tensors in the safetensors file beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_contracts.errors import EngineError

if TYPE_CHECKING:
    import torch

    from rl_contracts.parallel import ParallelContext

_TENSOR = "$tensor"
"""Key under which the JSON of a state names a tensor that lies in the safetensors file beside it."""


@runtime_checkable
class Stateful(Protocol):
    """A part of a run that goes on from a saved state: nested dicts and lists of JSON values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class PartState:
    """A part's state as it was when it was described; what the part does later does not change it."""

    name: str
    """Of the part."""
    text: str
    """JSON, in which tensors are named."""
    tensors: dict[str, torch.Tensor]
    """Copies, by these names."""

    @classmethod
    def of(cls, name: str, part: Stateful) -> PartState:
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

    def write(self, point: Path, rank: int) -> None:
        """Write this rank's files into the directory of a point."""
        from safetensors.torch import save_file

        path = point / f"{self.name}-{rank}"
        if self.tensors:
            save_file(self.tensors, f"{path}.safetensors")
        Path(f"{path}.json").write_text(self.text, encoding="utf-8")


def restore_parts(point: Path, parts: Mapping[str, Stateful], parallel: ParallelContext) -> None:
    """Let the parts of this rank go on from what they said in a point.

    Raises:
        EngineError: a state cannot be read.
    """
    for name, part in parts.items():
        part.load_state_dict(_read(point / f"{name}-{parallel.rank}"))


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        text = Path(f"{path}.json").read_text(encoding="utf-8")
        tensors = load_file(f"{path}.safetensors") if Path(f"{path}.safetensors").exists() else {}
        result: dict[str, Any] = json.loads(
            text, object_hook=lambda found: tensors[found[_TENSOR]] if found.keys() == {_TENSOR} else found
        )
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path}: this rank's part of the recover point cannot be read: {error}. Resume with as many trainer "
            "processes as the run had, or start a new run (recover.resume=false)."
        ) from error
    return result
