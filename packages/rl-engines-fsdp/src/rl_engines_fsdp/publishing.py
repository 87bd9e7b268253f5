"""Putting the current weights onto a route to the servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rl_contracts.data import ParamSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import RLError, WeightUpdateError
from rl_contracts.parallel import ParallelContext
from rl_contracts.weights import staged_location, write_weights
from rl_engines_fsdp.causal_lm import PackedCausalLM
from rl_engines_fsdp.sharding import full_parameters


class WeightPublisher:
    """The trainer's end of one route: rank 0 writes, all ranks help to gather.

    Args:
        model: whose parameters travel, tied ones once.
        meta: route and directory; where it names parameters, they say the served dtypes.
        dtype: served dtype otherwise.

    Raises:
        WeightUpdateError: the route is unknown, or `meta` names a parameter that the model does not have.
    """

    def __init__(self, model: PackedCausalLM, meta: WeightUpdateMeta, dtype: str) -> None:
        self.directory = Path(meta.location)
        self.route = meta.route
        staged_location(self.directory, self.route, 0)  # refuses an unknown route now
        wanted = {spec.name: spec.dtype for spec in meta.params}
        self.specs = tuple(
            ParamSpec(name, tuple(parameter.shape), wanted.pop(name, dtype))
            for name, parameter in model.hugging_face_parameters()
        )
        if wanted:
            raise WeightUpdateError(
                f"connecting route {meta.route}: expected parameters of the trainer's model, found "
                f"{sorted(wanted)[:3]}. Do trainer and server load the same model?"
            )

    def publish(
        self, model: PackedCausalLM, version: int, parallel: ParallelContext
    ) -> tuple[WeightUpdateMeta, WeightReceipt]:
        """Write all parameters as `version` (collective).

        Raises:
            WeightUpdateError, EngineError: they could not be written; on every rank.
        """
        location = staged_location(self.directory, self.route, version)
        meta = WeightUpdateMeta(self.route, version, location, self.specs)
        receipt = WeightReceipt("trainer", version, {})
        error: Exception | None = None
        gathered = full_parameters(model)
        if parallel.is_main:
            try:
                meta, receipt = write_weights(meta, gathered)
            except (RLError, OSError) as failure:
                error = failure
        _drain(gathered)  # the other ranks gather too, and on rank 0 what a failure left over
        parallel.agree(error, f"writing weights of version {version} to {location}")
        return meta, receipt

    def close(self, parallel: ParallelContext) -> None:
        """Remove the shared-memory files of this route. Safe to call twice."""
        if parallel.is_main and self.route == "shm":
            for version in (0, 1):
                Path(staged_location(self.directory, self.route, version)).unlink(missing_ok=True)


def _drain(tensors: Iterator[tuple[str, Tensor]]) -> None:
    deque(tensors, maxlen=0)
