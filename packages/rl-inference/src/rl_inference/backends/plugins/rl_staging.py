"""Weights on their way to a server that is another program: fetched into its host's memory, checked and summed.

For files beside this one, which run inside servers; needs what `rl_stored` needs. `rl_contracts.weights` is the
trainer's end of each route.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_adapters, rl_broadcast, rl_stored
    from rl_inference.backends.plugins.rl_guard import RefusedError
else:
    import rl_adapters
    import rl_broadcast
    import rl_stored
    from rl_guard import RefusedError

WEIGHTS_DIR = "RL_WEIGHTS_DIR"
"""Directory in which updates are published; empty: the server takes none."""
ROUTES = (*rl_stored.STORED, "broadcast", "ipc")


class State:
    """What a server keeps between updates."""

    def __init__(self) -> None:
        self.receivers: dict[int, rl_broadcast.Receiver] = {}
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
        return None if self.meta["route"] in rl_stored.STORED else str(self.meta["area"])

    def share(self, checksums: dict[str, str]) -> None:
        """Open what another rank has fetched, and see that it is that; the thread's whole life."""
        try:
            if self.meta.get("adapter"):
                self.meta = rl_adapters.merged_meta(self.meta, self.checkpoint)
            self.tensors = rl_stored.open_parts(self.meta, self.place)
            for name, value in checksums.items():
                if name not in self.tensors or str(rl_stored.checksum(self.tensors[name])) != value:
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
                self.tensors = rl_stored.open_parts(self.meta, None)
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
        return {name: str(rl_stored.checksum(tensor)) for name, tensor in tensors.items()}

    def _merge(self) -> None:
        """Put what is made of adapters, and what else was sent, into the area; all else is the checkpoint's own."""
        meta, base = rl_adapters.merged_meta(self.meta, self.checkpoint), rl_stored.Base(self.checkpoint)
        sent = self.tensors
        [made] = rl_stored.make_files(meta, meta["area"])
        for name, tensor in made.items():
            if name in self.meta["adapter"]["scales"]:
                a, b = (sent[each] for each in rl_adapters.matrices(name))
                tensor.copy_(rl_adapters.merged(base[name], a, b, self.meta["adapter"]["scales"][name]))
            else:
                tensor.copy_(sent[name])
        self.shared, self.meta = self._sums(made), meta
        self.tensors = rl_stored.open_parts(meta, self.place)

    def _copy_from_gpu(self) -> None:
        """Copy what lies in the trainer's memory on this machine's GPU into the host's."""
        area = rl_stored.make_files(self.meta, str(self.place))
        kept, self._state.memory = self._state.memory, {}
        for part, targets in zip(self.meta["parts"], area, strict=True):
            where = part["location"]  # once opened it stays open: the trainer counts who has it
            memory = self._state.memory[where] = kept[where] if where in kept else rl_stored.open_gpu_memory(where)
            for name, start, size in rl_stored.places(part)[0]:
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
        for part in self.meta["parts"] if route in rl_stored.STORED else ():
            file = Path(part["location"], "model.safetensors" if route == "disk" else "")
            place, root = file.resolve(), Path(directory).resolve()  # links are followed
            if root != place and root not in place.parents:
                raise RefusedError(f"{part['location']}: outside of the server's weights directory {root}.")
        sent = {spec["name"]: list(spec["shape"]) for part in self.meta["parts"] for spec in part["params"]}
        known, adapter = rl_stored.checkpoint_shapes(self.checkpoint), self.meta.get("adapter")
        if not (known or adapter):  # not a directory of safetensors: the server itself will say what it cannot load
            return
        try:
            if adapter:
                self._check_base(adapter, sent)
                made = {each for name in adapter["scales"] for each in rl_adapters.matrices(name)}
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
            if lacking := [each for each in rl_adapters.matrices(name) if each not in sent]:
                raise RefusedError(f"the adapter is not whole; missing is {lacking[0]!r}.")
        if self._state.base == adapter["base"]:
            return
        base = rl_stored.Base(self.checkpoint)
        for name, begin in {**dict.fromkeys(adapter["scales"], ""), **adapter["base"]}.items():
            if rl_adapters.begins_with(base[name]) != begin:
                raise RefusedError(
                    f"{self.checkpoint}: parameter {name!r} is not the one that the trainer adapts. Start the servers "
                    "with the trainer's base model, or set publish.adapter=never, so that whole weights are sent."
                )
        self._state.base = adapter["base"]

    def _receive(self) -> None:
        """Take the seats that the trainer's ranks have for this server, at the same time."""
        area = rl_stored.make_files(self.meta, str(self.place))
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

    def _receiver(self, index: int) -> rl_broadcast.Receiver:
        return self._state.receivers.setdefault(index, rl_broadcast.Receiver())


def needs_area(meta: dict[str, Any]) -> bool:
    """Whether the ranks of a server need a directory for what does not lie where they can open it."""
    return meta["route"] not in rl_stored.STORED or bool(meta.get("adapter"))
