"""Measure the memory that publishing and exporting need beyond the memory of the rank. Runs on each rank.

Publishing runs once normally, and once with an injected fault: a rank collects all of its parameters first.

Arguments: a model, the layout as JSON, the route, a directory for weights, and the directory for the results.
"""

import ctypes
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.weights import open_sender
from rl_contracts.weights.rendezvous import Address
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig

SERVER = """
import json, sys, torch
from rl_contracts.data import WeightUpdateMeta
from rl_contracts.weights import WeightReceiver, seated
receiver, targets = WeightReceiver(), {}
for line in sys.stdin:
    meta = seated(WeightUpdateMeta.from_json(json.loads(line)), 1, 2)
    specs = [spec for part in meta.parts for spec in part.params]
    targets = targets or {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    receiver.receive(meta, targets)
    print(len(targets), flush=True)
"""
"""Program of a server that receives weights into host memory."""


def status(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def collected(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters after collecting them: the injected fault."""
    yield from list(engine.full_parameters())


def main(model: str, layout: dict, route: str, weights: str, out: Path) -> None:
    engine = MegatronEngine(MegatronEngineConfig(), ParallelStrategy(**layout))
    engine.initialize(FinetuneSpec(model, 1, optimizer=None, device="cpu"))
    exported, rss_before = out / "exported", status("VmRSS")
    write = engine.snapshot(SaveLoadMeta(str(exported)))
    assert write is not None
    export = status("VmRSS") - rss_before
    write()
    del write
    engine.save(SaveLoadMeta(str(out / "saved")))
    parallel, specs, server = engine.parallel, engine.param_specs(), None
    location = Address("127.0.0.1").location if route == "broadcast" else weights
    sender = open_sender(route, location, 0) if parallel.is_main else None
    location = parallel.broadcast_json("" if sender is None else sender.location)
    sender = sender or open_sender(route, location, parallel.rank)
    if parallel.is_main and route == "broadcast":
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True)

    def publish(version: int, parameters: Iterator[tuple[str, Tensor]]) -> None:
        metas = parallel.gather_json(sender.begin(version, specs).to_json())
        if server is not None:
            parts = [part for meta in metas for part in meta["parts"] if part["params"]]
            server.stdin.write(json.dumps(metas[0] | {"parts": parts}) + "\n")
            server.stdin.flush()
        if specs:
            sender.send(parameters)
        else:
            deque(parameters, maxlen=0)  # this rank must join the gathers of the other rank
        if server is not None:
            assert int(server.stdout.readline()) > 0

    def peak_increase(version: int, parameters: Iterator[tuple[str, Tensor]]) -> int:
        """Return the peak memory of publishing above the memory before it, in bytes.

        The route's memory is resident since earlier versions. Freed memory is returned to the system first.
        """
        ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        publish(version, parameters)
        return status("VmHWM") - before

    for version in (1, 2):
        publish(version, engine.full_parameters())
    results = {"streamed": peak_increase(3, engine.full_parameters()), "collected": peak_increase(4, collected(engine))}
    results |= {"export": export}
    (out / f"{engine.parallel.rank}.json").write_text(json.dumps(results))
    sender.close()
    if server is not None:
        server.stdin.close()
        assert server.wait(30) == 0
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
