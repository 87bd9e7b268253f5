"""Seconds to publish 512 MiB of weights over each route, compared with a copy of as many bytes.

    uv run python tests/benchmarks/weight_publish.py

The model is a random Qwen3 with few wide layers and 512 MiB of float32 parameters. An `FSDPEngine` and the publisher of
a run send it to an embedded server in a separate process. Each update sends and stages the weights, compares receipts
and commits. The reference is a copy of as many bytes by two torch threads between warm pages, measured before each
update. The first updates warm the pages of both sides and are not counted.

`ratio` is the median over updates. `undisturbed_ratio` is the fastest update divided by the fastest copy. It is fairer
on a busy machine, which interrupts a long operation more often than a short one. `paused` is the time without
generation during a commit, measured while the server generates.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

MIB = 2**20
REQUIRED = {"shm": 6.0, "broadcast": 15.0, "paused": 2.0}
"""Largest allowed multiples of a copy."""


def make_model(path: Path, mebibytes: int) -> Path:
    """Create a model with about `mebibytes` of float32 parameters, in few wide layers; return its path."""
    from rl_inference.testing import tiny_model

    hidden, layers = (1024, 4) if mebibytes >= 64 else (256, 1)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": hidden // 8}
    attention, elements = 4 * hidden * hidden, mebibytes * MIB // 4
    width = max((elements // layers - attention) // (3 * hidden), 64)
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": width, **heads}
    return tiny_model(path, "qwen3", **shape)


class Copy:
    """Copy of `size` bytes between warm pages."""

    def __init__(self, size: int) -> None:
        import torch

        self._source = torch.ones(size // 8, dtype=torch.int64)
        self._target = torch.zeros(size // 8, dtype=torch.int64)
        self()

    def __call__(self) -> float:
        """Copy once with two threads; return the seconds."""
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        self._target.copy_(self._source)  # wakes up the threads
        begin = time.perf_counter()
        self._target.copy_(self._source)
        seconds = time.perf_counter() - begin
        torch.set_num_threads(threads)
        return seconds


class Run:
    """Train engine, server and the publisher between them, over one route, on one device and in one dtype."""

    def __init__(
        self, stack: ExitStack, model: Path, folder: Path, route: str, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        from rl_contracts.data import FinetuneSpec
        from rl_contracts.runtime.aio import LoopThread
        from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
        from rl_inference import EmbeddedEngine
        from rl_inference.testing import ServerProcess
        from rl_trainers import PublishConfig, WeightPublisher

        memory = Path("/dev/shm")
        base = memory if memory.is_dir() and route != "disk" else folder
        weights = stack.enter_context(tempfile.TemporaryDirectory(dir=base, prefix="rl-weight-publish-"))
        options = {"weights_dir": weights, "max_sequences": 4, "device": device, "dtype": dtype}
        server = stack.enter_context(ServerProcess(model, folder / f"{route}.log", options=options))
        self.loop = stack.enter_context(LoopThread("benchmark"))
        self.client = EmbeddedEngine()
        self.client.initialize([server.address])
        stack.callback(lambda: self.loop.run(self.client.destroy(), 10))
        self.engine = FSDPEngine(FSDPEngineConfig())
        self.engine.initialize(FinetuneSpec(str(model), 1, optimizer=None, device=device, dtype=dtype))
        stack.callback(self.engine.destroy)
        config = PublishConfig(route=route)
        self.publisher = WeightPublisher(self.engine, self.client, self.loop, config, weights)
        stack.callback(self.publisher.destroy)
        self.version = 0

    @property
    def size(self) -> int:
        """Bytes of all parameters."""
        return sum(p.numel() * p.element_size() for _, p in self.engine._model.hugging_face_parameters())

    def publish(self) -> dict[str, float]:
        """Publish once; return the seconds in total, after sending, and with generation paused."""
        self.version += 1
        begin = time.perf_counter()
        times = self.publisher.publish(self.version)
        seconds = time.perf_counter() - begin
        assert self.client.version == self.version
        return {"total": seconds, "after_sending": times["time/stage"], "paused": times["time/paused"]}

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Keep the server generating, one completion after another."""
        from rl_contracts.config import GenerationConfig
        from rl_contracts.data import ModelRequest

        async def work() -> None:
            while True:
                await self.client.agenerate(
                    ModelRequest([5, 6, 7], GenerationConfig(max_new_tokens=64, ignore_eos=True))
                )

        async def wait_running() -> None:
            while (await self.client.stats())["running"] < 1:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

        future = self.loop.submit(work())
        self.loop.run(wait_running(), 60)
        try:
            yield
        finally:
            future.cancel()


def measure(model: Path, folder: Path, route: str, warmup: int, rounds: int) -> dict[str, Any]:
    """Measure one route; return medians of the times and of the ratios to a copy."""
    with ExitStack() as stack:
        run = Run(stack, model, folder, route)
        copy = Copy(run.size)
        for _ in range(warmup):
            run.publish()
        copies, updates = [], []
        for _ in range(rounds):
            copies.append(statistics.median(copy() for _ in range(3)))
            updates.append(run.publish())
        with run.generating():
            busy = [run.publish() for _ in range(rounds)]
        size = run.size
    ratios = [update["total"] / copy_seconds for update, copy_seconds in zip(updates, copies, strict=True)]
    copy_seconds = statistics.median(copies)
    result = {
        "mebibytes": round(size / MIB, 1),
        "copy_s": round(copy_seconds, 4),
        "total_s": round(statistics.median(update["total"] for update in updates), 4),
        "after_sending_s": round(statistics.median(update["after_sending"] for update in updates), 4),
        "ratio": round(statistics.median(ratios), 2),
        "undisturbed_ratio": round(min(update["total"] for update in updates) / min(copies), 2),
        "while_generating_s": round(statistics.median(update["total"] for update in busy), 4),
        "paused_s": round(statistics.median(update["paused"] for update in busy), 4),
    }
    result["paused_ratio"] = round(result["paused_s"] / copy_seconds, 3)
    print(
        f"{route:10s} {result['total_s']:.3f} s, {result['ratio']:.1f} copies of {copy_seconds:.3f} s (undisturbed "
        f"{result['undisturbed_ratio']:.1f}); paused "
        f"{result['paused_s'] * 1e3:.1f} ms; while generating {result['while_generating_s']:.3f} s "
        f"(load {os.getloadavg()[0]:.1f})",
        flush=True,
    )
    return result


def main() -> None:
    """Measure; print a line per route and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the parameters")
    parser.add_argument("--rounds", type=int, default=9, help="measured updates")
    parser.add_argument("--warmup", type=int, default=3, help="unmeasured updates before them")
    parser.add_argument(
        "--route", choices=["shm", "broadcast", "disk"], action="append", help="only this route; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small model, few updates, one route; only checks that it runs"
    )
    options = parser.parse_args()
    mebibytes, warmup, rounds = (8, 1, 2) if options.quick else (options.mebibytes, options.warmup, options.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model", mebibytes)
        routes = options.route or ["shm", "broadcast", "disk"][: 1 if options.quick else 3]
        results: dict[str, Any] = {route: measure(model, folder, route, warmup, rounds) for route in routes}
    print(json.dumps({**results, "required": REQUIRED}))


if __name__ == "__main__":
    main()
