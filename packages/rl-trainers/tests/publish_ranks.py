"""One of two ranks that each yield half of the parameters, as pipeline stages do: publishes over a route and writes
what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import ParamSpec
from rl_contracts.errors import ReceiversLostError, RLError, WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import NullInferenceEngine
from rl_contracts.weights import checksum, read_committed
from rl_trainers import PublishConfig, WeightPublisher

SHAPES = {"first": (600, 700), "norm": (7,), "last": (900, 500), "bias": (3,), "scale": ()}
"""Some larger than what a broadcast sends at once, some not."""


class HalfEngine:
    """A parameter lies on the rank of its place modulo 2, and all of them take part in its gathering."""

    def __init__(self, parallel: ParallelContext, twice: bool = False) -> None:
        self.parallel, self.step, self.twice = parallel, 0, twice

    def value(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + len(name))
        return torch.randn(SHAPES[name], generator=generator)

    def is_mine(self, index: int) -> bool:
        return self.twice or index % 2 == self.parallel.rank

    def param_specs(self):
        return tuple(
            ParamSpec(name, shape, "bfloat16" if name == "bias" else "float32")
            for index, (name, shape) in enumerate(SHAPES.items())
            if self.is_mine(index)
        )

    def adapter(self):
        return None

    def full_parameters(self):
        for index, name in enumerate(SHAPES):
            value = self.value(name) if self.is_mine(index) else torch.zeros(SHAPES[name])
            dist.broadcast(value, src=index % 2, group=self.parallel.host_group)  # nobody goes on without the others
            if self.is_mine(index):
                yield name, value


def error_of(call) -> dict:
    began = time.monotonic()
    try:
        call()
    except RLError as error:
        return {"error": str(error), "cause": repr(error.__cause__), "seconds": time.monotonic() - began}
    return {"error": ""}


def main(route: str, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    parallel = ParallelContext(rank, 2, is_dp_leader=rank == 0, host_group=dist.group.WORLD)
    engine, server, seen = HalfEngine(parallel), NullInferenceEngine(), {}
    with LoopThread("test") as loop:
        config, directory = PublishConfig(route=route, timeout=20), str(out / "weights")
        # a rank that is no head has no client
        publisher = WeightPublisher(engine, server if parallel.is_dp_leader else None, loop, config, directory)

        def publish(version: int) -> None:
            engine.step = version
            publisher.publish(version)

        def expected() -> dict[str, int]:
            values = {name: engine.value(name) for name in SHAPES}
            return {n: checksum(v.bfloat16() if n == "bias" else v) for n, v in values.items()}

        for version in (1, 2):
            publish(version)
            seen[f"published {version}"] = publisher.receipt.checksums == expected()
        seen["specs"] = [spec.name for spec in engine.param_specs()]
        seen["record"] = [[spec.name for spec in part.params] for part in read_committed(directory).meta.parts]

        if rank == 0 and route == "broadcast":  # servers are lost once: both ranks send again
            lost = [ReceiversLostError("server 1 died")]
            server.faults.stage = lambda meta: lost.pop() if lost else None
        seen["lost"] = error_of(lambda: publish(3)) | {"right": publisher.receipt.checksums == expected()}

        if rank == 0:  # they refuse before anybody has met: nobody waits for them
            server.faults.stage = lambda meta: WeightUpdateError("the model has no parameter 'x'")
        seen["refused"] = error_of(lambda: publish(4))
        server.faults.stage = lambda meta: None

        send = publisher._sender.send
        if rank == 1:  # the other rank and the servers do not wait for this one

            def ends(tensors):
                yield next(tensors)
                raise OSError("no space left")

            publisher._sender.send = lambda tensors: send(ends(tensors))
        seen["failed on rank 1"] = error_of(lambda: publish(5))
        publisher._sender.send = send
        seen["version"] = server.version
        seen["afterwards"] = error_of(lambda: publish(6)) | {"right": publisher.receipt.checksums == expected()}
        seen["twice"] = error_of(
            lambda: WeightPublisher(HalfEngine(parallel, twice=True), server, loop, config, directory)
        )
        publisher.destroy()
        publisher.destroy()
    dist.destroy_process_group()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
