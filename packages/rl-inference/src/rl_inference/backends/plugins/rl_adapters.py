"""Weight updates of vLLM and SGLang servers that contain only adapters, and their merge with the checkpoint.

The other files of this directory import it inside the servers; it has the requirements of `rl_stored`. The trainer's
counterpart is `rl_contracts.weights.adapters`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_stored
else:
    import rl_stored

SAMPLE = 2**16
"""Number of leading elements of each parameter that are compared to identify the base weights."""


def matrix_names(name: str) -> tuple[str, str]:
    """Return the names of the matrices A and B of an adapted weight."""
    layer = name[: -len(".weight")] if name.endswith(".weight") else name
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def merged(base: Any, a: Any, b: Any, scale: float) -> Any:
    """Return base + scale B A in float32, [out, in]."""
    return base.float() + scale * (b.float() @ a.float())


def prefix_checksum(parameter: Any) -> str:
    """Return the checksum of a parameter's first `SAMPLE` elements, converted to float32, as text."""
    return str(rl_stored.checksum(parameter.reshape(-1)[:SAMPLE].float()))


def merged_meta(meta: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the metadata of an update after its adapters are merged; equal on all ranks.

    The staging area then contains the parameters that differ from the checkpoint.
    """
    adapter, shapes = meta["adapter"], rl_stored.checkpoint_shapes(checkpoint)
    matrices = {matrix for name in adapter["scales"] for matrix in matrix_names(name)}
    other_specs = [spec for part in meta["parts"] for spec in part["params"] if spec["name"] not in matrices]
    specs = [{"name": name, "shape": shapes[name], "dtype": adapter["dtype"]} for name in adapter["scales"]]
    return {
        "route": "merged",
        "version": meta["version"],
        "parts": [{"location": "", "params": specs + other_specs}],
        "checkpoint": str(checkpoint),
        "area": f"{meta['area']}/merged",
    }
