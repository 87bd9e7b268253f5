"""The server's side of a weight update: stage beside the served tensors, take the receipt, exchange pointers.

A server that starts in the middle of a run serves the version that was committed last, not the one it was started with
(`restore`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from rl_contracts.aio import in_thread
from rl_contracts.data import STORED_ROUTES, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.hub_names import HubPart, hub_parts
from rl_contracts.logging import get_logger
from rl_contracts.weights import WeightReceiver, checksum, read_committed, verify_receipt
from rl_inference.server.requests import STAGE_SECONDS

logger = get_logger("inference.server")

GIVEN_UP_SECONDS = 10.0
"""For which a version waits for one before whose client is gone."""
OVERTAKEN_SECONDS = 60.0
"""How long `restore` tries again while newer versions are committed faster than they are read."""


class _Place(NamedTuple):
    """What a name that a trainer may send stands for."""

    key: str
    """Name of the tensor that has it."""
    part: HubPart
    """Which part of that tensor."""

    @property
    def where(self) -> tuple[object, ...]:
        """The same for two names of one place: tied parameters."""
        return (self.key, *self.part[1:])


class ServedWeights:
    """A model's parameters by name, the staged next version, and which version is served.

    Trainers send them by the names of the model's checkpoint on the hub, where experts lie one by one, or by those that
    transformers gives them.

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
        self.places = {
            part.name: _Place(self._canonical[name], part)
            for name, parts in hub_parts(model, self._live.items()).items()
            for part in parts
        }
        """What each name that a trainer may send stands for."""
        self._told = set(self.places)  # names under which receipts of the served tensors are given
        for name, tensor in self._live.items():
            whole = HubPart(name, tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), 0)
            self.places.setdefault(name, _Place(self._canonical[name], whole))
        self._spare: dict[str, torch.Tensor] = {}
        self.staged_version: int | None = None
        """The version that waits for its commit."""
        self._spare_version: int | None = None
        self._receiver = WeightReceiver()
        self._staging = threading.Lock()
        self._attempt: object = None
        """The staging that counts; an earlier one may still be stuck."""

    def stage(self, meta: WeightUpdateMeta, seconds: float = STAGE_SECONDS) -> WeightReceipt:
        """Copy a version beside the served one.

        Args:
            seconds: after which it is given up, whoever is waited for.

        Returns:
            checksums of the staged tensors, which become the live ones at `commit`, under every name that was
            sent.

        Raises:
            WeightUpdateError: a path outside the weights directory, unknown or missing parameters, wrong
        shapes or dtypes, numbers that are not finite, not there in time."""
        self._attempt = attempt = object()
        if self._staging.acquire(timeout=min(GIVEN_UP_SECONDS, seconds)):
            self._staging.release()
        else:
            self._abandon()
        try:
            return in_thread(lambda: self._stage(meta, attempt)).result(seconds)
        except TimeoutError:
            self._attempt = None
            self._abandon()
            raise WeightUpdateError(
                f"route {meta.route}, version {meta.version}: not there within {seconds:g} s. Is the trainer frozen?"
            ) from None

    def _abandon(self) -> None:
        """Leave what is being staged to itself: it keeps what it may still write to, and comes too late."""
        self._spare, self._spare_version, self.staged_version = {}, None, None
        self._staging, self._receiver = threading.Lock(), WeightReceiver()

    def _stage(self, meta: WeightUpdateMeta, attempt: object) -> WeightReceipt:
        receiver = self._receiver
        with self._staging:  # a request that its client gave up may still be at work on the spare buffers
            try:
                targets, told, spare = self._targets(meta)
            except WeightUpdateError as error:
                receiver.refuse(meta, str(error))
                raise
            self.staged_version = self._spare_version = None
            try:
                sums = receiver.receive(meta, targets)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                raise WeightUpdateError(
                    f"route {meta.route}, version {meta.version}: cannot be read: {error}"
                ) from error
            if self._attempt is not attempt:
                raise WeightUpdateError(f"version {meta.version}: given up before it was there.")
            self._spare, self.staged_version = spare, meta.version
            self._told.update(sums)
            receipt = {name: sums[told[self.places[name].where]] for name in sums}
            return WeightReceipt(self.holder, meta.version, receipt)

    def receipt(self) -> WeightReceipt:
        """What is served now: checksums of the live tensors under every name that they have. Between two forward
        passes."""
        told = {name: self.places[name] for name in self._told}
        sums = {
            place.where: checksum(place.part.of(self._live[place.key].contiguous()).contiguous())
            for place in {place.where: place for place in told.values()}.values()
        }
        return WeightReceipt(self.holder, self.version, {name: sums[place.where] for name, place in told.items()})

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

    def _targets(
        self, meta: WeightUpdateMeta
    ) -> tuple[dict[str, torch.Tensor], dict[tuple[object, ...], str], dict[str, torch.Tensor]]:
        """Where each parameter of a version is to go, by name; under which name each place comes first, because tied
        tensors may come under several; and the whole tensors. Refuses a version before anything of it is read."""
        self._check_location(meta)
        targets, told, spare = dict[str, torch.Tensor](), dict[tuple[object, ...], str](), dict[str, torch.Tensor]()
        covered: Counter[str] = Counter()
        for spec in meta.params:
            place = self._check(meta.version, spec.name, spec.shape, getattr(torch, spec.dtype, spec.dtype))
            live = self._live[place.key]
            if place.key not in spare:
                kept = self._spare.get(place.key)
                spare[place.key] = (
                    torch.empty_like(live, memory_format=torch.contiguous_format, requires_grad=False)
                    if kept is None
                    else kept
                )
            if told.setdefault(place.where, spec.name) == spec.name:
                targets[spec.name] = place.part.of(spare[place.key])
                covered[place.key] += targets[spec.name].numel()
            else:
                targets[spec.name] = live.new_empty(place.part.shape)
        missing = sorted(key for key in self._required if covered[key] < self._live[key].numel())
        if missing:
            raise WeightUpdateError(
                f"version {meta.version}: {len(missing)} parameters were not sent, the first {missing[:3]}. "
                "Send every parameter of the served model."
            )
        return targets, told, spare

    def _check_location(self, meta: WeightUpdateMeta) -> None:
        if self._directory is None:
            raise WeightUpdateError("this server takes no weight updates; start it with --weights-dir.")
        for part in meta.parts if meta.route in STORED_ROUTES else ():
            if not Path(part.location).resolve().is_relative_to(self._directory):
                raise WeightUpdateError(f"{part.location}: outside the server's weights directory {self._directory}.")

    def _check(self, version: int, name: str, shape: tuple[int, ...], dtype: object) -> _Place:
        place = self.places.get(name)
        if place is None:
            raise WeightUpdateError(f"version {version}: the model has no parameter {name!r}.")
        expected, served = place.part.shape, self._live[place.key].dtype
        if tuple(shape) != expected or dtype != served:
            raise WeightUpdateError(
                f"version {version}, parameter {name!r}: expected {served} {list(expected)}, "
                f"found {dtype} {list(shape)}."
            )
        return place


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
