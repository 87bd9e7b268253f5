"""CPU time and latency that the rollout endpoint adds to a chat call, and prompt tokens that servers prefill again.

    uv run python tests/benchmarks/rollout_endpoint.py [--quick] [--check]

A null engine returns 64 tokens after 1 s. 1, 16 and 128 agents take 8 turns in a conversation with a tool; each agent
has a separate session and starts at a random moment of the first second. Agents run in this process, endpoint and
engine in another. `cpu_ms` is the CPU time of the endpoint's process per call. `added_ms` is the median latency of a
call minus `engine_ms`, the median latency of the engine without endpoint on an idle event loop.

Then one agent takes 8 turns with a real server and no weight update. `prefill` has the prompt tokens that the server
computed (all prompt tokens minus prefix cache hits) and their ratio to the tokens of the final conversation. The last
line is one JSON object. With `--check` the exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TURNS = 8
SECONDS, QUICK_SECONDS = 1.0, 0.1
"""Seconds per completion, by default and with `--quick`."""
CPU_MS = 5.0
"""Limit of the CPU time per call."""
ADDED_MS = {1: 5.0, 16: 10.0, 128: 20.0}
"""Limit of the added latency, by number of agents."""
PREFILL_RATIO = 1.2
"""Limit of prefilled tokens divided by tokens of the final conversation."""
ENGINE_CALLS = 16
"""Sequential calls that measure the engine without the endpoint."""
DEADLINE = 300.0
"""Longest measurement, in seconds."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
START = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "What is 12 + 345, and the rest?"}]
CALLING = '{"name": "add", "parameters": {"a": 12, "b": 345}}<|eot_id|>'
"""Tool call in the format of Llama 3, the completion of every other turn."""


async def serve(agents: int, latency: float) -> None:
    """Serve the endpoint with an engine that responds after `latency` seconds, until standard input ends."""
    from rl_contracts.config import GenerationConfig
    from rl_contracts.data import ModelRequest
    from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
    from rl_contracts.testing.chat_formats import make_chat_tokenizer
    from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

    tokenizer = make_chat_tokenizer("llama3")
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    calls = tokenizer.encode(CALLING, add_special_tokens=False)
    words = [*(tokenizer.encode("the answer is it ", add_special_tokens=False) * 64)[:63], end]
    config = NullInferenceEngineConfig(seconds_per_token=0.0, latency=latency, vocab_size=len(tokenizer))
    engine = NullInferenceEngine(config, answer=lambda request: calls if len(request.input_ids) % 2 else words)
    generation, alone = GenerationConfig(max_new_tokens=64), list[float]()
    for _ in range(ENGINE_CALLS):
        begin = time.perf_counter()
        await engine.agenerate(ModelRequest([1, 2, 3], generation))
        alone.append(time.perf_counter() - begin)
    endpoint = HttpRolloutEndpoint(tokenizer)
    sessions = [await endpoint.open(engine, generation) for _ in range(agents)]
    keys = [session.api_key for session in sessions]
    print(json.dumps([statistics.median(alone), sessions[0].base_url, *keys]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await endpoint.destroy()


async def agent(http: Any, base_url: str, key: str, turns: int, delay: float = 0.0) -> list[float]:
    """Run one conversation and return the seconds of each call."""
    await asyncio.sleep(delay)
    messages: list[Any] = list(START)
    seconds, headers = [], {"Authorization": f"Bearer {key}"}
    for turn in range(turns):
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        begin = time.perf_counter()
        async with http.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
            text = await response.read()
        seconds.append(time.perf_counter() - begin)
        if response.status != 200:
            raise SystemExit(f"expected status 200, found {response.status}: {text.decode()}")
        message = json.loads(text)["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "357"})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": f"and {turn}?"})
    return seconds


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, with nanosecond resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def run_agents(ready_line: list[Any], agents: int, rounds: int, pid: int) -> dict[str, float]:
    """Run all agents concurrently, `rounds` times, after a warm-up conversation; return the measurements."""
    import aiohttp

    alone, base_url, *keys = ready_line
    draw, seconds = random.Random(agents), list[float]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        warm, *keys = keys
        await agent(http, base_url, warm, 2)
        before = cpu_seconds(pid)
        for number in range(rounds):
            round_keys = keys[number * agents : (number + 1) * agents]
            conversations = [agent(http, base_url, key, TURNS, draw.random() * (agents > 1)) for key in round_keys]
            for call_seconds in await asyncio.gather(*conversations):
                seconds += call_seconds
        cpu = cpu_seconds(pid) - before
    return {
        "calls": len(seconds),
        "cpu_ms": round(1e3 * cpu / len(seconds), 2),
        "engine_ms": round(1e3 * alone, 2),
        "added_ms": round(1e3 * (statistics.median(seconds) - alone), 2),
        "added_ms_p99": round(1e3 * (statistics.quantiles(seconds, n=100)[-1] - alone), 2),
    }


def measure_calls(agents: int, rounds: int, latency: float) -> dict[str, float]:
    """Start the endpoint and return the measurements for this number of agents."""
    command = [sys.executable, __file__, "--serve", str(agents * rounds + 1), "--latency", str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit("the endpoint did not start; see its error above")
        return asyncio.run(asyncio.wait_for(run_agents(json.loads(line), agents, rounds, child.pid), DEADLINE))


async def measure_prefill(turns: int) -> dict[str, float]:
    """Return the tokens that a real server prefills for one conversation of `turns` turns."""
    import aiohttp

    from rl_contracts.config import GenerationConfig
    from rl_contracts.testing.chat_formats import make_chat_tokenizer
    from rl_inference import EmbeddedEngine
    from rl_inference.testing import ServerProcess, tiny_model
    from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

    tokenizer = make_chat_tokenizer("llama3")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model = tiny_model(path / "model", vocab_size=len(tokenizer), eos_token_id=0, max_position_embeddings=8192)
        with ServerProcess(model, path / "server.log") as server:
            engine = EmbeddedEngine()
            engine.initialize([server.address])
            endpoint = HttpRolloutEndpoint(tokenizer)
            session = await endpoint.open(engine, GenerationConfig(max_new_tokens=64, min_new_tokens=64))
            async with aiohttp.ClientSession() as http:
                await agent(http, session.base_url, session.api_key, turns)
                async with http.get(f"{server.address}/stats") as response:
                    stats = await response.json()
            await session.close()
            (row,) = session.trajectories(0.0)
            await endpoint.destroy()
            await engine.destroy()
    prefilled = stats["prompt_tokens"] - stats["prefix_tokens"]
    return {
        "prompt_tokens": stats["prompt_tokens"],
        "prefilled_tokens": prefilled,
        "final_tokens": len(row),
        "ratio": round(prefilled / len(row), 3),
    }


def exceeded_limits(result: dict[str, Any]) -> list[str]:
    """Return a message for each exceeded limit."""
    problems = []
    for agents, measurements in result["agents"].items():
        for name, limit in (("cpu_ms", CPU_MS), ("added_ms", ADDED_MS[int(agents)])):
            if measurements[name] > limit:
                problems.append(
                    f"{name} with {agents} agents: expected at most {limit:g}, found {measurements[name]:g}"
                )
    if result["prefill"]["ratio"] > PREFILL_RATIO:
        problems.append(
            f"prefilled over final tokens: expected at most {PREFILL_RATIO:g}, found {result['prefill']['ratio']:g}"
        )
    return problems


def main() -> None:
    """Measure; print a line per number of agents and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="16 agents with completions of 0.1 s, once; only checks that it runs"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--latency", type=float, default=SECONDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.latency))
        return
    result: dict[str, Any] = {"benchmark": "rollout_endpoint", "agents": {}}
    latency = QUICK_SECONDS if options.quick else SECONDS
    for agents, rounds in {16: 1}.items() if options.quick else {1: 4, 16: 2, 128: 1}.items():
        result["agents"][str(agents)] = measurements = measure_calls(agents, rounds, latency)
        print(
            f"{agents:4d} agents  " + ", ".join(f"{name} {value:g}" for name, value in measurements.items()), flush=True
        )
    result["prefill"] = asyncio.run(measure_prefill(2 if options.quick else TURNS))
    result["load"] = os.getloadavg()[0]
    result["exceeded_limits"] = exceeded_limits(result)
    print(json.dumps(result))
    if options.check and result["exceeded_limits"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
