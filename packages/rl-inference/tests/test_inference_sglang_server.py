"""SGLang plugin without SGLang: its guard, weight loader and assignment of cores.

`tests/servers/test_servers_sglang.py` runs it inside the real server.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import rl_inference
from rl_contracts.testing import put_weights
from rl_inference.backends.embedded.protocol import generation_key

PLUGINS = Path(rl_inference.__file__).parent / "backends" / "plugins"


@pytest.fixture(scope="module")
def server() -> Iterator[ModuleType]:
    """Module imported with the same path as in the server."""
    sys.path.insert(0, str(PLUGINS))
    try:
        yield importlib.import_module("sglang_server")
    finally:
        sys.path.remove(str(PLUGINS))


class App:
    """ASGI application that replies to every request with status 200, and ends the body once `may_finish` is set."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.started, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_finish.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b'{"meta_info": {"completion_tokens": %d}}'
        await send({"type": "http.response.body", "body": body % 3, "more_body": True})
        self.started.set()
        await self.may_finish.wait()
        await send({"type": "http.response.body", "body": body % 5})


async def request(
    guard: Any, path: str, key: str = "", body: dict[str, Any] | None = None
) -> tuple[int, Any, dict[str, str]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    method = "GET" if body is None else "POST"
    await guard({"type": "http", "path": path, "headers": headers, "method": method}, receive, send)
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(sent[-1]["body"]), names


async def test_guard_without_valid_key_permits_only_one_freeze_gc(server: ModuleType) -> None:
    app = App()
    guard = server.Guard(app, "secret")

    for path in ("/generate", "/server_info", "/update_weights_from_disk", "/metrics", "/rl/stats"):
        for key in ("", "other"):
            status, reply, _ = await request(guard, path, key)
            assert (status, reply["error"]["message"][:27]) == (401, "the request carries no vali"), path
    assert not app.paths
    assert [(await request(guard, "/freeze_gc", body={}))[0] for _ in range(2)] == [200, 401]


async def test_guard_generation_key_permits_only_generation_and_reads(server: ModuleType) -> None:
    app, key = App(), generation_key("secret")
    guard = server.Guard(app, "secret")

    assert [(await request(guard, path, key))[0] for path in ("/generate", "/v1/models", "/rl/health")] == [200] * 3
    for path in ("/rl/pause", "/update_weights_from_disk", "/server_info", "/flush_cache", "/abort_request"):
        assert (await request(guard, path, key, {}))[0] == 403
    assert (await request(guard, "/health"))[0] == 200
    assert app.paths == ["/generate", "/v1/models", "/health"]


async def test_guard_health_is_forwarded_until_first_success(server: ModuleType) -> None:
    app = App()
    guard = server.Guard(app, "secret")

    assert [(await request(guard, "/health"))[0] for _ in range(3)] == [200] * 3
    assert app.paths == ["/health"]


async def test_guard_counts_tokens_and_open_requests_while_streaming(server: ModuleType) -> None:
    app = App()
    guard = server.Guard(app)
    app.may_finish.clear()
    running = asyncio.create_task(request(guard, "/generate", body={}))
    await app.started.wait()

    _, health, headers = await request(guard, "/rl/health")
    tokens_while_streaming = guard._tokens
    app.may_finish.set()
    await running

    assert tokens_while_streaming == 3
    assert (health["open"], health["version"]) == (1, 0)
    assert headers["x-server-instance"] == health["instance"] == server.rl_guard.INSTANCE
    assert (guard._open_requests, guard._tokens, guard._messages) == (0, 5, 3)
    assert guard._busy_seconds > 0


async def test_guard_invalid_control_request_returns_400(server: ModuleType) -> None:
    guard = server.Guard(App())

    for path, body, expected in (
        ("/rl/pause", {}, "KeyError('mode')"),
        ("/rl/pause", {"mode": "stop", "lease": 1}, "expected keep, recompute or wait, found 'stop'"),
        ("/rl/commit", {"version": 3, "mode": "keep"}, "commit of version 3: staged is None, served is 0"),
        ("/rl/stage", {"timeout": 1}, "KeyError('meta')"),
    ):
        status, reply, _ = await request(guard, path, body=body)
        assert status == 400
        assert expected in reply["error"]["message"]
    assert (await request(guard, "/rl/receipt"))[0] == 400


def test_engine_failed_or_abandoned_broadcast_leaves_no_files(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(server.STAGE, str(tmp_path))
    monkeypatch.delenv(server.rl_staging.WEIGHTS_DIR, raising=False)
    engine = server.Engine(lambda: SimpleNamespace(server_args=SimpleNamespace(model_path="/m")))
    for clean_up in (engine.rl_staged, engine.rl_give_up):
        engine.rl_stage({"route": "broadcast", "version": 1, "parts": []})
        while not engine._state.attempt.error:
            time.sleep(0.01)
        Path(engine._area()).mkdir()
        clean_up()
        assert list(tmp_path.iterdir()) == []


class Model(torch.nn.Module):
    """Model with SGLang's layout: fused projections, and a padded embedding that is also the output head."""

    def __init__(self, loads: bool = True) -> None:
        super().__init__()
        self.loads = loads
        self.model = torch.nn.Module()
        self.model.qkv_proj = torch.nn.Linear(4, 8, bias=True)
        self.model.qkv_proj.output_sizes = [4, 2, 2]  # type: ignore[assignment]
        self.model.down_proj = torch.nn.Linear(4, 3, bias=False)
        self.model.embed_tokens = torch.nn.Embedding(6, 4)
        self.model.embed_tokens.org_vocab_size = 5  # type: ignore[assignment]
        self.lm_head = self.model.embed_tokens

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        if not self.loads:
            return
        with torch.no_grad():
            for kind in ("weight", "bias"):
                components = [tensors[f"model.{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")]
                getattr(self.model.qkv_proj, kind).copy_(torch.cat(components))
            self.model.down_proj.weight.copy_(tensors["model.down_proj.weight"])
            self.model.embed_tokens.weight[:5].copy_(tensors["model.embed_tokens.weight"])


def random_tensors() -> dict[str, torch.Tensor]:
    shapes = {f"model.{name}.{kind}": shape for name, size in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2))
              for kind, shape in (("weight", (size, 4)), ("bias", (size,)))}  # fmt: skip
    shapes |= {"model.down_proj.weight": (3, 4), "model.embed_tokens.weight": (5, 4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def stage(server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Write weights and the file with which the HTTP process announces them, and return the weights."""
    sent = random_tensors()
    meta, _ = put_weights(tmp_path, 1, list(sent.items()))
    (tmp_path / "meta.json").write_text(json.dumps({"meta": meta.to_json(), "place": None}))
    monkeypatch.setenv(server.STAGE, str(tmp_path))
    return sent


def test_load_staged_loads_weights(server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, model = stage(server, tmp_path, monkeypatch), Model()

    server.load_staged(model, [])

    assert not (tmp_path / server.FAILED).exists()
    assert torch.equal(model.model.qkv_proj.weight[4:6], sent["model.k_proj.weight"])


@pytest.mark.parametrize("name", ["qkv_proj.bias", "embed_tokens.weight"])
def test_compare_changed_parameter_raises(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent, model = stage(server, tmp_path, monkeypatch), Model()
    server.load_staged(model, [])
    with torch.no_grad():
        model.model.get_parameter(name).view(-1)[-5] += 1e-3

    with pytest.raises(RuntimeError, match=r"parameter '.*': the served tensor differs"):
        server.compare(model, sent)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("down_proj", {"tp_group": SimpleNamespace(world_size=2)}), ("embed_tokens", {"tp_size": 2})],
)
def test_compare_skips_only_split_parameters(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, attributes: dict[str, Any]
) -> None:
    """SGLang on a CPU may pad a shard to the shape of the full parameter."""
    sent, model = stage(server, tmp_path, monkeypatch), Model()
    server.load_staged(model, [])
    module = model.model.get_submodule(name)
    vars(module).update(attributes)
    with torch.no_grad():
        module.weight += 1e-3

    server.compare(model, sent)

    with torch.no_grad():
        model.model.qkv_proj.weight += 1e-3
    with pytest.raises(RuntimeError, match=r"q_proj\.weight.*the served tensor differs"):
        server.compare(model, sent)


def test_load_staged_without_effect_reports_to_http_process(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(server, tmp_path, monkeypatch)

    server.load_staged(Model(loads=False), [])

    assert "the served tensor differs" in (tmp_path / server.FAILED).read_text()


def test_cores_by_rank_are_disjoint_and_too_few_cores_exit(server: ModuleType) -> None:
    for nodes, allowed, ranks, expected in (
        (["0,1"], [0, 1], 1, ""),
        (["0,1", "2,3"], [0, 1, 2, 3], 2, ""),  # SGLang assigns one node per rank
        (["0,1"], [0, 1], 2, "0|1"),
        (["0,1,2", "8,9"], [0, 1, 2, 8, 9], 4, "0|1|2|8,9"),
        (["0,1", "2,3"], [0, 1, 2, 3, 4, 5, 6, 7], 4, "0|1|2|3"),  # one logical core per physical core
        (["4"], [4, 68], 2, "4|68"),  # too few physical cores
        ([], [68], 1, "68"),
    ):
        assert server.cores_by_rank(nodes, allowed, ranks) == expected
    with pytest.raises(SystemExit, match=r"tensor size 4 on CPUs: .*found 2"):
        server.cores_by_rank(["0,1"], [0, 1], 4)
