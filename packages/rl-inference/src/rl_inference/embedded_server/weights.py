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
"""For which a version waits for one before whose client is gone."""
OVERTAKEN_SECONDS = 60.0
"""How long `restore` tries again while newer versions are committed faster than they are read."""


class _Place(NamedTuple):
    """What a name that a trainer may send stands for."""

    key: str
    """Name of the tensor that has it."""
    part: HubSlice
    """Which part of that tensor."""

    @property
    def where(self) -> tuple[object, ...]:
        """The same for two names of one place: tied parameters."""
        return (self.key, *self.part[1:])


class _Plan(NamedTuple):
    """Where a version is to go."""

    targets: dict[str, torch.Tensor]
    """Of each parameter that is sent, by name."""
    told: dict[tuple[object, ...], str]
    """Under which name each place comes first, because tied tensors may come under several."""
    spare: dict[str, torch.Tensor]
    """The whole tensors, beside the served ones."""
    made: dict[str, torch.Tensor]
    """Of each parameter that is made of the base weights, with an adapter or without, by name."""


class ServedWeights:
    """A model's parameters by name, the staged next version, and which version is served.

    Trainers send them by the names of the model's checkpoint on the hub, where experts lie one by one, or by those that
    transformers gives them.

    There are two sets of buffers. Staging fills the one that is not served, and a commit exchanges them, so
    that after the first update nothing is allocated. `stage` may run beside generation; `commit` only between
    two forward passes.

    Args:
        model: what is served.
        directory: in which updates are published; empty: none are taken.
        holder: the server's name.
        version: of the model's weights.
        base: directory that the model was loaded from, to whose weights adapters are added.
    """

    def __init__(self, model: torch.nn.Module, directory: str, holder: str, version: int, base: str = "") -> None:
        self.version = version
        self.holder = holder
        self._directory = Path(directory).resolve() if directory else None
        self._live: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._device = next(iter(self._live.values())).device
        first_name: dict[int, str] = {}
        # tied parameters are one tensor under several names: the first one stands for it
        self._canonical = {name: first_name.setdefault(id(tensor), name) for name, tensor in self._live.items()}
        # trainers send parameters; a buffer that is not sent stays as it was loaded
        self._required = {key for key in first_name.values() if isinstance(self._live[key], torch.nn.Parameter)}
        self.places = {
            part.name: _Place(self._canonical[name], part)
            for name, parts in hub_slices(model, self._live.items()).items()
            for part in parts
        }
        """What each name that a trainer may send stands for."""
        self._told = set(self.places)  # names under which receipts of the served tensors are given
        for name, tensor in self._live.items():
            whole = HubSlice(name, tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), 0)
            self.places.setdefault(name, _Place(self._canonical[name], whole))
        self._base = Path(base) if base else None
        self._base_weights: adapters.BaseWeights | None = None
        self._as_loaded = set(first_name.values())
        """Tensors that serve what the base directory has."""
        self._adapter: dict[str, tuple[dict[str, int], int]] = {}
        """Of each adapted weight: the checksums of its matrices, and of what was made with them."""
        self._after_commit = self._as_loaded, self._adapter
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
                plan = self._plan(meta)
            except WeightUpdateError as error:
                receiver.refuse(meta, str(error))
                raise
            self.staged_version = self._spare_version = None
            try:
                sums = receiver.receive(meta, plan.targets)
                applied = self._make(meta.adapter, plan, sums)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                raise WeightUpdateError(
                    f"route {meta.route}, version {meta.version}: cannot be read: {error}"
                ) from error
            if self._attempt is not attempt:
                raise WeightUpdateError(f"version {meta.version}: given up before it was there.")
            self._spare, self.staged_version = plan.spare, meta.version
            sent = {name: self.places[name] for name in sums if name in self.places}
            self._told.update(sent)
            changed = {self.places[name].key for name in (*sent, *applied)}
            self._after_commit = (self._as_loaded | {self.places[name].key for name in plan.made}) - changed, applied
            receipt = sums | {name: sums[plan.told[place.where]] for name, place in sent.items()}
            return WeightReceipt(self.holder, meta.version, receipt)

    def _make(
        self, adapter: AdapterSpec | None, plan: _Plan, sums: dict[str, int]
    ) -> dict[str, tuple[dict[str, int], int]]:
        """Fill what is made of the base weights; what `_adapter` is to be."""
        applied = dict[str, tuple[dict[str, int], int]]()
        if adapter is None:
            return applied
        base = self._known_base()
        for name, target in plan.made.items():
            weight, scale = base[name].to(target.device), adapter.scales.get(name)
            if scale is None:
                target.copy_(weight)
                continue
            matrices = adapter.matrices(name)
            a, b = (plan.targets[each] for each in matrices)
            found = copy_summed(target, adapters.merged(weight, a, b, scale))
            if not found.finite:
                raise ValueError(f"weight {name!r} is not finite with its adapter")
            applied[name] = {each: sums[each] for each in matrices}, found.value
        return applied

    def _known_base(self) -> adapters.BaseWeights:
        if self._base is None:
            raise WeightUpdateError("this server does not know its base weights; set publish.adapter=never.")
        if self._base_weights is None:
            self._base_weights = adapters.BaseWeights(self._base)
        return self._base_weights

    def receipt(self) -> WeightReceipt:
        """What is served now: checksums of the live tensors under every name that they have, and of an adapter's
        matrices where the weight still is what was made with them. Between two forward passes."""
        placed = {name: self.places[name] for name in self._told}
        sums = {
            place.where: checksum(place.part.slice_of(self._live[place.key].contiguous()).contiguous())
            for place in {place.where: place for place in placed.values()}.values()
        }
        found = {name: sums[place.where] for name, place in placed.items()}
        for name, (matrices, value) in self._adapter.items():
            found |= matrices if sums[self.places[name].where] == value else {}
        return WeightReceipt(self.holder, self.version, found)

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
        self._as_loaded, self._adapter = self._after_commit
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

    def _plan(self, meta: WeightUpdateMeta) -> _Plan:
        """Refuses a version before anything of it is read."""
        self._check_location(meta)
        plan, covered, adapter = _Plan({}, {}, {}, {}), Counter[str](), meta.adapter
        matrices = {} if adapter is None else {each for name in adapter.scales for each in adapter.matrices(name)}
        for spec in meta.params:
            if spec.name in matrices:
                plan.targets[spec.name] = torch.empty(spec.shape, dtype=dtype_of(spec), device=self._device)
                continue
            place = self._check(meta.version, spec.name, spec.shape, getattr(torch, spec.dtype, spec.dtype))
            target = place.part.slice_of(self._staging_tensor(place.key, plan.spare))
            if plan.told.setdefault(place.where, spec.name) == spec.name:
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
        """Add what is made of the base weights: what is adapted, and what does not serve them now."""
        base = self._known_base()
        base.check(adapter)
        lacking = sorted(each for name in adapter.scales for each in adapter.matrices(name) if each not in plan.targets)
        if lacking or adapter.scales.keys() - adapter.base.keys():
            raise WeightUpdateError(f"version {version}: the adapter is not whole; missing are {lacking[:3]}.")
        places = {}
        for name in adapter.base:
            dtype = getattr(torch, adapter.dtype, adapter.dtype) if name in adapter.scales else None
            places[name] = self._check(version, name, tuple(base[name].shape), dtype)
        changed = plan.spare.keys() | {places[name].key for name in adapter.scales}
        for name, place in places.items():
            if plan.told.setdefault(place.where, name) == name:
                covered[place.key] += torch.Size(place.part.shape).numel()
                if place.key in changed or place.key not in self._as_loaded:
                    plan.made[name] = place.part.slice_of(self._staging_tensor(place.key, plan.spare))

    def _staging_tensor(self, key: str, spare: dict[str, torch.Tensor]) -> torch.Tensor:
        """The tensor beside a served one; that of the last version but one, where there is one."""
        if key not in spare:
            kept, live = self._spare.get(key), self._live[key]
            fresh = torch.contiguous_format
            spare[key] = torch.empty_like(live, memory_format=fresh, requires_grad=False) if kept is None else kept
        return spare[key]

    def _check_location(self, meta: WeightUpdateMeta) -> None:
        if self._directory is None:
            raise WeightUpdateError("this server takes no weight updates; start it with --weights-dir.")
        for part in meta.parts if meta.route in STORED_ROUTES else ():
            file = Path(part.location, FILE if meta.route == "disk" else "").resolve()  # links are followed
            if not file.is_relative_to(self._directory):
                raise WeightUpdateError(f"{part.location}: outside the server's weights directory {self._directory}.")

    def _check(self, version: int, name: str, shape: tuple[int, ...], dtype: object | None) -> _Place:
        """Where a parameter goes; any dtype will do where it is None."""
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
