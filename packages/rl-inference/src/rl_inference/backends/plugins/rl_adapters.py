"""Adapters that travel alone to a server that is another program, and what is made of them and of its checkpoint.

For files beside this one, which run inside servers; needs what `rl_stored` needs. `rl_contracts.weights.adapters` says
the same in the trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_stored
else:
    import rl_stored

SAMPLE = 2**16


def matrices(name: str) -> tuple[str, str]:
    """Names of A and B of an adapted weight."""
    layer = name[: -len(".weight")] if name.endswith(".weight") else name
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def merged(base: Any, a: Any, b: Any, scale: float) -> Any:
    """base + scale B A in float32, [out, in]."""
    return base.float() + scale * (b.float() @ a.float())


def begins_with(parameter: Any) -> str:
    """The checksum of a parameter's first numbers in float32, as text."""
    return str(rl_stored.checksum(parameter.reshape(-1)[:SAMPLE].float()))


def merged_meta(meta: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Where what is to be loaded lies once adapters are merged: in the area what differs from the checkpoint, the same
    for all ranks."""
    adapter, known = meta["adapter"], rl_stored.checkpoint_shapes(checkpoint)
    made = {each for name in adapter["scales"] for each in matrices(name)}
    others = [spec for part in meta["parts"] for spec in part["params"] if spec["name"] not in made]
    specs = [{"name": name, "shape": known[name], "dtype": adapter["dtype"]} for name in adapter["scales"]]
    return {
        "route": "merged",
        "version": meta["version"],
        "parts": [{"location": "", "params": specs + others}],
        "checkpoint": str(checkpoint),
        "area": f"{meta['area']}/merged",
    }
