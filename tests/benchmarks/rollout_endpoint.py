"""What the rollout endpoint costs: processor time and latency of a chat call, and tokens that are read twice.

    uv run python tests/benchmarks/rollout_endpoint.py [--quick] [--check]

The engine answers after 1 s, with 64 tokens, and computes nothing. 1, 16 and 128 agents, each with a session of its own
and beginning somewhere in the first second, take 8 turns with a tool in their conversation. They are this process; the
endpoint and its engine are another one, whose processor time is that of all its threads, divided by the calls. The
added latency is the median time of a call at the agent, less that of the engine when it is asked without an endpoint
by a process that does nothing else: the second, and what the timer of an event loop adds to it. Then one agent takes 8
turns on a real server without an update in between: tokens that were read in all (prompts, less what was found in the
cache), over the tokens of the final conversation. The last line is one JSON object; `--check` fails where a limit is
missed.
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
"""Duration of an answer in seconds, and with `--quick`."""
CPU_MS = 5.0
"""Limit of processor time per call."""
ADDED_MS = {1: 5.0, 16: 10.0, 128: 20.0}
"""Limits of added latency, by agents."""
PREFILL_RATIO = 1.2
"""Limit of what is read over the final conversation."""
ENGINE_CALLS = 16
"""Answers by which the engine is measured without the endpoint, one after the other."""
DEADLINE = 300.0
"""Seconds for one part."""
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
"""What the model writes every other turn, in the format of Llama 3."""


async def serve(agents: int, latency: float) -> None:
    """The endpoint over the engine that answers after `latency` seconds, until this process's input ends."""
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
    """One conversation; the seconds of its calls."""
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
    """Processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def run_agents(ready_line: list[Any], agents: int, rounds: int, pid: int) -> dict[str, float]:
    """All agents at once, `rounds` times one after the other; the first has warmed up."""
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
    """Figures of so many agents."""
    command = [sys.executable, __file__, "--serve", str(agents * rounds + 1), "--latency", str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit("the endpoint did not start; its error is above.")
        return asyncio.run(asyncio.wait_for(run_agents(json.loads(line), agents, rounds, child.pid), DEADLINE))


async def measure_prefill(turns: int) -> dict[str, float]:
    """Tokens that a real server reads for one conversation of `turns` turns."""
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
    """The limits that were, in words."""
    problems = []
    for agents, measurements in result["agents"].items():
        for name, limit in (("cpu_ms", CPU_MS), ("added_ms", ADDED_MS[int(agents)])):
            if measurements[name] > limit:
                problems.append(
                    f"{name} with {agents} agents: expected at most {limit:g}, found {measurements[name]:g}"
                )
    if result["prefill"]["ratio"] > PREFILL_RATIO:
        problems.append(f"read over final: expected at most {PREFILL_RATIO:g}, found {result['prefill']['ratio']:g}")
    return problems


def main() -> None:
    """Measure, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="16 agents with answers of 0.1 s, once; checks only that it runs"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 where a limit is missed")
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
