"""What runs inside SGLang, without SGLang: the doors that it keeps, and how a version goes through them.

`tests/servers/test_servers_sglang.py` has it inside the real server."""

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

INSIDE = Path(rl_inference.__file__).parent / "backends" / "plugins"


@pytest.fixture(scope="module")
def server() -> Iterator[ModuleType]:
    """The file, imported as it is where it runs."""
    sys.path.insert(0, str(INSIDE))
    try:
        yield importlib.import_module("sglang_server")
    finally:
        sys.path.remove(str(INSIDE))


class App:
    """An ASGI application that answers everything with 200, what generates once it may."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun, self.may = asyncio.Event(), asyncio.Event()
        self.may.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b'{"meta_info": {"completion_tokens": %d}}'
        await send({"type": "http.response.body", "body": body % 3, "more_body": True})
        self.begun.set()
        await self.may.wait()
        await send({"type": "http.response.body", "body": body % 5})


async def ask(
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


@pytest.mark.parametrize("path", ["/generate", "/server_info", "/update_weights_from_disk", "/metrics", "/rl/stats"])
async def test_guard_lets_nobody_without_a_key_pass(server: ModuleType, path: str) -> None:
    app = App()
    guard = server.Guard(app, "secret")

    for key in ("", "other"):
        status, answer, _ = await ask(guard, path, key)
        assert (status, answer["error"]["message"][:27]) == (401, "the request carries no vali")
    assert not app.asked


async def test_guard_key_of_generation_generates_and_looks_alone(server: ModuleType) -> None:
    app, key = App(), generation_key("secret")
    guard = server.Guard(app, "secret")

    assert [(await ask(guard, path, key))[0] for path in ("/generate", "/v1/models", "/rl/health")] == [200] * 3
    for path in ("/rl/pause", "/update_weights_from_disk", "/server_info", "/flush_cache", "/abort_request"):
        assert (await ask(guard, path, key, {}))[0] == 403
    assert (await ask(guard, "/health"))[0] == 200
    assert app.asked == ["/generate", "/v1/models", "/health"]


async def test_guard_lets_sglang_freeze_itself_once(server: ModuleType) -> None:
    guard = server.Guard(App(), "secret")

    assert [(await ask(guard, "/freeze_gc", body={}))[0] for _ in range(2)] == [200, 401]


async def test_guard_asks_sglang_for_a_first_token_alone(server: ModuleType) -> None:
    app = App()
    guard = server.Guard(app, "secret")

    assert [(await ask(guard, "/health"))[0] for _ in range(3)] == [200] * 3
    assert app.asked == ["/health"]


async def test_guard_counts_tokens_as_they_come_and_what_is_open_until_its_last_byte(server: ModuleType) -> None:
    app = App()
    guard = server.Guard(app)
    app.may.clear()
    running = asyncio.create_task(ask(guard, "/generate", body={}))
    await app.begun.wait()

    _, health, headers = await ask(guard, "/rl/health")
    so_far = guard._tokens
    app.may.set()
    await running

    assert so_far == 3
    assert (health["open"], health["version"]) == (1, 0)
    assert headers["x-server-instance"] == health["instance"] == server.rl_guard.INSTANCE
    assert (guard._open, guard._tokens, guard._messages) == (0, 5, 3)
    assert guard._busy > 0


async def test_guard_refuses_what_is_no_request_of_a_route(server: ModuleType) -> None:
    guard = server.Guard(App())

    for path, body, sentence in (
        ("/rl/pause", {}, "not a request of this route: KeyError('mode')"),
        ("/rl/pause", {"mode": "stop", "lease": 1}, "expected keep, recompute or wait, found 'stop'"),
        ("/rl/commit", {"version": 3, "mode": "keep"}, "commit of version 3: staged is None, served is 0"),
        ("/rl/stage", {"timeout": 1}, "not a request of this route: KeyError('meta')"),
    ):
        status, answer, _ = await ask(guard, path, body=body)
        assert status == 400
        assert sentence in answer["error"]["message"]
    assert (await ask(guard, "/rl/receipt"))[0] == 400


def test_engine_leaves_nothing_of_a_broadcast_that_failed(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(server.STAGE, str(tmp_path))
    monkeypatch.delenv(server.rl_staging.WEIGHTS_DIR, raising=False)
    engine = server.Engine(lambda: SimpleNamespace(server_args=SimpleNamespace(model_path="/m")))
    for left in (engine.rl_staged, engine.rl_give_up):
        engine.rl_stage({"route": "broadcast", "version": 1, "parts": []})
        while not engine._state.attempt.error:
            time.sleep(0.01)
        Path(engine._area()).mkdir()
        left()
        assert list(tmp_path.iterdir()) == []


class Model(torch.nn.Module):
    """Parameters as SGLang keeps them: three in one, two in one, a padded embedding that is the head too."""

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
        given = dict(weights)
        if not self.loads:
            return
        with torch.no_grad():
            for kind in ("weight", "bias"):
                parts = [given[f"model.{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")]
                getattr(self.model.qkv_proj, kind).copy_(torch.cat(parts))
            self.model.down_proj.weight.copy_(given["model.down_proj.weight"])
            self.model.embed_tokens.weight[:5].copy_(given["model.embed_tokens.weight"])


def tensors() -> dict[str, torch.Tensor]:
    shapes = {f"model.{name}.{kind}": shape for name, size in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2))
              for kind, shape in (("weight", (size, 4)), ("bias", (size,)))}  # fmt: skip
    shapes |= {"model.down_proj.weight": (3, 4), "model.embed_tokens.weight": (5, 4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def staged(server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Weights on disk, and the word of the process that speaks HTTP where they are."""
    sent = tensors()
    meta, _ = put_weights(tmp_path, 1, list(sent.items()))
    (tmp_path / "meta.json").write_text(json.dumps({"meta": meta.to_json(), "place": None}))
    monkeypatch.setenv(server.STAGE, str(tmp_path))
    return sent


def test_loader_loads_what_is_staged(server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, model = staged(server, tmp_path, monkeypatch), Model()

    server.load_staged(model, [])

    assert not (tmp_path / server.FAILED).exists()
    assert torch.equal(model.model.qkv_proj.weight[4:6], sent["model.k_proj.weight"])


@pytest.mark.parametrize("name", ["qkv_proj.weight", "qkv_proj.bias", "down_proj.weight", "embed_tokens.weight"])
def test_comparison_finds_a_parameter_that_is_another(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent, model = staged(server, tmp_path, monkeypatch), Model()
    server.load_staged(model, [])
    with torch.no_grad():
        model.model.get_parameter(name).view(-1)[-5] += 1e-3

    with pytest.raises(RuntimeError, match="served is something else than was staged"):
        server.compare(model, sent)


@pytest.mark.parametrize(
    ("name", "split"),
    [("down_proj", {"tp_group": SimpleNamespace(world_size=2)}), ("embed_tokens", {"tp_size": 2})],
)
def test_comparison_leaves_out_what_is_split_and_no_more(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: dict[str, Any]
) -> None:
    """SGLang pads parts on a CPU, up to the shape of the whole."""
    sent, model = staged(server, tmp_path, monkeypatch), Model()
    server.load_staged(model, [])
    module = model.model.get_submodule(name)
    vars(module).update(split)
    with torch.no_grad():
        module.weight += 1e-3

    server.compare(model, sent)

    with torch.no_grad():
        model.model.qkv_proj.weight += 1e-3
    with pytest.raises(RuntimeError, match=r"q_proj\.weight.*served is something else than was staged"):
        server.compare(model, sent)


def test_loader_that_loads_nothing_says_so_to_the_process_that_speaks_http(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged(server, tmp_path, monkeypatch)

    server.load_staged(Model(loads=False), [])

    assert "the load missed it" in (tmp_path / server.FAILED).read_text()


@pytest.mark.parametrize(
    ("nodes", "allowed", "parts", "found"),
    [
        (["0,1"], [0, 1], 1, ""),
        (["0,1", "2,3"], [0, 1, 2, 3], 2, ""),  # SGLang itself gives each a node
        (["0,1"], [0, 1], 2, "0|1"),
        (["0,1,2", "8,9"], [0, 1, 2, 8, 9], 4, "0|1|2|8,9"),
        (["0,1", "2,3"], [0, 1, 2, 3, 4, 5, 6, 7], 4, "0|1|2|3"),  # not those that share a physical core
        (["4"], [4, 68], 2, "4|68"),  # unless there are no others
        ([], [68], 1, "68"),
    ],
)
def test_each_part_of_a_model_has_cores_of_its_own(
    server: ModuleType, nodes: list[str], allowed: list[int], parts: int, found: str
) -> None:
    assert server.cores_of_parts(nodes, allowed, parts) == found


def test_fewer_cores_than_parts_are_refused(server: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"tensor size 4 on CPUs: expected at least as many cores, found 2 that"):
        server.cores_of_parts(["0,1"], [0, 1], 4)
