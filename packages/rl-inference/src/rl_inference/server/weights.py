"""The server's side of a weight update: stage beside the served tensors, take the receipt, exchange pointers.

A server that starts in the middle of a run serves the version that was committed last, not the one it was started with
(`restore`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rl_contracts.data import STORED_ROUTES, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.logging import get_logger
from rl_contracts.weights import WeightReceiver, checksum, read_committed, verify_receipt

logger = get_logger("inference.server")

OVERTAKEN_SECONDS = 60.0
"""How long `restore` tries again while newer versions are committed faster than they are read."""


class ServedWeights:
    """A model's parameters by name, the staged next version, and which version is served.

    There are two sets of buffers. Staging fills the one that is not served, and a commit exchanges them, so
    that after the first update nothing is allocated. `stage` may run beside generation; `commit` only between
    two forward passes."""

    def __init__(self, model: torch.nn.Module, directory: str, holder: str, version: int) -> None:
        self.version = version
        self.holder = holder
        self._directory = Path(directory).resolve() if directory else None
        self._live: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        first_name: dict[int, str] = {}
        # tied parameters are one tensor under several names: the first one stands for it
        self._canonical = {name: first_name.setdefault(id(tensor), name) for name, tensor in self._live.items()}
        # trainers send parameters; a buffer that is not sent stays as it was loaded
        self._required = {key for key in first_name.values() if isinstance(self._live[key], torch.nn.Parameter)}
        self._spare: dict[str, torch.Tensor] = {}
        self.staged_version: int | None = None
        """The version that waits for its commit."""
        self._spare_version: int | None = None
        self._receiver = WeightReceiver()
        self._staging = threading.Lock()

    def stage(self, meta: WeightUpdateMeta) -> WeightReceipt:
        """Copy a version beside the served one.

        Returns:
            checksums of the staged tensors, which become the live ones at `commit`, under every name that was
            sent.

        Raises:
            WeightUpdateError: a path outside the weights directory, unknown or missing parameters, wrong
        shapes or dtypes."""
        with self._staging:  # a request that its client gave up may still be at work on the spare buffers
            try:
                targets, told = self._targets(meta)
            except WeightUpdateError as error:
                self._receiver.refuse(meta, str(error))
                raise
            self.staged_version = self._spare_version = None
            sums = self._receiver.receive(meta, targets)
            self._spare = {key: targets[name] for key, name in told.items()}
            self.staged_version = meta.version
            receipt = {name: sums[told[self._canonical[name]]] for name in sums}
            return WeightReceipt(self.holder, meta.version, receipt)

    def receipt(self) -> WeightReceipt:
        """What is served now: checksums of the live tensors under every name that they have. Between two forward
        passes."""
        sums = {key: checksum(self._live[key].contiguous()) for key in set(self._canonical.values())}
        return WeightReceipt(self.holder, self.version, {name: sums[key] for name, key in self._canonical.items()})

    def commit(self, version: int) -> None:
        """Serve the staged tensors. Asking again for the served version does nothing, so that a client may
        retry.

        Raises:
            WeightUpdateError: another version, or none, is staged.
        """
        if version == self.version and self.staged_version != version:
            return
        if self.staged_version != version:
            raise WeightUpdateError(
                f"commit of version {version}: staged is {self.staged_version}, served is {self.version}. "
                "Stage it first."
            )
        self._exchange()
        self.staged_version, self._spare_version, self.version = None, self.version, version

    def _exchange(self) -> None:
        for key, tensor in self._spare.items():
            # `.data`, so that the parameter object stays: tied names and compiled graphs hold on to it
            self._spare[key], self._live[key].data = self._live[key].data, tensor

    @contextmanager
    def before(self) -> Iterator[None]:
        """For the time of a block, compute with the weights that were served before the last commit. Between two
        forward passes, and while nothing is staged.

        Raises:
            WeightUpdateError: they are gone.
        """
        if self._spare_version is None:
            raise WeightUpdateError("no earlier weights are held: nothing was committed since the last were staged.")
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _targets(self, meta: WeightUpdateMeta) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Where each parameter of a version is to go, by name; and under which name each tensor comes first, because
        tied ones may come under several. Refuses a version before anything of it is read."""
        self._check_location(meta)
        targets: dict[str, torch.Tensor] = {}
        told: dict[str, str] = {}
        for spec in meta.params:
            key = self._check(meta.version, spec.name, spec.shape, getattr(torch, spec.dtype, spec.dtype))
            first = told.setdefault(key, spec.name) == spec.name
            live, spare = self._live[key], self._spare.get(key)
            if spare is None or not first:
                spare = torch.empty_like(live, memory_format=torch.contiguous_format, requires_grad=False)
            targets[spec.name] = spare
        missing = sorted(self._required - set(told))
        if missing:
            raise WeightUpdateError(
                f"version {meta.version}: {len(missing)} parameters were not sent, the first {missing[:3]}. "
                "Send every parameter of the served model."
            )
        return targets, told

    def _check_location(self, meta: WeightUpdateMeta) -> None:
        if self._directory is None:
            raise WeightUpdateError("this server takes no weight updates; start it with --weights-dir.")
        for part in meta.parts if meta.route in STORED_ROUTES else ():
            if not Path(part.location).resolve().is_relative_to(self._directory):
                raise WeightUpdateError(f"{part.location}: outside the server's weights directory {self._directory}.")

    def _check(self, version: int, name: str, shape: tuple[int, ...], dtype: object) -> str:
        """The name that stands for a parameter's tensor."""
        key = self._canonical.get(name)
        if key is None:
            raise WeightUpdateError(f"version {version}: the model has no parameter {name!r}.")
        live = self._live[key]
        if tuple(shape) != tuple(live.shape) or dtype != live.dtype:
            raise WeightUpdateError(
                f"version {version}, parameter {name!r}: expected {live.dtype} {list(live.shape)}, "
                f"found {dtype} {list(shape)}."
            )
        return key


def restore(weights: ServedWeights, directory: str) -> None:
    """Stage and commit what the record in `directory` names; nothing without a record. Before the decode thread runs.

    A version is written over the last but one, so one that is overtaken while it is read has a newer record. The same
    record with other weights than it says is no race.

    Raises:
        WeightUpdateError: what the last record names cannot be read, or is not what was committed; names the parameter.
    """
    deadline = time.monotonic() + OVERTAKEN_SECONDS
    record = read_committed(directory) if directory else None
    while record is not None:
        if not record.readable:
            logger.info("version %d came over %s, which leaves nothing to read", record.version, record.meta.route)
            return
        try:
            verify_receipt(record.receipt, weights.stage(record.meta), record.meta.route)
        except WeightUpdateError:
            overtaken, record = record, read_committed(directory)
            if record is None or record.version == overtaken.version or time.monotonic() > deadline:
                raise
        else:
            weights.commit(record.version)
            logger.info("restored version %d, committed before this process started", record.version)
            return
