"""vLLM extension without vLLM: imports, staging over each route, and the guard."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hmac
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rl_inference
from rl_contracts.data import ParamSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_contracts.inference import ServedModel
from rl_contracts.weights import checksum, open_sender, with_rank
from rl_contracts.weights.rendezvous import Address
from rl_inference.backends.vllm.protocol import VLLMProtocol
from rl_inference.client.protocol import Health

PLUGINS = Path(rl_inference.__file__).parent / "backends" / "plugins"
IMPORTED_FILES = [PLUGINS / f"{name}.py" for name in ("vllm_extension", "rl_guard", "rl_staging", "rl_stored")]
OTHER_FILES = [PLUGINS / f"{name}.py" for name in ("sglang_server", "rl_adapters", "rl_broadcast")]

AREA = f"{tempfile.gettempdir()}/rl-staging-{os.getpid()}"

sys.path.insert(0, str(PLUGINS))  # the server's import path
extension, guard, staging, stored = (importlib.import_module(file.stem) for file in IMPORTED_FILES)
sys.path.remove(str(PLUGINS))


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return a tensor of odd length, several that share a bucket, and one of several pieces."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 5), "b.weight": (300, 300), "c.weight": (2200, 1030), "d.bias": (7,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def _specs(tensors: dict[str, torch.Tensor]) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items())


def _send(
    route: str, directory: Path, version: int, tensors: dict[str, torch.Tensor]
) -> tuple[WeightUpdateMeta, dict[str, int]]:
    sender = open_sender(route, str(directory))
    meta = sender.begin(version, _specs(tensors))
    return meta, sender.send(iter(tensors.items()))


def _attempt(meta: WeightUpdateMeta, checkpoint: Path = Path()) -> Any:
    attempt = staging.Attempt(json.loads(json.dumps(meta.to_json())), staging.State())
    attempt.checkpoint = checkpoint
    attempt.run()
    return attempt


def test_plugins_import_only_server_packages_and_parse_in_python_3_10():
    files = [*IMPORTED_FILES, *OTHER_FILES]
    packages = {"numpy", "prometheus_client", "psutil", "safetensors", "torch", "vllm", "sglang"}
    for file in files:
        tree = ast.parse(file.read_text(), file.name, feature_version=(3, 10))
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {
            node: node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports
        }
        top_level = {name.split(".")[0] for node, name in names.items() if node in tree.body}
        type_checking = next((node.body for node in tree.body if isinstance(node, ast.If)), [])
        at_runtime = {name.split(".")[0] for node, name in names.items() if node not in type_checking}

        assert top_level <= sys.stdlib_module_names, file.name
        assert at_runtime - sys.stdlib_module_names <= packages | {each.stem for each in files}, file.name


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(torch.float32, 2**21 + 3), (torch.bfloat16, 7), (torch.float16, 8), (torch.bfloat16, 1)],
)
def test_checksum_equals_trainer_checksum(dtype, count):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)

    assert stored.checksum(tensor) == checksum(tensor)


def test_attempt_over_stored_route_reads_weights(tmp_path, monkeypatch):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = _tensors(0)
    meta, sums = _send("shm", tmp_path, 3, tensors)

    attempt = _attempt(meta)

    assert (attempt.done, attempt.error) == (True, "")
    assert {name: int(text) for name, text in attempt.sums.items()} == sums
    assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in tensors.items())


def test_attempt_with_invalid_update_names_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path / "weights"))
    tensors = _tensors(0)
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    save_file({"lm_head.weight": torch.zeros(2), **tensors}, checkpoint / "model.safetensors")
    good, _ = _send("disk", tmp_path / "weights", 1, tensors)
    outside, _ = _send("disk", tmp_path / "elsewhere", 1, tensors)
    linked, _ = _send("disk", tmp_path / "weights", 2, tensors)
    (file := Path(linked.parts[0].location) / "model.safetensors").rename(tmp_path / "linked")
    file.symlink_to(tmp_path / "linked")
    fewer, _ = _send("shm", tmp_path / "weights", 1, {name: tensors[name] for name in ("a.weight", "b.weight")})
    extra, _ = _send("shm", tmp_path / "weights", 2, {**tensors, "e.weight": torch.zeros(2)})
    reshaped, _ = _send("shm", tmp_path / "weights", 4, {**tensors, "d.bias": torch.zeros(8)})
    not_finite, _ = _send("shm", tmp_path / "weights", 5, {**tensors, "d.bias": torch.full((7,), torch.nan)})

    assert _attempt(good, checkpoint).done
    assert "outside of the server's weights directory" in _attempt(outside, checkpoint).error
    assert "outside of the server's weights directory" in _attempt(linked, checkpoint).error
    assert "2 parameters were not sent, the first ['c.weight', 'd.bias']" in _attempt(fewer, checkpoint).error
    assert "the model has no parameter 'e.weight'" in _attempt(extra, checkpoint).error
    assert "parameter 'd.bias': expected shape [7], found [8]" in _attempt(reshaped, checkpoint).error
    assert "found nan or infinity in 'd.bias'" in _attempt(not_finite, checkpoint).error
    (tmp_path / "weights" / "slot-1-rank-0" / "model.safetensors").unlink()
    assert "cannot be read" in _attempt(good, checkpoint).error
    monkeypatch.setenv(staging.WEIGHTS_DIR, "")
    assert "RL_WEIGHTS_DIR" in _attempt(good, checkpoint).error


def test_attempt_over_broadcast_receives_weights_and_reuses_group(tmp_path, monkeypatch):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    sender = open_sender("broadcast", Address("127.0.0.1", timeout=30.0).location)
    state, groups = staging.State(), []
    try:
        for version in (1, 2):
            tensors = _tensors(version)
            meta = with_rank(sender.begin(version, _specs(tensors)), 1, 2)
            attempt = staging.Attempt({**meta.to_json(), "area": AREA}, state)
            thread = threading.Thread(target=attempt.run)
            thread.start()
            sums = sender.send(iter(tensors.items()))
            thread.join(30)

            assert attempt.error == ""
            assert {name: int(text) for name, text in attempt.sums.items()} == sums
            assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in tensors.items())
            groups.append(state.receivers[0]._group_name)
        assert groups[0] == groups[1] != ""
    finally:
        sender.close()


def test_attempt_with_invalid_broadcast_reports_to_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = _tensors(0)
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    sender = open_sender("broadcast", Address("127.0.0.1", timeout=30.0).location)
    try:
        meta = with_rank(sender.begin(1, _specs(tensors)), 1, 2)
        attempt = staging.Attempt({**meta.to_json(), "area": AREA}, staging.State())
        attempt.checkpoint = tmp_path
        attempt.run()

        with pytest.raises(Exception, match=r"receiver 1 rejected the update: the model has no parameter 'a\.weight'"):
            sender.send(iter(tensors.items()))
        assert "the model has no parameter 'a.weight'" in attempt.error
    finally:
        sender.close()


# ---- guard


class _Engine:
    """Stand-in for vLLM's engine that records the calls of the guard."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rpc_kwargs: dict[str, Any] = {}
        self.cache_resets, self.error = True, ""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))

    async def check_health(self) -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level))

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.calls.append(("reset", running))
        return self.cache_resets

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        self.calls.append((method,))
        self.rpc_kwargs |= kwargs or {}
        if method == "rl_load":
            await self.may_load.wait()
            if self.error:
                raise RuntimeError(self.error)
        sums = {"a": "18446744073709551615"}
        return [{"done": True, "error": self.error, "checksums": sums, "shared": sums}]


class _GuardedServer:
    """Guard around an application that records the bodies of its requests."""

    def __init__(self) -> None:
        self.engine = _Engine()
        self.bodies: list[bytes] = []
        self.guard = extension.Guard(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive()).get("body", b""))
        await guard.send_json(send, 200, {"path": scope["path"]})

    async def request(
        self, path: str, body: Any = None, key: str = "", method: str = ""
    ) -> tuple[int, dict[str, Any], dict[bytes, bytes]]:
        """Send a request, and return status, JSON and headers of the response."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            return {"type": "http.request", "body": raw}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {"type": "http", "method": method or ("GET" if body is None else "POST"), "path": path}
        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        await self.guard({**scope, "headers": headers, "app": app}, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"]), dict(sent[0]["headers"])


async def test_guard_requires_key_and_limits_generation_key(monkeypatch):
    monkeypatch.setenv(guard.KEY, "secret")
    server = _GuardedServer()
    generation_key = hmac.new(b"secret", b"generation", "sha256").hexdigest()

    routes = ["/pause", "/collective_rpc", "/metrics", "/v1/load_lora_adapter", "/rl/commit", "/docs", "/rl/stats"]
    no_key = {path: (await server.request(path, {}))[0] for path in routes}
    wrong_key = {path: (await server.request(path, {}, "secre"))[0] for path in routes}
    limited = {path: (await server.request(path, {}, generation_key))[0] for path in routes[:-1]}

    assert set(no_key.values()) == set(wrong_key.values()) == {401}
    assert set(limited.values()) == {403}
    assert server.bodies == server.engine.calls == []
    server.guard._warm_up_task = asyncio.create_task(server.engine.check_health())
    assert (await server.request("/health"))[0] == 200
    for path in ("/inference/v1/generate", "/v1/chat/completions"):
        assert (await server.request(path, {"token_ids": [1]}, generation_key))[0] == 200
    assert (await server.request("/metrics", key="secret"))[0] == 200


async def test_guard_health_is_503_until_first_tokens(monkeypatch):
    server, generated = _GuardedServer(), asyncio.Event()

    async def warm_up(engine: Any) -> None:
        assert engine is server.engine
        await generated.wait()

    monkeypatch.setattr(extension, "_warm_up", warm_up)
    monkeypatch.setattr(guard, "REPLY_SECONDS", 0.01)

    assert (await server.request("/health"))[0] == 503
    generated.set()
    assert (await server.request("/health"))[0] == 200


async def test_guard_adds_instance_version_and_cache_salt(monkeypatch):
    monkeypatch.setenv(guard.VERSION, "4")
    server = _GuardedServer()
    update = {"meta": {"version": 5, "route": "disk", "parts": []}, "timeout": 5}

    _, _, before = await server.request("/inference/v1/generate", {"token_ids": [1]})
    status, receipt, _ = await server.request("/rl/stage", update)
    assert (status, receipt["version"], receipt["checksums"]) == (200, 5, {"a": "18446744073709551615"})
    await server.request("/rl/pause", {"mode": "keep", "lease": 60})
    waiting = asyncio.ensure_future(server.request("/inference/v1/generate", {"token_ids": [2]}))
    await asyncio.sleep(0)
    assert (await server.request("/rl/commit", {"version": 5, "mode": "keep"}))[0] == 200
    assert not waiting.done()
    await server.request("/rl/resume", {})
    _, _, after = await waiting

    assert (before[b"x-weight-version"], after[b"x-weight-version"]) == (b"4", b"5")
    assert before[b"x-server-instance"] == after[b"x-server-instance"] != b""
    assert [json.loads(body) for body in server.bodies] == [
        {"cache_salt": "4", "token_ids": [1]},
        {"cache_salt": "5", "token_ids": [2]},
    ]
    assert server.engine.calls[-5:] == [
        ("pause", "keep", False),
        ("rl_load",),
        ("version", "5"),
        ("reset", True),
        ("resume",),
    ]
    assert (await server.request("/rl/health"))[1]["version"] == 5


async def test_guard_overrides_cache_salt_of_request(monkeypatch):
    monkeypatch.setenv(guard.VERSION, "4")
    server = _GuardedServer()

    for body in (
        b'{"cache_salt": "mine", "token_ids": [1]}',
        b' \n{"token_ids": [1]} ',
        b'{"cache_salt":"mine"}',
        b"{}",
    ):
        await server.request("/v1/completions", body)

        assert json.loads(server.bodies[-1]) == {**json.loads(body), "cache_salt": "4"}


async def test_guard_resume_during_commit_waits():
    server = _GuardedServer()
    await server.request("/rl/stage", {"meta": {"version": 1, "route": "disk", "parts": []}, "timeout": 5})
    await server.request("/rl/pause", {"mode": "keep", "lease": 60})
    server.engine.may_load.clear()
    committing = asyncio.ensure_future(server.request("/rl/commit", {"version": 1, "mode": "keep"}))
    while ("rl_load",) not in server.engine.calls:  # noqa: ASYNC110 - the stand-in has no event
        await asyncio.sleep(0)
    resuming = asyncio.ensure_future(server.request("/rl/resume", {}))
    assert not (await server.request("/rl/health"))[1]["version"]
    assert ("resume",) not in server.engine.calls
    server.engine.may_load.set()

    assert (await committing)[0] == (await resuming)[0] == 200
    assert server.engine.calls[-3:] == [("version", "1"), ("reset", True), ("resume",)]


async def test_guard_request_without_json_object_is_rejected():
    server = _GuardedServer()

    for body in (b"[1]", '{"token_ids": [1]}'.encode("utf-16"), b'\xef\xbb\xbf{"token_ids": [1]}'):
        assert (await server.request("/v1/completions", body))[0] == 400
    assert server.bodies == []


async def test_guard_commit_without_staging_or_cache_reset_fails():
    server = _GuardedServer()

    status, reply, _ = await server.request("/rl/commit", {"version": 7, "mode": "keep"})
    assert (status, reply["error"]["message"]) == (
        400,
        "commit of version 7: staged is None, served is 0. Stage it first.",
    )
    await server.request("/rl/stage", {"meta": {"version": 7, "route": "disk", "parts": []}, "timeout": 5})
    server.engine.cache_resets = False
    status, reply, _ = await server.request("/rl/commit", {"version": 7, "mode": "keep"})
    assert status == 500
    assert "version 7: the prefix cache" in reply["error"]["message"]


async def test_guard_expired_pause_lease_resumes_generation():
    server = _GuardedServer()
    await server.request("/rl/pause", {"mode": "keep", "lease": 0.01})

    async with asyncio.timeout(10):
        await server.request("/inference/v1/generate", {"token_ids": [1]})

    assert server.engine.calls[-1] == ("resume",)


async def test_guard_lease_expired_during_commit_resumes_after_it():
    server = _GuardedServer()
    await server.request("/rl/stage", {"meta": {"version": 7, "route": "disk", "parts": []}, "timeout": 5})
    await server.request("/rl/pause", {"mode": "keep", "lease": 0.01})
    server.engine.may_load.clear()
    commit = asyncio.ensure_future(server.request("/rl/commit", {"version": 7, "mode": "keep"}))
    async with asyncio.timeout(10):
        while not hasattr(server.guard, "_expiry_task"):  # noqa: ASYNC110 - a timer has no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert ("resume",) not in server.engine.calls

    server.engine.may_load.set()
    await commit
    await server.guard._expiry_task

    assert server.engine.calls[-2:] == [("reset", True), ("resume",)]


async def test_guard_lease_expired_during_sleep_does_not_resume():
    server = _GuardedServer()
    await server.request("/rl/pause", {"mode": "keep", "lease": 0.05})
    await server.request("/rl/sleep", {})

    await asyncio.sleep(0.2)

    assert server.engine.calls[-1] == ("sleep", 1)


async def test_guard_failed_load_is_reported_and_ends_process(monkeypatch):
    server, ended = _GuardedServer(), asyncio.Event()
    await server.request("/rl/stage", {"meta": {"version": 7, "route": "disk", "parts": []}, "timeout": 5})
    server.engine.error = "the load failed halfway"
    monkeypatch.setattr(guard, "end_process", ended.set)

    status, reply, _ = await server.request("/rl/commit", {"version": 7, "mode": "keep"})

    assert status == 500
    assert "route disk, version 7 was not loaded: the load failed halfway" in reply["error"]["message"]
    assert (await server.request("/rl/resume", {}))[0] == 400
    assert ("resume",) not in server.engine.calls
    async with asyncio.timeout(10):
        await ended.wait()


def test_end_process_kills_children_without_waiting():
    psutil = pytest.importorskip("psutil", reason="psutil comes with the servers and with rl-launchers")
    code = """
import signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import rl_guard
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
try:
    rl_guard.end_process()
finally:
    print("waited")
"""
    finished = subprocess.run([sys.executable, "-c", code, str(PLUGINS)], capture_output=True, text=True, timeout=60)

    assert (finished.returncode, "waited" in finished.stdout) == (1, False)
    child, deadline = int(finished.stdout.split()[0]), time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):  # a killed process may exist for a moment
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# ---- staging areas


def test_make_area_is_unique_and_removes_areas_of_dead_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "AREA_ROOT", tmp_path)
    areas = [Path(stored.make_area("vllm")) for _ in range(2)]
    prefix, _, _, suffix = areas[0].name.rsplit("-", 3)
    kind, namespace = prefix.rsplit("-", 1)
    of_another_container, dead = (tmp_path / f"{name}-1-2-{suffix}" for name in (f"{kind}-7", f"{kind}-{namespace}"))
    of_another_container.mkdir()
    dead.mkdir()
    (dead / "0").write_bytes(b"weights")

    areas.append(Path(stored.make_area("vllm")))

    assert len(set(areas)) == 3
    assert set(tmp_path.iterdir()) == {*areas, of_another_container}


@pytest.mark.parametrize("error", ["", "the trainer was lost"])
async def test_guard_stage_over_broadcast_removes_area(tmp_path, monkeypatch, error):
    monkeypatch.setattr(stored, "AREA_ROOT", tmp_path)
    server = _GuardedServer()
    server.engine.error = error

    meta = {"version": 7, "route": "broadcast", "parts": []}
    status, _, _ = await server.request("/rl/stage", {"meta": meta, "timeout": 5})

    assert status == (400 if error else 200)
    assert Path(server.engine.rpc_kwargs["meta"]["area"]).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


class _Worker(extension.WeightStage):
    """Worker of a rank that does not fetch."""

    rank = 1
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="no directory"))


@pytest.mark.parametrize("differs", [False, True])
def test_share_on_other_rank_compares_checksums(tmp_path, monkeypatch, differs):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = _tensors(0)
    meta, sums = _send("shm", tmp_path, 3, tensors)
    worker = _Worker()
    worker.rl_stage(meta.to_json())
    assert worker.rl_staged()["done"]

    worker.rl_share({name: str(total + (differs and name == "d.bias")) for name, total in sums.items()})
    [share_thread] = [thread for thread in threading.enumerate() if thread.name == "rl-share"] or [None]
    if share_thread is not None:
        share_thread.join(30)

    status = worker.rl_staged()
    assert (status["done"], "parameter 'd.bias'" in status["error"]) == (not differs, differs)


def test_compare_stale_parameter_is_named():
    model = torch.nn.Module()
    model.packed_modules_mapping = {"gate_up": ["gate", "up"]}
    model.mlp = torch.nn.Module()
    model.mlp.gate_up = torch.nn.Linear(4, 6, bias=False)
    model.mlp.gate_up.output_sizes = [2, 4]
    model.norm = torch.nn.LayerNorm(3, bias=False)
    staged = {
        "mlp.gate.weight": model.mlp.gate_up.weight[:2].clone(),
        "mlp.up.weight": model.mlp.gate_up.weight[2:].clone(),
        "norm.weight": model.norm.weight.clone(),
    }

    extension.compare(model, staged)
    with torch.no_grad():
        staged["mlp.up.weight"][3, 1] += 1
    with pytest.raises(RuntimeError, match=r"parameter 'mlp\.up\.weight': the served tensor differs"):
        extension.compare(model, staged)


def test_compare_maps_checkpoint_names_of_vision_models():
    """vLLM names the language model of Qwen2.5-VL differently from its checkpoint."""
    names = {"model.embed_tokens.weight": "text.embed_tokens.weight", "visual.weight": "visual.weight"}
    model = torch.nn.Module()
    model.hf_to_vllm_mapper = SimpleNamespace(map_name=names.get)
    model.visual = torch.nn.Linear(2, 3, bias=False)
    model.text = torch.nn.Module()
    model.text.embed_tokens, model.text.lm_head = (torch.nn.Embedding(5, 3) for _ in range(2))
    model.text.lm_head.weight = model.text.embed_tokens.weight
    staged = {"model.embed_tokens.weight": model.text.embed_tokens.weight.detach().clone()}
    staged["visual.weight"] = model.visual.weight.detach().clone()

    extension.compare(model, staged)
    for name, stale in (("model.embed_tokens.weight", r"text\.embed_tokens\.weight"), ("visual.weight", "visual")):
        with pytest.raises(RuntimeError, match=stale):
            extension.compare(model, {**staged, name: staged[name] + 1})


def test_compare_replicated_layer_packed_for_a_cpu_is_compared():
    """vLLM's projection from image features to the language model is not split over ranks."""
    layer: Any = torch.nn.Linear(3, 5, bias=False)
    layer.cpu_linear, layer.input_size = torch.nn.functional.linear, 3
    model = torch.nn.Module()
    model.projection = layer

    extension.compare(model, {"projection.weight": layer.weight.detach().clone()})
    with pytest.raises(RuntimeError, match=r"projection\.weight"):
        extension.compare(model, {"projection.weight": layer.weight.detach() + 1})


def test_reject_spare_placeholders_counts_only_image_features():
    def found(*tokens: int, is_embed: list[bool] | None = None) -> dict[str, Any]:
        return {"image": [SimpleNamespace(tokens=list(tokens), is_embed=is_embed)]}

    extension.reject_spare_placeholders([4, 9, 9, 5, 7], found(9, 9))
    extension.reject_spare_placeholders([4, 9, 5, 9, 5, 7], found(9, 5, 9, is_embed=[True, False, True]))
    with pytest.raises(ValueError, match="expected 2 placeholders for the images of the prompt, found 3"):
        extension.reject_spare_placeholders([4, 9, 9, 5, 9], found(9, 9))


class UnquantizedMethod:
    """Stand-in for vLLM's output head on a CPU, which multiplies with a copy of the weights."""

    def process_weights_after_loading(self, head: Any) -> None:
        packed = head.weight.detach().clone()
        head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)


def test_repack_updates_packed_copy_of_tied_head():
    head: Any = torch.nn.Embedding(5, 3)
    head.weight.requires_grad_(False)
    head.quant_method, head.num_embeddings_padded, head.org_vocab_size = UnquantizedMethod(), 5, 5
    head.quant_method.process_weights_after_loading(head)
    model = torch.nn.Module()
    model.lm_head = head
    new = torch.randn(5, 3)
    model.lm_head.weight.data.copy_(new)

    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        extension.compare(model, {"model.embed_tokens.weight": new})
    extension.repack(model)
    extension.compare(model, {"model.embed_tokens.weight": new})


# ---- protocol and guard together


async def _drive(server: _GuardedServer, exchange: Any) -> Any:
    """Return the result of an exchange of the protocol with the guard."""
    call = next(exchange)
    while True:
        _, value, _ = await server.request(call.target, call.body)
        try:
            call = exchange.send(call.parse(json.dumps(value).encode()))
        except StopIteration as end:
            return end.value


async def test_protocol_with_guard_stages_commits_and_resumes(monkeypatch):
    monkeypatch.setenv(guard.VERSION, "4")
    server, protocol = _GuardedServer(), VLLMProtocol(version=4)
    meta = WeightUpdateMeta("disk", 5, ())

    receipt = await _drive(server, protocol.load(meta, 5.0))
    paused = await _drive(server, protocol.pause("recompute", 60.0))
    await _drive(server, protocol.commit(5, "recompute"))
    seconds = await _drive(server, protocol.resume())

    assert receipt == WeightReceipt("server", 5, {"a": 2**64 - 1})
    assert (paused, seconds >= 0) == (None, True)
    assert await _drive(server, protocol.health()) == Health(5, 0)
    assert ("reset", True) in server.engine.calls
    assert (await _drive(server, protocol.receipt())).version == 5


def test_describe_server_with_raw_logprobs_is_rejected():
    info = {"model_path": "/m", "version": 3, "weights_dir": "/w", "logprobs_mode": "processed_logprobs"}

    def describe(value: dict[str, Any]) -> Any:
        exchange = VLLMProtocol().describe()
        call = next(exchange)
        try:
            exchange.send(call.parse(json.dumps(value).encode()))
        except StopIteration as end:
            return end.value

    assert describe(info) == ServedModel("/m", 3, "/w")
    sglang = describe({"model_path": "/m", "version": 3, "weights_dir": "/w", "server": "sglang 0.5.23"})
    assert sglang == ServedModel(
        "/m", 3, "/w", "sglang 0.5.23"
    )  # without logprobs_mode; the caller rejects the program
    with pytest.raises(InferenceError, match="logprobs_mode='raw_logprobs'"):
        describe({**info, "logprobs_mode": "raw_logprobs"})
