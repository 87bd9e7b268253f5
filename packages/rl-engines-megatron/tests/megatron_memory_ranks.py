"""On each rank: the memory that publishing takes on top of what the rank holds, once as it is, and once with the fault
that a rank collects all of its parameters first; and what an export takes until it
is written.

Arguments: a model, the layout as JSON, a directory for weights, where figures go.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.weights import open_sender
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig


def status(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def collected(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """The fault."""
    yield from list(engine.full_parameters())


def main(model: str, layout: dict, weights: str, out: Path) -> None:
    engine = MegatronEngine(MegatronEngineConfig(), ParallelStrategy(**layout))
    engine.initialize(FinetuneSpec(model, 1, optimizer=None, device="cpu"))
    exported, held = out / "exported", status("VmRSS")
    write = engine.snapshot(SaveLoadMeta(str(exported)))
    assert write is not None
    export = status("VmRSS") - held
    write()
    del write
    engine.save(SaveLoadMeta(str(out / "saved")))
    sender, specs = open_sender("shm", weights, engine.parallel.rank), engine.param_specs()

    def publish(version: int, parameters: Iterator[tuple[str, Tensor]]) -> None:
        sender.begin(version, specs)
        sender.send(parameters)

    def extra(version: int, parameters: Iterator[tuple[str, Tensor]]) -> int:
        """Bytes; the memory of the route is resident since earlier versions, and what was freed is given back."""
        ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        publish(version, parameters)
        return status("VmHWM") - before

    for version in (1, 2):
        publish(version, engine.full_parameters())
    found = {"streamed": extra(3, engine.full_parameters()), "collected": extra(4, collected(engine))}
    found |= {"export": export}
    (out / f"{engine.parallel.rank}.json").write_text(json.dumps(found))
    sender.close()
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
