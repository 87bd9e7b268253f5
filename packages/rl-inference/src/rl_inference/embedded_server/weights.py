"""Server side of a weight update: stage next to the served tensors, compute the receipt, exchange pointers.

A server that starts in the middle of a run loads the version that was committed last, not the one in its command
line (`restore`).
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

from rl_contracts.data import STORED_ROUTES, AdapterSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.models.hub_names import HubSlice, hub_slices
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.runtime.logging import get_logger
from rl_contracts.weights import WeightReceiver, adapters, checksum, read_committed, verify_receipt
from rl_contracts.weights.checksums import copy_summed
from rl_contracts.weights.flat_layout import dtype_of
from rl_contracts.weights.stored import FILE
from rl_inference.embedded_server.requests import STAGE_SECONDS

logger = get_logger("inference.server")

ABANDONED_SECONDS = 10.0
"""Seconds that staging waits for an earlier staging whose client is gone."""
OVERTAKEN_SECONDS = 60.0
"""Seconds that `restore` retries while newer versions are committed faster than it reads them."""


class _Place(NamedTuple):
    """Location of a parameter that a trainer may send: a tensor of the model, or a slice of it."""

    key: str
    """Name of the tensor."""
    part: HubSlice
    """Slice of that tensor."""

    @property
    def where(self) -> tuple[object, ...]:
        """Key of the location, equal for all names of a tied parameter."""
        return (self.key, *self.part[1:])


class _Plan(NamedTuple):
    """Target tensors of a version to be staged."""

    targets: dict[str, torch.Tensor]
    """Target of each sent parameter, by name."""
    first_names: dict[tuple[object, ...], str]
    """First name sent for each location. Tied tensors may be sent under several names."""
    spare: dict[str, torch.Tensor]
    """Whole staging tensors, by the name of the served tensor."""
    derived: dict[str, torch.Tensor]
    """Target of each parameter derived from the base weights, with or without an adapter, by name."""


class ServedWeights:
    """Parameters of a model by name, the staged next version, and the served version.

    Trainers send parameters under the names of the model's checkpoint on the hub, which stores each MoE expert
    separately, or under the names of transformers.

    There are two sets of buffers. Staging fills the set that is not served, and a commit exchanges the sets. After the
    first update no memory is allocated. `stage` may run during generation; `commit` only between two forward passes.

    Args:
        model: the served model.
        directory: directory in which updates are published. Empty: the server accepts no updates.
        holder: name of the server.
        version: version of the model's weights.
        base: directory from which the model was loaded. Adapters are added to its weights.
    """

    def __init__(self, model: torch.nn.Module, directory: str, holder: str, version: int, base: str = "") -> None:
        self.version = version
        self.holder = holder
        self._directory = Path(directory).resolve() if directory else None
        self._live: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._device = next(iter(self._live.values())).device
        first_name: dict[int, str] = {}
        # tied parameters are one tensor under several names; the first name identifies it
        self._canonical = {name: first_name.setdefault(id(tensor), name) for name, tensor in self._live.items()}
        # trainers must send parameters; a buffer that is not sent keeps its loaded value
        self._required = {key for key in first_name.values() if isinstance(self._live[key], torch.nn.Parameter)}
        self.places = {
            part.name: _Place(self._canonical[name], part)
            for name, parts in hub_slices(model, self._live.items()).items()
            for part in parts
        }
        """Location of each parameter name that a trainer may send."""
        self._receipt_names = set(self.places)  # names in the receipt of the served tensors
        for name, tensor in self._live.items():
            whole = HubSlice(name, tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), 0)
            self.places.setdefault(name, _Place(self._canonical[name], whole))
        self._base = Path(base) if base else None
        self._base_weights: adapters.BaseWeights | None = None
        self._as_loaded = set(first_name.values())
        """Names of tensors that are served with their values from the base directory."""
        self._adapter: dict[str, tuple[dict[str, int], int]] = {}
        """For each adapted weight: the checksums of its adapter matrices, and the checksum of the merged weight."""
        self._after_commit = self._as_loaded, self._adapter
        self._spare: dict[str, torch.Tensor] = {}
        self.staged_version: int | None = None
        """Version that waits for its commit; None if no version is staged."""
        self._spare_version: int | None = None
        self._receiver = WeightReceiver()
        self._staging = threading.Lock()
        self._attempt: object = None
        """Identity of the current staging; an earlier one may still be stuck."""

    def stage(self, meta: WeightUpdateMeta, seconds: float = STAGE_SECONDS) -> WeightReceipt:
        """Copy a version next to the served one.

        Args:
            seconds: time limit after which staging is abandoned.

        Returns:
            Checksums of the staged tensors under every name that was sent. The tensors become the live ones at
            `commit`.

        Raises:
            WeightUpdateError: a path is outside the weights directory, parameters are unknown or missing, shapes or
                dtypes are wrong, values are not finite, or the time limit passed.
        """
        self._attempt = attempt = object()
        if self._staging.acquire(timeout=min(ABANDONED_SECONDS, seconds)):
            self._staging.release()
        else:
            self._abandon()
        try:
            return run_in_thread(lambda: self._stage(meta, attempt)).result(seconds)
        except TimeoutError:
            self._attempt = None
            self._abandon()
            raise WeightUpdateError(
                f"route {meta.route}, version {meta.version}: not received within {seconds:g} s. "
                "Check that the trainer is running."
            ) from None

    def _abandon(self) -> None:
        """Detach the current staging: it keeps the buffers that it may still write to, and its result is ignored."""
        self._spare, self._spare_version, self.staged_version = {}, None, None
        self._staging, self._receiver = threading.Lock(), WeightReceiver()

    def _stage(self, meta: WeightUpdateMeta, attempt: object) -> WeightReceipt:
        receiver = self._receiver
        with self._staging:  # an abandoned request may still write to the spare buffers
            try:
                plan = self._plan(meta)
            except WeightUpdateError as error:
                receiver.reject(meta, str(error))
                raise
            self.staged_version = self._spare_version = None
            try:
                sums = receiver.receive(meta, plan.targets)
                applied = self._derive(meta.adapter, plan, sums)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                raise WeightUpdateError(
                    f"route {meta.route}, version {meta.version}: cannot be read: {error}"
                ) from error
            if self._attempt is not attempt:
                raise WeightUpdateError(
                    f"version {meta.version}: staging was abandoned; it timed out or a later request replaced it."
                )
            self._spare, self.staged_version = plan.spare, meta.version
            sent = {name: self.places[name] for name in sums if name in self.places}
            self._receipt_names.update(sent)
            changed = {self.places[name].key for name in (*sent, *applied)}
            self._after_commit = (self._as_loaded | {self.places[name].key for name in plan.derived}) - changed, applied
            receipt = sums | {name: sums[plan.first_names[place.where]] for name, place in sent.items()}
            return WeightReceipt(self.holder, meta.version, receipt)

    def _derive(
        self, adapter: AdapterSpec | None, plan: _Plan, sums: dict[str, int]
    ) -> dict[str, tuple[dict[str, int], int]]:
        """Fill the tensors derived from the base weights, and return the next value of `_adapter`."""
        applied = dict[str, tuple[dict[str, int], int]]()
        if adapter is None:
            return applied
        base = self._load_base()
        for name, target in plan.derived.items():
            weight, scale = base[name].to(target.device), adapter.scales.get(name)
            if scale is None:
                target.copy_(weight)
                continue
            matrices = adapter.matrices(name)
            a, b = (plan.targets[each] for each in matrices)
            merged = copy_summed(target, adapters.merged(weight, a, b, scale))
            if not merged.finite:
                raise ValueError(f"weight {name!r} is not finite with its adapter")
            applied[name] = {each: sums[each] for each in matrices}, merged.value
        return applied

    def _load_base(self) -> adapters.BaseWeights:
        if self._base is None:
            raise WeightUpdateError(
                "the server does not know its base weights, so it cannot add an adapter; set publish.adapter=never."
            )
        if self._base_weights is None:
            self._base_weights = adapters.BaseWeights(self._base)
        return self._base_weights

    def receipt(self) -> WeightReceipt:
        """Return checksums of the live tensors under all their names. Call between two forward passes.

        The checksums of an adapter's matrices are included if the live weight still contains them.
        """
        places = {name: self.places[name] for name in self._receipt_names}
        sums = {
            place.where: checksum(place.part.slice_of(self._live[place.key].contiguous()).contiguous())
            for place in {place.where: place for place in places.values()}.values()
        }
        checksums = {name: sums[place.where] for name, place in places.items()}
        for name, (matrices, value) in self._adapter.items():
            checksums |= matrices if sums[self.places[name].where] == value else {}
        return WeightReceipt(self.holder, self.version, checksums)

    def commit(self, version: int) -> None:
        """Serve the staged tensors.

        A repeated commit of the served version does nothing, so that a client may retry.

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
        self._as_loaded, self._adapter = self._after_commit
        self.staged_version, self._spare_version, self.version = None, self.version, version

    def _exchange(self) -> None:
        for key, tensor in self._spare.items():
            # Assign `.data` to keep the parameter object, which tied names and compiled graphs reference.
            self._spare[key], self._live[key].data = self._live[key].data, tensor

    @contextmanager
    def before(self) -> Iterator[None]:
        """Compute with the weights served before the last commit, within a `with` block.

        Use it between two forward passes and while nothing is staged.

        Raises:
            WeightUpdateError: the earlier weights are gone.
        """
        if self._spare_version is None:
            raise WeightUpdateError(
                "the server has no earlier weights: staging overwrote them, or nothing was committed yet."
            )
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _plan(self, meta: WeightUpdateMeta) -> _Plan:
        """Return the targets of a version, or reject it before any data is read."""
        self._check_location(meta)
        plan, covered, adapter = _Plan({}, {}, {}, {}), Counter[str](), meta.adapter
        matrices = {} if adapter is None else {each for name in adapter.scales for each in adapter.matrices(name)}
        for spec in meta.params:
            if spec.name in matrices:
                plan.targets[spec.name] = torch.empty(spec.shape, dtype=dtype_of(spec), device=self._device)
                continue
            place = self._check(meta.version, spec.name, spec.shape, getattr(torch, spec.dtype, spec.dtype))
            target = place.part.slice_of(self._staging_tensor(place.key, plan.spare))
            if plan.first_names.setdefault(place.where, spec.name) == spec.name:
                plan.targets[spec.name] = target
                covered[place.key] += target.numel()
            else:
                plan.targets[spec.name] = torch.empty_like(target)
        if adapter is not None:
            self._plan_base(meta.version, adapter, plan, covered)
        missing = sorted(key for key in self._required if covered[key] < self._live[key].numel())
        if missing:
            raise WeightUpdateError(
                f"version {meta.version}: {len(missing)} parameters were not sent, the first {missing[:3]}. "
                "Send every parameter of the served model."
            )
        return plan

    def _plan_base(self, version: int, adapter: AdapterSpec, plan: _Plan, covered: Counter[str]) -> None:
        """Add the parameters derived from the base weights to the plan.

        These are the adapted weights, and weights whose served or staging tensor differs from the base.
        """
        base = self._load_base()
        base.check(adapter)
        lacking = sorted(each for name in adapter.scales for each in adapter.matrices(name) if each not in plan.targets)
        if lacking or adapter.scales.keys() - adapter.base.keys():
            raise WeightUpdateError(f"version {version}: the adapter is incomplete; it lacks {lacking[:3]}.")
        places = {}
        for name in adapter.base:
            dtype = getattr(torch, adapter.dtype, adapter.dtype) if name in adapter.scales else None
            places[name] = self._check(version, name, tuple(base[name].shape), dtype)
        changed = plan.spare.keys() | {places[name].key for name in adapter.scales}
        for name, place in places.items():
            if plan.first_names.setdefault(place.where, name) == name:
                covered[place.key] += torch.Size(place.part.shape).numel()
                if place.key in changed or place.key not in self._as_loaded:
                    plan.derived[name] = place.part.slice_of(self._staging_tensor(place.key, plan.spare))

    def _staging_tensor(self, key: str, spare: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the staging tensor for a served tensor. Reuse the tensor of the previous version if it exists."""
        if key not in spare:
            previous, live = self._spare.get(key), self._live[key]
            layout = torch.contiguous_format
            spare[key] = (
                torch.empty_like(live, memory_format=layout, requires_grad=False) if previous is None else previous
            )
        return spare[key]

    def _check_location(self, meta: WeightUpdateMeta) -> None:
        if self._directory is None:
            raise WeightUpdateError("the server takes no weight updates; start it with --weights-dir.")
        for part in meta.parts if meta.route in STORED_ROUTES else ():
            file = Path(part.location, FILE if meta.route == "disk" else "").resolve()  # links are followed
            if not file.is_relative_to(self._directory):
                raise WeightUpdateError(f"{part.location}: outside the server's weights directory {self._directory}.")

    def _check(self, version: int, name: str, shape: tuple[int, ...], dtype: object | None) -> _Place:
        """Return the location of a parameter after checking its shape and dtype; `dtype=None` accepts any dtype."""
        place = self.places.get(name)
        if place is None:
            raise WeightUpdateError(f"version {version}: the model has no parameter {name!r}.")
        expected, served = place.part.shape, self._live[place.key].dtype
        if tuple(shape) != expected or dtype not in (served, None):
            raise WeightUpdateError(
                f"version {version}, parameter {name!r}: expected {served} {list(expected)}, "
                f"found {dtype} {list(shape)}."
            )
        return place


def restore(weights: ServedWeights, directory: str) -> None:
    """Stage and commit the version in the commit record of `directory`, if there is one.

    Call it before the decode thread runs. Trainers overwrite the version before the last one. If a version is
    overwritten while it is read, the record has changed, and `restore` tries again. If the record is unchanged but the
    weights differ from it, that is an error.

    Raises:
        WeightUpdateError: the version in the last record cannot be read, or differs from the committed version. The
            message then names the parameter.
    """
    deadline = time.monotonic() + OVERTAKEN_SECONDS
    record = read_committed(directory) if directory else None
    while record is not None:
        if not record.readable:
            logger.info(
                "not restoring version %d: route %s stores no weights that a restarted server could read",
                record.version,
                record.meta.route,
            )
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
