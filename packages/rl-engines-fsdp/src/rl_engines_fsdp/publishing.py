"""Putting the current weights onto a route to the servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from rl_contracts.data import ParamSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.engine import Announce
from rl_contracts.errors import RLError, WeightUpdateError
from rl_contracts.parallel import ParallelContext
from rl_contracts.weights import ROUTES, WeightSender, open_sender
from rl_engines_fsdp.model.packed_model import PackedModel
from rl_engines_fsdp.ranks.sharding import full_parameters


class WeightPublisher:
    """The trainer's end of one route: rank 0 sends, all ranks help to gather.

    Args:
        model: whose parameters travel, tied ones once.
        meta: route and directory or address; where it names parameters, they say the served dtypes.
        dtype: served dtype otherwise.
        parallel: ranks.

    Raises:
        WeightUpdateError, EngineError: the route is unknown or cannot work here, or `meta` names a parameter that the
            model does not have; on every rank.
    """

    def __init__(self, model: PackedModel, meta: WeightUpdateMeta, dtype: str, parallel: ParallelContext) -> None:
        if meta.route not in ROUTES:
            raise WeightUpdateError(f"weight route: expected one of {', '.join(ROUTES)}, found {meta.route!r}.")
        self.route = meta.route
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
        self._sender: WeightSender | None = None
        error: RLError | None = None
        if parallel.is_main:
            try:
                self._sender = open_sender(meta, parallel.device)
            except RLError as failure:
                error = failure
        parallel.agree(error, f"connecting route {meta.route}")

    def publish(
        self, model: PackedModel, version: int, parallel: ParallelContext, announce: Announce | None = None
    ) -> tuple[WeightUpdateMeta, WeightReceipt]:
        """Send all parameters as `version` (collective).

        Raises:
            WeightUpdateError, EngineError: they could not be sent; on every rank.
        """
        meta = WeightUpdateMeta(self.route, version, "", self.specs)
        receipt = WeightReceipt("trainer", version, {})
        error: Exception | None = None
        gathered = full_parameters(model)
        if self._sender is not None:
            try:
                meta, receipt = self._sender.send(version, self.specs, gathered, announce)
            except (RLError, OSError) as failure:
                error = failure
        _drain(gathered)  # the other ranks gather too, and on rank 0 what a failure left over
        parallel.agree(error, f"sending weights of version {version} over route {self.route}")
        return meta.with_version(version, parallel.broadcast_json(meta.location)), receipt

    def close(self) -> None:
        """Free what the route holds. Safe to call twice."""
        if self._sender is not None:
            self._sender.close()


def _drain(tensors: Iterator[tuple[str, Tensor]]) -> None:
    deque(tensors, maxlen=0)
