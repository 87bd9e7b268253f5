"""Publishing weights on a route without a trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.data import ParamSpec, WeightReceipt, WeightUpdateMeta

if TYPE_CHECKING:
    import torch


def put_weights(
    directory: str | Path, version: int, tensors: Iterable[tuple[str, torch.Tensor]], route: str = "shm"
) -> tuple[WeightUpdateMeta, WeightReceipt]:
    """Put named tensors, in their own dtypes, onto the route `shm` or `disk`, as a trainer of one rank does.

    Returns:
        The metadata that servers receive, and the trainer's receipt.
    """
    from rl_contracts.weights import open_sender

    named = list(tensors)
    specs = tuple(ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named)
    sender = open_sender(route, str(directory))
    meta = sender.begin(version, specs)
    return meta, WeightReceipt("trainer", version, sender.send(named))
