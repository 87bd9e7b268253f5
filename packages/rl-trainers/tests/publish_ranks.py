"""Program of one of two ranks that each yield half of the parameters, as pipeline stages do.

It publishes over a route and writes its observations to a file.
"""

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
"""Shapes of the parameters, some larger than one chunk of a broadcast and some smaller."""


class HalfEngine:
    """Engine whose parameter i is yielded by rank i modulo 2, while all ranks take part in its gather.

    With `twice`, every rank yields every parameter.
    """

    def __init__(self, parallel: ParallelContext, twice: bool = False) -> None:
        self.parallel, self.step, self.twice = parallel, 0, twice

    def value(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + len(name))
        return torch.randn(SHAPES[name], generator=generator)

    def is_local(self, index: int) -> bool:
        return self.twice or index % 2 == self.parallel.rank

    def param_specs(self):
        return tuple(
            ParamSpec(name, shape, "bfloat16" if name == "bias" else "float32")
            for index, (name, shape) in enumerate(SHAPES.items())
            if self.is_local(index)
        )

    def adapter(self):
        return None

    def full_parameters(self):
        for index, name in enumerate(SHAPES):
            value = self.value(name) if self.is_local(index) else torch.zeros(SHAPES[name])
            dist.broadcast(value, src=index % 2, group=self.parallel.host_group)  # needs all ranks
            if self.is_local(index):
                yield name, value


def error_of(call) -> dict:
    start = time.monotonic()
    try:
        call()
    except RLError as error:
        return {"error": str(error), "cause": repr(error.__cause__), "seconds": time.monotonic() - start}
    return {"error": ""}


def main(route: str, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    parallel = ParallelContext(rank, 2, is_dp_leader=rank == 0, host_group=dist.group.WORLD)
    engine, server, seen = HalfEngine(parallel), NullInferenceEngine(), {}
    with LoopThread("test") as loop:
        config, directory = PublishConfig(route=route, timeout=20), str(out / "weights")
        # a rank that is not a data-parallel leader has no client
        publisher = WeightPublisher(engine, server if parallel.is_dp_leader else None, loop, config, directory)

        def publish(version: int) -> dict[str, float]:
            engine.step = version
            return publisher.publish(version)

        def expected() -> dict[str, int]:
            values = {name: engine.value(name) for name in SHAPES}
            return {n: checksum(v.bfloat16() if n == "bias" else v) for n, v in values.items()}

        for version in (1, 2):
            seen["times"] = publish(version)
            seen[f"published {version}"] = publisher.receipt.checksums == expected()
        seen["specs"] = [spec.name for spec in engine.param_specs()]
        seen["record"] = [[spec.name for spec in part.params] for part in read_committed(directory).meta.parts]

        if rank == 0 and route == "broadcast":  # servers are lost once: both ranks must send again
            errors = [ReceiversLostError("server 1 died")]
            server.faults.stage = lambda meta: errors.pop() if errors else None
        seen["receivers lost"] = error_of(lambda: publish(3)) | {"right": publisher.receipt.checksums == expected()}

        if rank == 0:  # the servers reject before the rendezvous: no rank may wait for them
            server.faults.stage = lambda meta: WeightUpdateError("the model has no parameter 'x'")
        seen["rejected"] = error_of(lambda: publish(4))
        server.faults.stage = lambda meta: None

        send = publisher._sender.send
        if rank == 1:  # the other rank and the servers must not wait for this one

            def fail_after_first(tensors):
                yield next(tensors)
                raise OSError("no space left")

            publisher._sender.send = lambda tensors: send(fail_after_first(tensors))
        seen["failed on rank 1"] = error_of(lambda: publish(5))
        publisher._sender.send = send
        seen["version"] = server.version
        seen["afterwards"] = error_of(lambda: publish(6)) | {"right": publisher.receipt.checksums == expected()}
        seen["duplicate parameters"] = error_of(
            lambda: WeightPublisher(HalfEngine(parallel, twice=True), server, loop, config, directory)
        )
        publisher.destroy()
        publisher.destroy()
    dist.destroy_process_group()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
