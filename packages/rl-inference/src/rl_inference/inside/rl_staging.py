"""Weights on their way to a server that is another program: fetched into its host's memory, checked and summed.

For files beside this one, which run inside servers; it imports nothing of ours and needs Python 3.10, torch, numpy and
safetensors. `rl_contracts.weights` is the trainer's end of each route.
"""

from __future__ import annotations

import base64
import json
import logging
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from rl_inference.inside.rl_guard import RefusedError
else:
    from rl_guard import RefusedError

logger = logging.getLogger("rl.staging")

WEIGHTS_DIR = "RL_WEIGHTS_DIR"
"""Directory in which updates are published; empty: the server takes none."""
AREAS = Path("/dev/shm")
STORED = ("shm", "disk")
"""Routes on which a version lies where the server's ranks can open it."""
ROUTES = (*STORED, "broadcast", "ipc")


def make_area(kind: str) -> str:
    """A new directory in the host's memory, where the ranks of a server find what came by broadcast. Removes those of
    processes that died before they could."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino  # containers may share the memory, but not the ids of processes
    common = f"rl-{kind}-{os.getuid()}-{namespace}-"
    for path in AREAS.glob(f"{common}*"):
        owner, began = f"{path.name.removeprefix(common)}-".split("-")[:2]
        if _began(owner) != began:
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{common}{os.getpid()}-{_began('self')}-", dir=AREAS)


def _began(process: str) -> str:
    """When a process began, in ticks since the machine did; empty: there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class State:
    """What a server keeps between updates."""

    def __init__(self) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.base: dict[str, str] = {}
        """What the checkpoint was found to begin with."""
        self.memory: dict[str, Any] = {}
        """The trainer's, on a GPU, by its handles."""
        self.attempt: Attempt = Attempt({"route": "", "version": -1, "parts": []}, self)
        self.loaded: dict[str, str] = {}

    def forget(self) -> None:
        """Give up the attempt, and what it still holds on to."""
        self.attempt, self.receivers = Attempt({"route": "", "version": -1, "parts": []}, self), {}


class Attempt:
    """One version on its way into the host's memory.

    Args:
        meta: `rl_contracts.data.WeightUpdateMeta` as JSON; where `needs_area`, also `area`, a directory that all ranks
            of the server can read.
        state: whose connections it may use again.
    """

    def __init__(self, meta: dict[str, Any], state: State) -> None:
        self.meta = meta
        self.version = int(meta["version"])
        self.checkpoint = Path()
        self.device = "cpu"
        self.done, self.error = False, ""
        self.tensors: dict[str, Any] = {}
        self.sums: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self._state = state

    def told(self) -> dict[str, Any]:
        """How far it is: whether it is there, or why it is not; checksums of what came, and of what the other ranks
        find."""
        sums = (self.sums, self.shared) if self.done else ({}, {})
        return {"done": self.done, "error": self.error, "checksums": dict(sums[0]), "shared": dict(sums[1])}

    @property
    def place(self) -> str | None:
        """Directory of what lies in the area; None: it lies where the trainer has put it."""
        return None if self.meta["route"] in STORED else str(self.meta["area"])

    def share(self, checksums: dict[str, str]) -> None:
        """Open what another rank has fetched, and see that it is that; the thread's whole life."""
        try:
            if self.meta.get("adapter"):
                self.meta = merged_meta(self.meta, self.checkpoint)
            self.tensors = open_parts(self.meta, self.place)
            for name, value in checksums.items():
                if name not in self.tensors or str(checksum(self.tensors[name])) != value:
                    raise RefusedError(f"parameter {name!r}: this rank finds other weights than were fetched.")
            self.done = True
        except Exception as error:  # noqa: BLE001 - the thread's owner tells its error
            self._fail(error)

    def run(self) -> None:
        """Fetch and sum; the thread's whole life."""
        try:
            self._check()
            if self.meta["route"] == "broadcast":
                self._receive()
            elif self.meta["route"] == "ipc":
                self._copy_from_gpu()
            else:
                self.tensors = open_parts(self.meta, None)
            self.sums = self.shared = self._sums(self.tensors)
            if self.meta.get("adapter"):
                self._merge()
            self.done = True
        except Exception as error:  # noqa: BLE001 - the thread's owner tells its error
            self._fail(error)

    def _sums(self, tensors: dict[str, Any]) -> dict[str, str]:
        """Checksums, as text: 64 bits are more than a JSON number safely carries.

        Raises:
            RefusedError: names what is not finite.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise RefusedError(
                    f"version {self.version}: expected finite numbers, found nan or infinity in {name!r}. The "
                    "trainer's step made them; lower the learning rate, or look at its gradients."
                )
        return {name: str(checksum(tensor)) for name, tensor in tensors.items()}

    def _merge(self) -> None:
        """Put what is made of adapters, and what else was sent, into the area; all else is the checkpoint's own."""
        meta, sent, base = merged_meta(self.meta, self.checkpoint), self.tensors, Base(self.checkpoint)
        [made] = _make_files(meta, meta["area"])
        for name, tensor in made.items():
            if name in self.meta["adapter"]["scales"]:
                a, b = (sent[each] for each in matrices(name))
                tensor.copy_(merged(base[name], a, b, self.meta["adapter"]["scales"][name]))
            else:
                tensor.copy_(sent[name])
        self.shared, self.meta = self._sums(made), meta
        self.tensors = open_parts(meta, self.place)

    def _copy_from_gpu(self) -> None:
        """Copy what lies in the trainer's memory on this machine's GPU into the host's."""
        area = _make_files(self.meta, str(self.place))
        kept, self._state.memory = self._state.memory, {}
        for part, targets in zip(self.meta["parts"], area, strict=True):
            where = part["location"]  # once opened it stays open: the trainer counts who has it
            memory = self._state.memory[where] = kept[where] if where in kept else open_gpu_memory(where)
            for name, start, size in _places(part)[0]:
                target = targets[name]
                target.copy_(memory[start : start + size].view(target.dtype).view(target.shape))
        self.tensors = {name: tensor for part in area for name, tensor in part.items()}

    def _fail(self, error: Exception) -> None:
        told = str(error) if isinstance(error, RefusedError) else f"cannot be read: {error}"
        self.error = f"route {self.meta['route']}, version {self.version}: {told}"

    def _check(self) -> None:
        """Refuse what the server could not load, before anything is touched.

        Raises:
            RefusedError: an unknown route or place, unknown or missing parameters, other shapes.
        """
        directory, route = os.environ.get(WEIGHTS_DIR, ""), self.meta["route"]
        if not directory:
            raise RefusedError(
                f"this server takes no weight updates; start it with {WEIGHTS_DIR} set to where they lie."
            )
        if route not in ROUTES:
            raise RefusedError(
                f"expected a route of {', '.join(ROUTES)}, found {route!r}; this server is given weights by those."
            )
        for part in self.meta["parts"] if route in STORED else ():
            place, root = Path(part["location"]).resolve(), Path(directory).resolve()
            if root != place and root not in place.parents:
                raise RefusedError(f"{part['location']}: outside of the server's weights directory {root}.")
        sent = {spec["name"]: list(spec["shape"]) for part in self.meta["parts"] for spec in part["params"]}
        known, adapter = checkpoint_shapes(self.checkpoint), self.meta.get("adapter")
        if not (known or adapter):  # not a directory of safetensors: the server itself will say what it cannot load
            return
        try:
            if adapter:
                self._check_base(adapter, sent)
                made = {each for name in adapter["scales"] for each in matrices(name)}
                sent = {n: shape for n, shape in sent.items() if n not in made} | {n: known[n] for n in adapter["base"]}
            for name, shape in sent.items():
                if name not in known and name != "lm_head.weight":
                    raise RefusedError(f"the model has no parameter {name!r}.")
                if name in known and known[name] != shape:
                    raise RefusedError(f"parameter {name!r}: expected {known[name]}, found {shape}.")
            missing = sorted(set(known) - set(sent) - {"lm_head.weight"})
            if missing:
                raise RefusedError(
                    f"{len(missing)} parameters were not sent, the first {missing[:3]}. Send every parameter of the "
                    "served model."
                )
        except RefusedError as error:
            if route == "broadcast" and self.meta["parts"]:
                self._receiver(0).refuse(self.meta["parts"][0], str(error))
            raise

    def _check_base(self, adapter: dict[str, Any], sent: dict[str, list[int]]) -> None:
        """See that the checkpoint is the base that the trainer adapts, and that what is to be added to it was sent."""
        for name in adapter["scales"]:
            if lacking := [each for each in matrices(name) if each not in sent]:
                raise RefusedError(f"the adapter is not whole; missing is {lacking[0]!r}.")
        if self._state.base == adapter["base"]:
            return
        base = Base(self.checkpoint)
        for name, begin in {**dict.fromkeys(adapter["scales"], ""), **adapter["base"]}.items():
            if begins_with(base[name]) != begin:
                raise RefusedError(
                    f"{self.checkpoint}: parameter {name!r} is not the one that the trainer adapts. Start the servers "
                    "with the trainer's base model, or set publish.adapter=never, so that whole weights are sent."
                )
        self._state.base = adapter["base"]

    def _receive(self) -> None:
        """Take the seats that the trainer's ranks have for this server, at the same time."""
        area = _make_files(self.meta, str(self.place))
        threads, errors = [], []

        def take(index: int, part: dict[str, Any]) -> None:
            try:
                self._receiver(index).receive(part, area[index], self.device)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        for index, part in enumerate(self.meta["parts"]):
            threads.append(threading.Thread(target=take, args=(index, part), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if errors:
            raise RefusedError(str(errors[0]))
        self.tensors = {name: tensor for part in area for name, tensor in part.items()}

    def _receiver(self, index: int) -> Receiver:
        return self._state.receivers.setdefault(index, Receiver())


def needs_area(meta: dict[str, Any]) -> bool:
    """Whether the ranks of a server need a directory for what does not lie where they can open it."""
    return meta["route"] not in STORED or bool(meta.get("adapter"))


# ---- adapters alone: `rl_contracts.weights.adapters` says the same

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
    return str(checksum(parameter.reshape(-1)[:SAMPLE].float()))


class Base:
    """A checkpoint's parameters by name, mapped: nothing is copied.

    Raises:
        RefusedError: they cannot be read, or there is none of a name.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        try:
            files = [safe_open(str(path), framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        except (OSError, SafetensorError) as error:
            raise RefusedError(f"{directory}: the base weights cannot be read: {error}") from error
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def __getitem__(self, name: str) -> Any:
        if name not in self.files:
            raise RefusedError(
                f"{self._directory}: expected the base weight {name!r} in its safetensors, found none of that name. "
                "Set publish.adapter=never, so that whole weights are sent."
            )
        return self.files[name].get_tensor(name)


def merged_meta(meta: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Where what is to be loaded lies once adapters are merged: in the area what differs from the checkpoint, the same
    for all ranks."""
    adapter, known = meta["adapter"], checkpoint_shapes(checkpoint)
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


def checkpoint_shapes(directory: Path) -> dict[str, list[int]]:
    """Names and shapes of a directory's safetensors; empty where there are none."""
    found: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")) if directory.is_dir() else ():
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: list(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}


def checksum(tensor: Any) -> int:
    """`rl_contracts.weights.checksum` of a contiguous tensor in the host's memory; `sum_i (u_i + C) (2 i + 1)` over its
    64-bit words, see there."""
    import numpy
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    total = 0
    for start in range(0, len(raw), 8 * 2**20):
        piece = raw[start : start + 8 * 2**20]
        words = numpy.frombuffer(piece.tobytes() + bytes(-len(piece) % 8), dtype=numpy.uint64)
        factors = numpy.arange(start // 8, start // 8 + len(words), dtype=numpy.uint64) * numpy.uint64(2)
        mixed = (words ^ (words >> numpy.uint64(31))) + numpy.uint64(0x1E3779B97F4A7C15)
        total += int((mixed * (factors + numpy.uint64(1))).sum(dtype=numpy.uint64))
    return total % 2**64


# ---- where versions lie: `rl_contracts.weights.stored` and `.layout` say how they are written


def _places(part: dict[str, Any]) -> tuple[list[tuple[str, int, int]], int]:
    """Name, first byte and bytes of each parameter of a part, each aligned to 64 bytes; and the bytes of the whole."""
    import torch

    places, end = [], 0
    for spec in part["params"]:
        size = getattr(torch, spec["dtype"]).itemsize * prod(spec["shape"])
        places.append((spec["name"], end, size))
        end += -(-size // 64) * 64
    return places, end


def _views(part: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Each parameter's place in a piece of memory, by name."""
    import torch

    places, _ = _places(part)
    raw = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
    return {
        name: raw[start : start + size].view(getattr(torch, spec["dtype"])).view(spec["shape"])
        for spec, (name, start, size) in zip(part["params"], places, strict=True)
    }


def open_parts(meta: dict[str, Any], area: str | None) -> dict[str, Any]:
    """All parameters of a version by name, as they lie in files; `area` is the directory of what was put there.

    Raises:
        RefusedError: a file is missing or too small.
    """
    found: dict[str, Any] = {}
    if "checkpoint" in meta:
        base = Base(Path(meta["checkpoint"]))
        found = {name: base[name] for name in checkpoint_shapes(Path(meta["checkpoint"]))}
    for index, part in enumerate(meta["parts"]):
        if meta["route"] == "disk":
            found |= _safetensors(part)
            continue
        path = Path(area) / str(index) if area else Path(part["location"])
        _, size = _places(part)
        try:
            with path.open("rb") as file:
                if (there := os.fstat(file.fileno()).st_size) < size:
                    raise RefusedError(f"{path}: expected {size} bytes of weights, found {there}.")
                memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        except OSError as error:
            raise RefusedError(f"{path}: the weights cannot be opened: {error}") from error
        found |= _views(part, memory)
    return found


def _safetensors(part: dict[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError, safe_open

    path = Path(part["location"]) / "model.safetensors"
    found = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for spec in part["params"]:
                tensor = file.get_tensor(spec["name"])
                if list(tensor.shape) != list(spec["shape"]) or tensor.dtype != getattr(torch, spec["dtype"]):
                    raise RefusedError(
                        f"{path}: parameter {spec['name']!r}: expected {spec['dtype']} {spec['shape']}, found "
                        f"{tensor.dtype} {list(tensor.shape)}."
                    )
                found[spec["name"]] = tensor
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"{path}: the weights cannot be read: {error}") from error
    return found


def _make_files(meta: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Memory for a version, which other ranks of this server can open; by part, each parameter by name."""
    area, found = Path(place), []
    area.mkdir(mode=0o700, parents=True, exist_ok=True)
    for index, part in enumerate(meta["parts"]):
        _, size = _places(part)
        path = area / str(index)
        path.unlink(missing_ok=True)  # whoever still reads the last version keeps it
        with path.open("w+b") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size) if size else b""
        found.append(_views(part, memory))
    return found


# ---- memory of a GPU: `rl_contracts.weights.ipc` is the trainer's end


def open_gpu_memory(location: str) -> Any:
    """The trainer's memory, uint8, by the handle that it told.

    Raises:
        RefusedError: this process does not see that GPU, or the handle cannot be opened.
    """
    import torch

    try:
        value = json.loads(location)
        count = torch.cuda.device_count()
        found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        if value["device"] not in found:
            raise RefusedError(
                f"route ipc: expected the trainer's GPU {value['device']}, but this server sees {found or 'none'}. Put "
                "both on one GPU, or use another route."
            )
        handle = [_unpacked(part) for part in value["handle"]]
        storage = torch.UntypedStorage._new_shared_cuda(found.index(value["device"]), *handle)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return memory.set_(storage, int(value["offset"]), (int(value["size"]),))  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(f"route ipc: the trainer's memory cannot be opened: {error!r}") from error


def _unpacked(value: Any) -> Any:
    return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value


# ---- the broadcast: `rl_contracts.weights.broadcast` and `.rendezvous` are the trainer's end, and say how it goes

PIECE = 8 * 2**20
LARGE = 2**20
AHEAD = 3


class Receiver:
    """A server's seat with one sender; keeps the connection and the group between updates."""

    def __init__(self) -> None:
        self._store: Any = None
        self._where: tuple[str, int] = ("", 0)
        self._group: Any = None
        self._name, self._seat = "", (0, 0)
        self._backend = "gloo"

    def receive(self, part: dict[str, Any], targets: dict[str, Any], device: str) -> None:
        """Meet the sender, and receive into the host's memory.

        Raises:
            RefusedError: says who did not join, or was lost.
        """
        seat = Seat(part["location"])
        try:
            self._meet(seat, device)
            self._take(part, targets, seat, device)
        except (RuntimeError, RefusedError) as error:
            self._group, self._store, self._name = None, None, ""
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(f"receiver {seat.rank} of {seat.world - 1}: {first_line(error)}") from error

    def refuse(self, part: dict[str, Any], reason: str) -> None:
        """Tell all who wait in the update that this server cannot take part, and why."""
        try:
            seat = Seat(part["location"])
            self._connect(seat)
            told = f"receiver {seat.rank} refuses: {reason}"
            self._store.compare_set(f"{seat.update}/off", "", json.dumps(told))
        except (RuntimeError, ValueError, RefusedError):
            logger.warning("the trainer could not be told that the update is refused: %s", reason)

    def _connect(self, seat: Seat) -> None:
        from torch.distributed import TCPStore

        if self._store is None or self._where != (seat.host, seat.port):
            self._group, self._name = None, ""
            try:
                wait = timedelta(seconds=seat.timeout)
                self._store = TCPStore(seat.host, seat.port, None, False, wait, wait_for_workers=False)
            except RuntimeError as error:
                raise RefusedError(
                    f"no trainer listens at {seat.host}:{seat.port}: {first_line(error)} It must listen on an address "
                    "that the servers can reach (publish.host)."
                ) from error
            self._where = (seat.host, seat.port)

    def _meet(self, seat: Seat, device: str) -> None:
        """Join, wait for the start, and form the group that is asked for, unless it is the last one."""
        from torch.distributed import PrefixStore

        self._connect(seat)
        held = self._name if self._seat == (seat.rank, seat.world) else ""
        seat.put(self._store, str(seat.rank), {"group": held, "device": _device_id(device)})
        seat.put(self._store, "world", seat.world)
        deadline = time.monotonic() + seat.timeout
        while (start := seat.get(self._store, "start")) is None:
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"receiver {seat.rank} joined, but within {seat.timeout:g} s the trainer at {seat.host}:"
                    f"{seat.port} did not start. Did all other servers join?"
                )
            time.sleep(0.002)
        if start["group"] != self._name or self._group is None:
            self._group = None
            self._backend = start["backend"]
            self._group = _process_group(self._backend, PrefixStore(start["group"], self._store), seat)
            self._name, self._seat = start["group"], (seat.rank, seat.world)

    def _take(self, part: dict[str, Any], targets: dict[str, Any], seat: Seat, device: str) -> None:
        """All pieces, in the order and of the sizes in which the sender cuts them."""
        import torch

        on, wait = device if self._backend == "nccl" else "cpu", timedelta(seconds=seat.timeout)
        under_way: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque()

        def land(most: int) -> None:
            while len(under_way) > most:
                work, _, landings = under_way.popleft()
                work.wait(wait)
                for target, piece in landings:
                    if target is not piece:
                        target.copy_(piece)

        for piece, landings in _pieces(part, targets, on):
            under_way.append((self._group.broadcast(piece.view(torch.uint8), 0), piece, landings))
            land(AHEAD)
        land(0)
        if on != "cpu":
            torch.cuda.synchronize(on)


def _pieces(part: dict[str, Any], targets: dict[str, Any], on: str) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """What is broadcast at once, and what goes where from it: large parameters in pieces of their own, small ones in
    buckets."""
    import torch

    landings: list[tuple[Any, Any]] = []
    bucket, used = torch.empty(PIECE, dtype=torch.uint8, device=on), 0
    for name, _, size in _places(part)[0]:
        flat = targets[name].view(-1)
        if size < LARGE:
            if used + size > PIECE:
                yield bucket[:used], landings
                bucket, used, landings = torch.empty(PIECE, dtype=torch.uint8, device=on), 0, []
            landings.append((flat, bucket[used : used + size].view(flat.dtype)))
            used += -(-size // 64) * 64
            continue
        for start in range(0, flat.numel(), PIECE // flat.itemsize):
            target = flat[start : start + PIECE // flat.itemsize]
            piece = target if on == "cpu" else torch.empty_like(target, device=on)
            yield piece, [(target, piece)]
    if used:
        yield bucket[:used], landings


class Seat:
    """A location `tcp://host:port/update/sender?timeout=...&rank=...&world=...`, taken apart.

    Raises:
        RefusedError: it is none, or gives no rank.
    """

    def __init__(self, location: str) -> None:
        try:
            url = urlsplit(location)
            query = {name: float(value) for name, value in parse_qsl(url.query)}
            self.host, self.port = str(url.hostname), int(url.port or 0)
            self.update, _, self.sender = url.path.strip("/").partition("/")
            self.timeout = query.get("timeout", 60.0)
            self.rank, self.world = int(query.get("rank", 0)), int(query.get("world", 0))
        except (ValueError, OverflowError) as error:
            raise RefusedError(f"expected a location tcp://host:port/update, found {location!r}: {error}.") from error
        if url.scheme != "tcp" or not 0 < self.rank < self.world:
            raise RefusedError(f"{location!r} gives this server no rank.")

    def put(self, store: Any, name: str, value: Any) -> None:
        """Say something to the sender."""
        store.set(f"{self.update}/{self.sender}/{name}", json.dumps(value))

    def get(self, store: Any, name: str) -> Any:
        """What the sender said; None: nothing yet.

        Raises:
            RefusedError: somebody called the update off.
        """
        off, key = f"{self.update}/off", f"{self.update}/{self.sender}/{name}"
        if store.check([off]):
            raise RefusedError(f"the update was called off: {json.loads(store.get(off))}")
        return json.loads(store.get(key)) if store.check([key]) else None


def _process_group(backend: str, store: Any, seat: Seat) -> Any:
    from torch import distributed

    kind: Any = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    options = kind.Options() if backend == "nccl" else kind._Options()
    options._timeout = timedelta(seconds=seat.timeout)
    if backend == "gloo":
        family = socket.AF_INET6 if ":" in seat.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((seat.host, seat.port))  # sends nothing
            options._devices = [kind.create_device(hostname=str(probe.getsockname()[0]))]
        options._threads = 2
    return kind(store, seat.rank, seat.world, options)


def _device_id(device: str) -> str:
    import torch

    kind = torch.device(device)
    return "cpu" if kind.type != "cuda" else str(torch.cuda.get_device_properties(kind).uuid)


def first_line(error: BaseException) -> str:
    """What libtorch says, without its trace."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
