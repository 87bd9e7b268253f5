"""Updates that carry adapters alone: how a weight is made of its base and its adapter, and how both sides see that they
mean the same base."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_contracts.data import AdapterSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksums import checksum

SAMPLE = 2**16
"""Numbers of each parameter that are compared to tell one base from another."""


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """base + scale B A in float32, [out, in]; the caller rounds it to the dtype in which it is served.

    Args:
        base: [out, in] of any dtype, on any device.
        a: [rank, in], and `b` [out, rank]: on the same device.
    """
    return base.float() + scale * (b.float() @ a.float())


def prefix_checksum(parameter: torch.Tensor) -> str:
    """The checksum of a parameter's first `SAMPLE` numbers in float32, whatever dtype they are kept in, as text."""
    return str(checksum(parameter.detach().reshape(-1)[:SAMPLE].to("cpu", torch.float32).contiguous()))


class BaseWeights:
    """The parameters of a model directory's safetensors by name. They are mapped: nothing is copied, and pages that
    nobody reads take no memory.

    Raises:
        WeightUpdateError: the directory has none, or they cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        self._checked: dict[str, str] = {}
        try:
            files = [safe_open(str(path), framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"{directory}: the base weights cannot be read: {error}") from error
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise WeightUpdateError(
                f"{self._directory}: expected the base weight {name!r} in its safetensors, found none of that name. "
                "Set publish.adapter=never, so that whole weights are sent."
            )
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def check(self, adapter: AdapterSpec) -> None:
        """See that this is the base that the trainer adapts; the same one is compared once.

        Raises:
            WeightUpdateError: names the first parameter that begins otherwise.
        """
        if adapter.base == self._checked:
            return
        for name, begin in adapter.base.items():
            if prefix_checksum(self[name]) != begin:
                raise WeightUpdateError(
                    f"{self._directory}: parameter {name!r} is not the one that the trainer adapts. Start the servers "
                    "with the trainer's base model, or set publish.adapter=never, so that whole weights are sent."
                )
        self._checked = adapter.base
