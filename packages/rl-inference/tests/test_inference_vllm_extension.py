"""What runs inside vLLM, without vLLM: it loads by path, meets the trainer's end of each route, and keeps its doors."""

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

INSIDE = Path(rl_inference.__file__).parent / "backends" / "plugins"
FILES = [INSIDE / f"{name}.py" for name in ("vllm_extension", "rl_guard", "rl_staging", "rl_stored")]
OTHERS = [INSIDE / f"{name}.py" for name in ("sglang_server", "rl_adapters", "rl_broadcast")]

AREA = f"{tempfile.gettempdir()}/rl-staging-{os.getpid()}"

sys.path.insert(0, str(INSIDE))  # as the server has it
extension, guard, staging, stored = (importlib.import_module(file.stem) for file in FILES)
sys.path.remove(str(INSIDE))


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    """A small one of odd length, several in a bucket, and one of more than one piece."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 5), "b.weight": (300, 300), "c.weight": (2200, 1030), "d.bias": (7,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def _specs(tensors: dict[str, torch.Tensor]) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items())


def _sent(
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


@pytest.mark.parametrize("file", [*FILES, *OTHERS], ids=lambda file: file.stem)
def test_files_inside_need_nothing_but_the_servers_packages_and_python_3_10(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 10))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node: node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    top = {name.split(".")[0] for node, name in names.items() if node in tree.body}
    for_types = next((node for node in tree.body if isinstance(node, ast.If)), None)
    elsewhere = {name.split(".")[0] for node, name in names.items() if for_types is None or node not in for_types.body}

    assert top <= sys.stdlib_module_names
    packages = {"numpy", "prometheus_client", "psutil", "safetensors", "torch", "vllm", "sglang"}
    assert elsewhere - sys.stdlib_module_names <= packages | {file.stem for file in [*FILES, *OTHERS]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 7, 8, 2**21 + 3])
def test_checksum_is_the_trainers(dtype, count):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)

    assert stored.checksum(tensor) == checksum(tensor)


@pytest.mark.parametrize("route", ["disk", "shm"])
def test_attempt_reads_what_the_trainer_stored(tmp_path, monkeypatch, route):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = _tensors(0)
    meta, sums = _sent(route, tmp_path, 3, tensors)

    attempt = _attempt(meta)

    assert (attempt.done, attempt.error) == (True, "")
    assert {name: int(text) for name, text in attempt.sums.items()} == sums
    assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in tensors.items())


def test_attempt_refuses_what_vllm_could_not_load(tmp_path, monkeypatch):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path / "weights"))
    tensors = _tensors(0)
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    save_file({"lm_head.weight": torch.zeros(2), **tensors}, checkpoint / "model.safetensors")
    good, _ = _sent("disk", tmp_path / "weights", 1, tensors)
    outside, _ = _sent("disk", tmp_path / "elsewhere", 1, tensors)
    linked, _ = _sent("disk", tmp_path / "weights", 2, tensors)
    (file := Path(linked.parts[0].location) / "model.safetensors").rename(tmp_path / "linked")
    file.symlink_to(tmp_path / "linked")
    fewer, _ = _sent("shm", tmp_path / "weights", 1, {name: tensors[name] for name in ("a.weight", "b.weight")})
    other, _ = _sent("shm", tmp_path / "weights", 2, {**tensors, "e.weight": torch.zeros(2)})
    reshaped, _ = _sent("shm", tmp_path / "weights", 4, {**tensors, "d.bias": torch.zeros(8)})
    broken, _ = _sent("shm", tmp_path / "weights", 5, {**tensors, "d.bias": torch.full((7,), torch.nan)})

    assert _attempt(good, checkpoint).done
    assert "outside of the server's weights directory" in _attempt(outside, checkpoint).error
    assert "outside of the server's weights directory" in _attempt(linked, checkpoint).error
    assert "2 parameters were not sent, the first ['c.weight', 'd.bias']" in _attempt(fewer, checkpoint).error
    assert "the model has no parameter 'e.weight'" in _attempt(other, checkpoint).error
    assert "parameter 'd.bias': expected [7], found [8]" in _attempt(reshaped, checkpoint).error
    assert "found nan or infinity in 'd.bias'" in _attempt(broken, checkpoint).error
    (tmp_path / "weights" / "slot-1-rank-0" / "model.safetensors").unlink()
    assert "cannot be read" in _attempt(good, checkpoint).error
    monkeypatch.setenv(staging.WEIGHTS_DIR, "")
    assert "takes no weight updates" in _attempt(good, checkpoint).error


def test_attempt_receives_a_broadcast_and_uses_the_group_again(tmp_path, monkeypatch):
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
            groups.append(state.receivers[0]._name)
        assert groups[0] == groups[1] != ""
    finally:
        sender.close()


def test_attempt_that_refuses_a_broadcast_tells_the_trainer_why(tmp_path, monkeypatch):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = _tensors(0)
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    sender = open_sender("broadcast", Address("127.0.0.1", timeout=30.0).location)
    try:
        meta = with_rank(sender.begin(1, _specs(tensors)), 1, 2)
        attempt = staging.Attempt({**meta.to_json(), "area": AREA}, staging.State())
        attempt.checkpoint = tmp_path
        attempt.run()

        with pytest.raises(Exception, match=r"receiver 1 refuses: the model has no parameter 'a\.weight'"):
            sender.send(iter(tensors.items()))
        assert "the model has no parameter 'a.weight'" in attempt.error
    finally:
        sender.close()


# ---- the doors


class _Engine:
    """What the guard asks of vLLM's engine, remembered."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.given: dict[str, Any] = {}
        self.cleared, self.error = True, ""
        self.loads = asyncio.Event()
        self.loads.set()
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))

    async def check_health(self) -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        self.asked.append(("version", version))

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.asked.append(("resume",))

    async def sleep(self, level: int, mode: str) -> None:
        self.asked.append(("sleep", level))

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.asked.append(("reset", running))
        return self.cleared

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        self.asked.append((method,))
        self.given |= kwargs or {}
        if method == "rl_load":
            await self.loads.wait()
            if self.error:
                raise RuntimeError(self.error)
        sums = {"a": "18446744073709551615"}
        return [{"done": True, "error": self.error, "checksums": sums, "shared": sums}]


class _Door:
    """A guard before an application that tells what it was sent."""

    def __init__(self) -> None:
        self.engine = _Engine()
        self.seen: list[bytes] = []
        self.guard = extension.Guard(self._inner)

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((await receive()).get("body", b""))
        await guard.answer(send, 200, {"path": scope["path"]})

    async def ask(
        self, path: str, body: Any = None, key: str = "", method: str = ""
    ) -> tuple[int, dict[str, Any], dict[bytes, bytes]]:
        """Status, JSON and headers."""
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


async def test_guard_asks_for_the_key_on_every_route_and_gives_agents_little(monkeypatch):
    monkeypatch.setenv(guard.KEY, "secret")
    door = _Door()
    agent = hmac.new(b"secret", b"generation", "sha256").hexdigest()

    routes = ["/pause", "/collective_rpc", "/metrics", "/v1/load_lora_adapter", "/rl/commit", "/docs", "/rl/stats"]
    without = {path: (await door.ask(path, {}))[0] for path in routes}
    wrong = {path: (await door.ask(path, {}, "secre"))[0] for path in routes}
    agents = {path: (await door.ask(path, {}, agent))[0] for path in routes[:-1]}

    assert set(without.values()) == set(wrong.values()) == {401}
    assert set(agents.values()) == {403}
    assert door.seen == door.engine.asked == []
    door.guard._warm = asyncio.create_task(door.engine.check_health())
    assert (await door.ask("/health"))[0] == 200
    for path in ("/inference/v1/generate", "/v1/chat/completions"):
        assert (await door.ask(path, {"token_ids": [1]}, agent))[0] == 200
    assert (await door.ask("/metrics", key="secret"))[0] == 200


async def test_guard_is_not_healthy_before_the_first_tokens_were_made(monkeypatch):
    door, made = _Door(), asyncio.Event()

    async def warm_up(engine: Any) -> None:
        assert engine is door.engine
        await made.wait()

    monkeypatch.setattr(extension, "_warm_up", warm_up)
    monkeypatch.setattr(guard, "ANSWER_SECONDS", 0.01)

    assert (await door.ask("/health"))[0] == 503
    made.set()
    assert (await door.ask("/health"))[0] == 200


async def test_guard_says_who_answers_and_which_version_and_salts_prefixes_with_it(monkeypatch):
    monkeypatch.setenv(guard.VERSION, "4")
    door = _Door()
    update = {"meta": {"version": 5, "route": "disk", "parts": []}, "timeout": 5}

    _, _, before = await door.ask("/inference/v1/generate", {"token_ids": [1]})
    status, receipt, _ = await door.ask("/rl/stage", update)
    assert (status, receipt["version"], receipt["checksums"]) == (200, 5, {"a": "18446744073709551615"})
    await door.ask("/rl/pause", {"mode": "keep", "lease": 60})
    waiting = asyncio.ensure_future(door.ask("/inference/v1/generate", {"token_ids": [2]}))
    await asyncio.sleep(0)
    assert (await door.ask("/rl/commit", {"version": 5, "mode": "keep"}))[0] == 200
    assert not waiting.done()
    await door.ask("/rl/resume", {})
    _, _, after = await waiting

    assert (before[b"x-weight-version"], after[b"x-weight-version"]) == (b"4", b"5")
    assert before[b"x-server-instance"] == after[b"x-server-instance"] != b""
    assert [json.loads(body) for body in door.seen] == [
        {"cache_salt": "4", "token_ids": [1]},
        {"cache_salt": "5", "token_ids": [2]},
    ]
    assert door.engine.asked[-5:] == [
        ("pause", "keep", False),
        ("rl_load",),
        ("version", "5"),
        ("reset", True),
        ("resume",),
    ]
    assert (await door.ask("/rl/health"))[1]["version"] == 5


@pytest.mark.parametrize(
    "body", [b'{"cache_salt": "mine", "token_ids": [1]}', b' \n{"token_ids": [1]} ', b'{"cache_salt":"mine"}', b"{}"]
)
async def test_guard_salts_whatever_the_request_says(monkeypatch, body):
    monkeypatch.setenv(guard.VERSION, "4")
    door = _Door()

    await door.ask("/v1/completions", body)

    assert json.loads(door.seen[0]) == {**json.loads(body), "cache_salt": "4"}


async def test_guard_resumes_not_in_the_middle_of_a_load_whoever_asks():
    door = _Door()
    await door.ask("/rl/stage", {"meta": {"version": 1, "route": "disk", "parts": []}, "timeout": 5})
    await door.ask("/rl/pause", {"mode": "keep", "lease": 60})
    door.engine.loads.clear()
    committing = asyncio.ensure_future(door.ask("/rl/commit", {"version": 1, "mode": "keep"}))
    while ("rl_load",) not in door.engine.asked:  # noqa: ASYNC110 - a stand-in has no event
        await asyncio.sleep(0)
    resuming = asyncio.ensure_future(door.ask("/rl/resume", {}))
    assert not (await door.ask("/rl/health"))[1]["version"]
    assert ("resume",) not in door.engine.asked
    door.engine.loads.set()

    assert (await committing)[0] == (await resuming)[0] == 200
    assert door.engine.asked[-3:] == [("version", "1"), ("reset", True), ("resume",)]


async def test_guard_lets_nothing_through_that_it_cannot_salt():
    door = _Door()

    for body in (b"[1]", '{"token_ids": [1]}'.encode("utf-16"), b'\xef\xbb\xbf{"token_ids": [1]}'):
        assert (await door.ask("/v1/completions", body))[0] == 400
    assert door.seen == []


@pytest.mark.parametrize("mode", ["keep", "recompute", "wait"])
async def test_guard_refuses_a_commit_of_what_is_not_staged_and_a_cache_that_was_kept(mode):
    door = _Door()

    status, told, _ = await door.ask("/rl/commit", {"version": 7, "mode": "keep"})
    assert (status, told["error"]["message"]) == (
        400,
        "commit of version 7: staged is None, served is 0. Stage it first.",
    )
    await door.ask("/rl/stage", {"meta": {"version": 7, "route": "disk", "parts": []}, "timeout": 5})
    door.engine.cleared = False
    status, told, _ = await door.ask("/rl/commit", {"version": 7, "mode": mode})
    assert status == 500
    assert "prefix cache of the weights before could not be emptied" in told["error"]["message"]


async def test_guard_goes_on_when_the_lease_of_a_pause_is_over():
    door = _Door()
    await door.ask("/rl/pause", {"mode": "keep", "lease": 0.01})

    async with asyncio.timeout(10):
        await door.ask("/inference/v1/generate", {"token_ids": [1]})

    assert door.engine.asked[-1] == ("resume",)


async def test_guard_lease_ends_no_load_in_the_middle():
    door = _Door()
    await door.ask("/rl/stage", {"meta": {"version": 7, "route": "disk", "parts": []}, "timeout": 5})
    await door.ask("/rl/pause", {"mode": "keep", "lease": 0.01})
    door.engine.loads.clear()
    commit = asyncio.ensure_future(door.ask("/rl/commit", {"version": 7, "mode": "keep"}))
    async with asyncio.timeout(10):
        while not hasattr(door.guard, "_late"):  # noqa: ASYNC110 - a timer has no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert ("resume",) not in door.engine.asked

    door.engine.loads.set()
    await commit
    await door.guard._late

    assert door.engine.asked[-2:] == [("reset", True), ("resume",)]


async def test_guard_lease_wakes_no_server_that_sleeps():
    door = _Door()
    await door.ask("/rl/pause", {"mode": "keep", "lease": 0.05})
    await door.ask("/rl/sleep", {})

    await asyncio.sleep(0.2)

    assert door.engine.asked[-1] == ("sleep", 1)


async def test_guard_that_could_not_load_says_why_and_ends_its_process(monkeypatch):
    door, ended = _Door(), asyncio.Event()
    await door.ask("/rl/stage", {"meta": {"version": 7, "route": "disk", "parts": []}, "timeout": 5})
    door.engine.error = "half of it is gone"
    monkeypatch.setattr(guard, "end_process", ended.set)

    status, told, _ = await door.ask("/rl/commit", {"version": 7, "mode": "keep"})

    assert status == 500
    assert "route disk, version 7 was not loaded: half of it is gone" in told["error"]["message"]
    assert (await door.ask("/rl/resume", {}))[0] == 400
    assert ("resume",) not in door.engine.asked
    async with asyncio.timeout(10):
        await ended.wait()


def test_end_process_waits_for_nothing_and_leaves_no_child():
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
    done = subprocess.run([sys.executable, "-c", code, str(INSIDE)], capture_output=True, text=True, timeout=60)

    assert (done.returncode, "waited" in done.stdout) == (1, False)
    child, deadline = int(done.stdout.split()[0]), time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):  # it was killed, and may take a moment
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# ---- what comes by broadcast


def test_area_has_a_name_of_its_own_and_those_of_the_dead_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "AREAS", tmp_path)
    mine = [Path(stored.make_area("vllm")) for _ in range(2)]
    head, _, _, end = mine[0].name.rsplit("-", 3)
    kind, namespace = head.rsplit("-", 1)
    of_another_container, dead = (tmp_path / f"{name}-1-2-{end}" for name in (f"{kind}-7", f"{kind}-{namespace}"))
    of_another_container.mkdir()
    dead.mkdir()
    (dead / "0").write_bytes(b"weights")

    mine.append(Path(stored.make_area("vllm")))

    assert len(set(mine)) == 3
    assert set(tmp_path.iterdir()) == {*mine, of_another_container}


@pytest.mark.parametrize("error", ["", "the trainer was lost"])
async def test_guard_leaves_nothing_of_a_broadcast_in_shared_memory(tmp_path, monkeypatch, error):
    monkeypatch.setattr(stored, "AREAS", tmp_path)
    door = _Door()
    door.engine.error = error

    meta = {"version": 7, "route": "broadcast", "parts": []}
    status, _, _ = await door.ask("/rl/stage", {"meta": meta, "timeout": 5})

    assert status == (400 if error else 200)
    assert Path(door.engine.given["meta"]["area"]).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


class _Worker(extension.WeightStage):
    """A rank that does not fetch."""

    rank = 1
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="no directory"))


@pytest.mark.parametrize("other", [False, True])
def test_rank_that_does_not_fetch_finds_what_the_first_has_fetched(tmp_path, monkeypatch, other):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = _tensors(0)
    meta, sums = _sent("shm", tmp_path, 3, tensors)
    worker = _Worker()
    worker.rl_stage(meta.to_json())
    assert worker.rl_staged()["done"]

    worker.rl_share({name: str(total + (other and name == "d.bias")) for name, total in sums.items()})
    [thread] = [each for each in threading.enumerate() if each.name == "rl-share"] or [None]
    if thread is not None:
        thread.join(30)

    state = worker.rl_staged()
    assert (state["done"], "parameter 'd.bias': this rank finds other weights" in state["error"]) == (not other, other)


def test_compare_names_a_parameter_that_is_served_as_it_was():
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
    with pytest.raises(RuntimeError, match=r"parameter 'mlp\.up\.weight': served is something else"):
        extension.compare(model, staged)


class UnquantizedMethod:
    """What vLLM does with a head on a CPU: multiply with a copy of the weights."""

    def process_weights_after_loading(self, head: Any) -> None:
        packed = head.weight.detach().clone()
        head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)


def test_repack_renews_the_copy_that_a_tied_head_multiplies_with():
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


def test_receipt_of_the_guard_is_one_of_ours():
    told = guard.told(3, [{"checksums": {"a": "5"}}])

    sums = {name: int(text) for name, text in told["checksums"].items()}
    assert WeightReceipt(told["holder"], told["version"], sums) == WeightReceipt("server", 3, {"a": 5})


# ---- both ends


async def _driven(door: _Door, exchange: Any) -> Any:
    """What an exchange of the protocol returns, when the guard answers."""
    call = next(exchange)
    while True:
        _, value, _ = await door.ask(call.target, call.body)
        try:
            call = exchange.send(call.parse(json.dumps(value).encode()))
        except StopIteration as end:
            return end.value


async def test_protocol_and_guard_understand_each_other(monkeypatch):
    monkeypatch.setenv(guard.VERSION, "4")
    door, protocol = _Door(), VLLMProtocol(version=4)
    meta = WeightUpdateMeta("disk", 5, ())

    receipt = await _driven(door, protocol.load(meta, 5.0))
    paused = await _driven(door, protocol.pause("recompute", 60.0))
    await _driven(door, protocol.commit(5, "recompute"))
    seconds = await _driven(door, protocol.resume())

    assert receipt == WeightReceipt("server", 5, {"a": 2**64 - 1})
    assert (paused, seconds >= 0) == (None, True)
    assert await _driven(door, protocol.health()) == Health(5, 0)
    assert ("reset", True) in door.engine.asked
    assert (await _driven(door, protocol.receipt())).version == 5


def test_describe_refuses_a_server_whose_log_probs_are_raw():
    said = {"model_path": "/m", "version": 3, "weights_dir": "/w", "logprobs_mode": "processed_logprobs"}

    def described(value: dict[str, Any]) -> Any:
        exchange = VLLMProtocol().describe()
        call = next(exchange)
        try:
            exchange.send(call.parse(json.dumps(value).encode()))
        except StopIteration as end:
            return end.value

    assert described(said) == ServedModel("/m", 3, "/w")
    sglang = described({"model_path": "/m", "version": 3, "weights_dir": "/w", "server": "sglang 0.5.23"})
    assert sglang == ServedModel("/m", 3, "/w", "sglang 0.5.23")  # has no such mode; the command says what it expected
    with pytest.raises(InferenceError, match="--logprobs-mode processed_logprobs"):
        described({**said, "logprobs_mode": "raw_logprobs"})
