"""Staging of weight updates in vLLM and SGLang servers: fetch into host memory, check, and compute checksums.

The other files of this directory import it inside the servers; it has the requirements of `rl_stored`.
`rl_contracts.weights` has the sending end of each route.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_adapters, rl_broadcast, rl_stored
    from rl_inference.backends.plugins.rl_guard import RejectedError
else:
    import rl_adapters
    import rl_broadcast
    import rl_stored
    from rl_guard import RejectedError

WEIGHTS_DIR = "RL_WEIGHTS_DIR"
"""Environment variable with the directory of published updates; empty if the server accepts none."""
ROUTES = (*rl_stored.STORED_ROUTES, "broadcast", "ipc")


class State:
    """State of a server that persists between updates."""

    def __init__(self) -> None:
        self.receivers: dict[int, rl_broadcast.Receiver] = {}
        self.checked_base: dict[str, str] = {}
        """Prefix checksums for which the checkpoint was last checked, by parameter."""
        self.gpu_memory: dict[str, Any] = {}
        """Opened GPU memory of the trainer, by handle."""
        self.attempt: Attempt = Attempt({"route": "", "version": -1, "parts": []}, self)
        self.loaded: dict[str, str] = {}
        """Checksums of the last loaded version; empty before the first load."""

    def reset(self) -> None:
        """Abandon the current attempt with its receivers."""
        self.attempt, self.receivers = Attempt({"route": "", "version": -1, "parts": []}, self), {}


class Attempt:
    """Attempt to stage one version in host memory.

    Args:
        meta: `rl_contracts.data.WeightUpdateMeta` as JSON. If `needs_area`, it also has `area`, a directory that all
            ranks of the server can read.
        state: the server's state, with connections that the attempt reuses.
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

    def status(self) -> dict[str, Any]:
        """Return as JSON whether the attempt is done, its error, and its checksums when it is done.

        `checksums` covers the received tensors, `shared` the tensors that the other ranks open.
        """
        sums = (self.sums, self.shared) if self.done else ({}, {})
        return {"done": self.done, "error": self.error, "checksums": dict(sums[0]), "shared": dict(sums[1])}

    @property
    def area(self) -> str | None:
        """Directory of the staged tensors in shared memory, or None if they are in the trainer's files."""
        return None if self.meta["route"] in rl_stored.STORED_ROUTES else str(self.meta["area"])

    def share(self, checksums: dict[str, str]) -> None:
        """Open the tensors that rank 0 fetched, and compare their checksums. Runs in a thread."""
        try:
            if self.meta.get("adapter"):
                self.meta = rl_adapters.merged_meta(self.meta, self.checkpoint)
            self.tensors = rl_stored.open_parts(self.meta, self.area)
            for name, value in checksums.items():
                if name not in self.tensors or str(rl_stored.checksum(self.tensors[name])) != value:
                    raise RejectedError(f"parameter {name!r}: this rank reads other weights than rank 0 fetched.")
            self.done = True
        except Exception as error:  # noqa: BLE001 - reported by the thread's owner
            self._fail(error)

    def run(self) -> None:
        """Fetch the version and compute its checksums. Runs in a thread."""
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
        except Exception as error:  # noqa: BLE001 - reported by the thread's owner
            self._fail(error)

    def _sums(self, tensors: dict[str, Any]) -> dict[str, str]:
        """Return the checksums as text, because a JSON number does not represent 64 bits reliably.

        Raises:
            RejectedError: a parameter is not finite; the message names the first one.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise RejectedError(
                    f"version {self.version}: expected finite numbers, found nan or infinity in {name!r}. The "
                    "trainer's step produced them; lower the learning rate, or check its gradients."
                )
        return {name: str(rl_stored.checksum(tensor)) for name, tensor in tensors.items()}

    def _merge(self) -> None:
        """Write the merged weights and the other sent parameters to the staging area.

        All remaining parameters are read from the checkpoint.
        """
        meta, base = rl_adapters.merged_meta(self.meta, self.checkpoint), rl_stored.BaseWeights(self.checkpoint)
        sent = self.tensors
        [merged] = rl_stored.make_files(meta, meta["area"])
        for name, tensor in merged.items():
            if name in self.meta["adapter"]["scales"]:
                a, b = (sent[matrix] for matrix in rl_adapters.matrix_names(name))
                tensor.copy_(rl_adapters.merged(base[name], a, b, self.meta["adapter"]["scales"][name]))
            else:
                tensor.copy_(sent[name])
        self.shared, self.meta = self._sums(merged), meta
        self.tensors = rl_stored.open_parts(meta, self.area)

    def _copy_from_gpu(self) -> None:
        """Copy the weights from the trainer's GPU memory to host memory."""
        parts = rl_stored.make_files(self.meta, str(self.area))
        previous, self._state.gpu_memory = self._state.gpu_memory, {}
        for part, targets in zip(self.meta["parts"], parts, strict=True):
            location = part["location"]
            # a handle stays open, because the trainer's process counts its users
            memory = self._state.gpu_memory[location] = (
                previous[location] if location in previous else rl_stored.open_gpu_memory(location)
            )
            for name, start, size in rl_stored.offsets(part)[0]:
                target = targets[name]
                target.copy_(memory[start : start + size].view(target.dtype).view(target.shape))
        self.tensors = {name: tensor for part in parts for name, tensor in part.items()}

    def _fail(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, RejectedError) else f"cannot be read: {error}"
        self.error = f"route {self.meta['route']}, version {self.version}: {reason}"

    def _check(self) -> None:
        """Reject a version that the server could not load, before anything changes.

        Raises:
            RejectedError: an unknown route, a location outside of the weights directory, or unknown, missing or
                reshaped parameters.
        """
        directory, route = os.environ.get(WEIGHTS_DIR, ""), self.meta["route"]
        if not directory:
            raise RejectedError(
                f"this server accepts no weight updates; start it with {WEIGHTS_DIR} set to the directory of updates."
            )
        if route not in ROUTES:
            raise RejectedError(f"weight route: expected one of {', '.join(ROUTES)}, found {route!r}.")
        for part in self.meta["parts"] if route in rl_stored.STORED_ROUTES else ():
            file = Path(part["location"], "model.safetensors" if route == "disk" else "")
            path, root = file.resolve(), Path(directory).resolve()  # symbolic links are followed
            if root != path and root not in path.parents:
                raise RejectedError(f"{part['location']}: outside of the server's weights directory {root}.")
        sent = {spec["name"]: list(spec["shape"]) for part in self.meta["parts"] for spec in part["params"]}
        shapes, adapter = rl_stored.checkpoint_shapes(self.checkpoint), self.meta.get("adapter")
        if not (shapes or adapter):  # no safetensors files to compare with: the server reports its own load errors
            return
        try:
            if adapter:
                self._check_base(adapter, sent)
                matrices = {matrix for name in adapter["scales"] for matrix in rl_adapters.matrix_names(name)}
                sent = {n: shape for n, shape in sent.items() if n not in matrices} | {
                    n: shapes[n] for n in adapter["base"]
                }
            for name, shape in sent.items():
                if name not in shapes and name != "lm_head.weight":
                    raise RejectedError(f"the model has no parameter {name!r}.")
                if name in shapes and shapes[name] != shape:
                    raise RejectedError(f"parameter {name!r}: expected shape {shapes[name]}, found {shape}.")
            missing = sorted(set(shapes) - set(sent) - {"lm_head.weight"})
            if missing:
                raise RejectedError(
                    f"{len(missing)} parameters were not sent, the first {missing[:3]}. Send every parameter of the "
                    "served model."
                )
        except RejectedError as error:
            if route == "broadcast" and self.meta["parts"]:
                self._receiver(0).reject(self.meta["parts"][0], str(error))
            raise

    def _check_base(self, adapter: dict[str, Any], sent: dict[str, list[int]]) -> None:
        """Check that all matrices were sent, and that the checkpoint has the base weights that the trainer adapts."""
        for name in adapter["scales"]:
            if missing := [matrix for matrix in rl_adapters.matrix_names(name) if matrix not in sent]:
                raise RejectedError(f"the adapter is incomplete: {missing[0]!r} was not sent.")
        if self._state.checked_base == adapter["base"]:
            return
        base = rl_stored.BaseWeights(self.checkpoint)
        for name, expected in {**dict.fromkeys(adapter["scales"], ""), **adapter["base"]}.items():
            if rl_adapters.prefix_checksum(base[name]) != expected:
                raise RejectedError(
                    f"{self.checkpoint}: parameter {name!r} differs from the trainer's base model. Start the servers "
                    "with that model, or set publish.adapter=never to send full weights."
                )
        self._state.checked_base = adapter["base"]

    def _receive(self) -> None:
        """Receive the parts of all sending trainer ranks in parallel."""
        parts = rl_stored.make_files(self.meta, str(self.area))
        threads, errors = [], []

        def receive_part(index: int, part: dict[str, Any]) -> None:
            try:
                self._receiver(index).receive(part, parts[index], self.device)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        for index, part in enumerate(self.meta["parts"]):
            threads.append(threading.Thread(target=receive_part, args=(index, part), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if errors:
            raise RejectedError(str(errors[0]))
        self.tensors = {name: tensor for part in parts for name, tensor in part.items()}

    def _receiver(self, index: int) -> rl_broadcast.Receiver:
        return self._state.receivers.setdefault(index, rl_broadcast.Receiver())


def needs_area(meta: dict[str, Any]) -> bool:
    """Return whether an update needs a staging area, because the server's ranks cannot load the trainer's files."""
    return meta["route"] not in rl_stored.STORED_ROUTES or bool(meta.get("adapter"))
