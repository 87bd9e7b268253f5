"""Tokens per second of the embedded server over HTTP, compared with `generate` of transformers and optionally vLLM.

    uv run python tests/benchmarks/embedded_server.py [--peer vllm PYTHON]

The model is a random float32 Qwen3 of 4 layers of width 128 on the CPU. Prompts are 32 random tokens, all different;
sampling is at temperature 1 without end tokens. The client `EmbeddedEngine` calls the embedded server and receives the
log-prob and version of every token. Each side may use all cores: as threads of one process, or for the embedded server
also as one server per core that share the slots. The sides run in turn, never at the same time. Two cases:

- `uniform`: 64 requests of 64 tokens; transformers generates them as one batch.
- `long_tail`: 512 requests of log-normal length (mean about 54, at most 256) over 64 decode slots; transformers
  generates them in consecutive batches of 64, each as long as its longest completion. Only requested tokens count.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embedded_server_peers import EmbeddedSide, Request, Side, embedded, transformers, vllm
from imposed_lengths import long_tail, uniform

from rl_inference.testing import reference_logprobs, reference_model, tiny_model

PROMPT_TOKENS = 32
VOCABULARY = 1024
REQUIRED = {"uniform": {"transformers": 1.0, "vllm": 1.5}, "long_tail": {"transformers": 4.0, "vllm": 1.5}}
"""Expected ratios of requested tokens per second on two cores."""
TOLERANCE = 2e-5
"""Largest accepted difference between the server's log-probs and a forward pass of transformers."""


def make_requests(lengths: list[int], seed: int) -> list[Request]:
    """Return one request per length, with random prompts without a common prefix."""
    draw = random.Random(seed)
    return [
        Request([draw.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)], tokens, seed=draw.getrandbits(62))
        for tokens in lengths
    ]


def make_cases(quick: bool) -> dict[str, list[int]]:
    """Return the completion lengths of each case."""
    if quick:
        return {"uniform": [8] * 8, "long_tail": [min(long_tail(i, 0), 16) for i in range(80)]}
    return {"uniform": [uniform(i, 0) for i in range(64)], "long_tail": [long_tail(i, 0) for i in range(512)]}


def fastest_layout(model: Path, scratch: Path, threads: int) -> tuple[int, int]:
    """Return the number of servers and the threads per server that generate fastest on this machine now.

    Candidates are one server with one thread, one server with a thread per core, and one server per core.

    Args:
        threads: if not 0, only layouts with this number of threads per server.
    """

    async def trial(side: EmbeddedSide) -> float:
        try:
            return min([await side.run(make_requests([64] * 64, seed=0)) for _ in range(3)])
        finally:
            await side.engine.destroy()

    cores = os.cpu_count() or 1
    layouts = {(1, 1), (1, cores), (cores, 1)}
    seconds = {}
    for layout in sorted(each for each in layouts if threads in (0, each[1])) or [(1, threads)]:
        with embedded(model, layout, scratch) as side:
            seconds[layout] = asyncio.run(trial(side))
    return min(seconds, key=lambda layout: seconds[layout])


async def largest_logprob_error(server: EmbeddedSide, model: Path, requests: list[Request]) -> float:
    """Return the largest log-prob error of 8 completions, generated together with all other requests."""
    reference = reference_model(model)
    await server.run(requests)
    largest = 0.0
    for request, response in list(zip(requests, server.responses, strict=True))[:8]:
        expected = reference_logprobs(reference, request.prompt, response.output_ids)
        largest = max(largest, *(abs(a - b) for a, b in zip(response.logprobs, expected, strict=True)))
    if largest > TOLERANCE:
        raise SystemExit(
            f"expected log-probs within {TOLERANCE:g} of those of transformers, found an error of {largest:.2e}"
        )
    return largest


async def measure(case: str, lengths: list[int], sides: list[Side], rounds: int) -> dict[str, Any]:
    """Run all sides in turn for `rounds` rounds; return median rates and the medians of the ratios per round."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    busy: list[float] = []
    for index in range(rounds):
        requests = make_requests(lengths, seed=1000 + index)
        for side in sides if index % 2 == 0 else sides[::-1]:
            seconds = await side.run(requests)
            rates[side.name].append(sum(lengths) / seconds)
            if isinstance(side, EmbeddedSide):
                busy.append(side.busy_fraction)
        line = "  ".join(f"{name} {values[-1]:7.0f}" for name, values in rates.items())
        print(f"{case:10s} tokens/s  {line}  (load {os.getloadavg()[0]:.1f})", flush=True)
    result: dict[str, Any] = {
        "requests": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "decode_thread_busy": round(statistics.median(busy), 3),
    }
    result["ratio"] = {
        name: round(statistics.median(a / b for a, b in zip(rates["embedded"], values, strict=True)), 3)
        for name, values in rates.items()
        if name != "embedded"
    }
    result["required"] = {name: REQUIRED[case][name] for name in result["ratio"]}
    return result


def main() -> None:
    """Measure; print a line per round and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs=2, metavar=("vllm", "PYTHON"), help="also measure vLLM with this interpreter")
    parser.add_argument("--rounds", type=int, default=5, help="runs per side and case")
    parser.add_argument("--servers", type=int, default=0, help="embedded servers that share 64 slots; 0: the fastest")
    parser.add_argument("--threads", type=int, default=0, help="threads per embedded server; 0: the fastest")
    parser.add_argument("--compile", action="store_true", help="embedded servers compile their forward pass")
    parser.add_argument("--peer-threads", type=int, default=0, help="threads of transformers; 0: the fastest")
    parser.add_argument("--case", choices=[*REQUIRED], help="only this case")
    parser.add_argument(
        "--quick", action="store_true", help="small model, few requests, no peer; only checks that it runs"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    if options.peer and options.peer[0] != "vllm":
        parser.error(f"--peer: expected `vllm PYTHON`, found {options.peer[0]!r}")
    layers, hidden = (1, 64) if options.quick else (4, 128)
    cases = {name: lengths for name, lengths in make_cases(options.quick).items() if options.case in (None, name)}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        scratch = Path(temporary)
        shape = {"num_hidden_layers": layers, "hidden_size": hidden, "head_dim": 32, "intermediate_size": 3 * hidden}
        heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
        limits = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
        model = tiny_model(scratch / "model", "qwen3", **shape, **heads, **limits)
        if options.servers or options.quick:
            layout = (options.servers or 1, options.threads or 1)
        else:
            layout = fastest_layout(model, scratch, options.threads)
        server = stack.enter_context(embedded(model, layout, scratch, options.compile, forked=options.quick))
        sides: list[Side] = [server]
        result: dict[str, Any] = {"benchmark": "embedded_server", "layers": layers, "hidden": hidden}
        result |= {"cores": os.cpu_count(), "servers": layout[0], "threads": layout[1], "compiled": options.compile}
        if not options.quick:
            peer = stack.enter_context(transformers(model))
            peer.threads = options.peer_threads or peer.threads
            if not options.peer_threads:
                asyncio.run(peer.choose_threads(make_requests([16] * 64, seed=0)))
            result["transformers_threads"] = peer.threads
            sides.append(peer)
        if options.peer:
            sides.append(stack.enter_context(vllm(model, options.peer[1], scratch)))
        rounds = 1 if options.quick else options.rounds
        result |= asyncio.run(run(server, sides, cases, model, rounds))
    print(json.dumps(result))


async def run(
    server: EmbeddedSide, sides: list[Side], cases: dict[str, list[int]], model: Path, rounds: int
) -> dict[str, Any]:
    """Warm up all sides, check the log-probs, and measure each case."""
    result: dict[str, Any] = {}
    try:
        for lengths in cases.values():
            warm_up = make_requests(lengths[:64], seed=1)
            for side in sides:
                await side.run(warm_up)
        longest = max(cases.values(), key=max)
        result["logprob_error"] = await largest_logprob_error(server, model, make_requests(longest[:64], seed=2))
        for case, lengths in cases.items():
            result[case] = await measure(case, lengths, sides, rounds)
    finally:
        await server.engine.destroy()
    return result


if __name__ == "__main__":
    main()
