"""Weight updates that contain only adapters.

A server merges each adapted weight from its base weight and its adapter. It first checks that trainer and server use
the same base weights.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rl_contracts.data import AdapterSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksums import checksum

SAMPLE = 2**16
"""Number of leading elements of each parameter that are compared to identify the base weights."""


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return base + scale B A in float32, [out, in]; the caller rounds it to the served dtype.

    Args:
        base: [out, in] of any dtype, on any device.
        a: [rank, in], and `b` [out, rank], on the same device.
    """
    return base.float() + scale * (b.float() @ a.float())


def prefix_checksum(parameter: torch.Tensor) -> str:
    """Return the checksum of a parameter's first `SAMPLE` elements, converted to float32, as text."""
    return str(checksum(parameter.detach().reshape(-1)[:SAMPLE].to("cpu", torch.float32).contiguous()))


class BaseWeights:
    """Parameters by name from the safetensors files of a model directory.

    The files are memory-mapped: nothing is copied, and pages that are not read take no memory.

    Raises:
        WeightUpdateError: the files cannot be read; or, on access, there is no parameter of that name.
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
                "Set publish.adapter=never to send full weights."
            )
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def check(self, adapter: AdapterSpec) -> None:
        """Check that these are the base weights that the trainer adapts; each base is compared once.

        Raises:
            WeightUpdateError: names the first parameter whose leading elements differ.
        """
        if adapter.base == self._checked:
            return
        for name, expected in adapter.base.items():
            if prefix_checksum(self[name]) != expected:
                raise WeightUpdateError(
                    f"{self._directory}: parameter {name!r} differs from the trainer's base model. Start the servers "
                    "with that model, or set publish.adapter=never to send full weights."
                )
        self._checked = adapter.base
