"""Tests of weight routes with real servers, including the loss of a server or trainer during a transfer."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import RENDEZVOUS_ROUTES, ModelRequest, ParamSpec, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ReceiversLostError, WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing.waiting import wait_until
from rl_contracts.weights import WeightSender, broadcast, open_sender, verify_receipt
from rl_inference import EmbeddedEngine
from rl_inference.client.server_state import ServerState
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model, tiny_model

PROMPT = [5, 17, 40, 33, 21, 90]
STEP = 4.0
"""Timeout in seconds of a step of a transfer."""
DEADLINE = 30.0
"""Seconds within which every failure must be detected."""

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def new_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new") / "qwen3", seed=1)


def parameters(path: Path) -> Tensors:
    return [(name, p.detach()) for name, p in reference_model(path).named_parameters()]


def specs_of(tensors: Tensors) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors)


class Trainer:
    """Sender of a weight route, with a client of the servers that runs in a thread."""

    def __init__(self, addresses: list[str], route: str, location: str) -> None:
        self.loop = LoopThread("test")
        self.engine = EmbeddedEngine(spec=ServeSpec(update_timeout=DEADLINE), client=ClientConfig(progress_timeout=20))
        self.engine.initialize(addresses)
        self.sender: WeightSender = open_sender(route, location)
        self.receipts: Any = None

    def send(self, version: int, tensors: Any, specs: tuple[ParamSpec, ...]) -> WeightReceipt:
        """Send and stage a version, and return the trainer's receipt. Errors of the servers are in `receipts`."""
        meta = self.sender.begin(version, specs)
        if meta.route in RENDEZVOUS_ROUTES:
            self.receipts = self.loop.submit(self.engine.stage_weights(meta))
        trainer_receipt = WeightReceipt("trainer", version, self.sender.send(iter(tensors)))
        if meta.route not in RENDEZVOUS_ROUTES:
            self.receipts = self.loop.submit(self.engine.stage_weights(meta))
        return trainer_receipt

    def publish(self, version: int, tensors: Tensors) -> WeightReceipt:
        trainer_receipt = self.send(version, tensors, specs_of(tensors))
        for receipt in self.receipts.result(DEADLINE):
            verify_receipt(trainer_receipt, receipt, "test")
        self.loop.run(self.engine.commit_weights(version), DEADLINE)
        return trainer_receipt

    def generate(self, tokens: int = 5) -> Any:
        generation = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
        return self.loop.run(self.engine.agenerate(ModelRequest(list(PROMPT), generation, seed=1)), DEADLINE)

    def close(self) -> None:
        self.sender.close()
        self.loop.run(self.engine.destroy(), 10)
        self.loop.close()


@contextmanager
def serving(model: Path, folder: Path, count: int) -> Iterator[list[ServerProcess]]:
    servers = [
        ServerProcess(
            model, folder / f"server-{i}.log", options={"weights_dir": folder / "weights", "max_sequences": 8}
        )
        for i in range(count)
    ]
    try:
        for server in servers:
            server.start()
        yield [server.wait_ready() for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def start(model_path: Path, tmp_path: Path) -> Iterator[Any]:
    """Return a function `start(count, route, step)` that returns a trainer and its servers."""
    with ExitStack() as stack:

        def start(count: int, route: str = "broadcast", step: float = STEP) -> tuple[Trainer, list[ServerProcess]]:
            servers = stack.enter_context(serving(model_path, tmp_path, count))
            location = f"tcp://127.0.0.1:0?timeout={step}" if route == "broadcast" else str(tmp_path / "weights")
            trainer = Trainer([server.address for server in servers], route, location)
            stack.callback(trainer.close)
            return trainer, servers

        yield start


@pytest.mark.slow
def test_broadcast_reaches_generating_servers_and_reuses_its_group(
    start: Any, model_path: Path, new_model_path: Path
) -> None:
    trainer, servers = start(2)
    new, old = parameters(new_model_path), parameters(model_path)
    running = trainer.loop.submit(
        trainer.engine.agenerate(
            ModelRequest(list(PROMPT), GenerationConfig(max_new_tokens=400, min_new_tokens=400, ignore_eos=True))
        )
    )

    trainer.publish(1, new)
    group = trainer.sender._group  # type: ignore[attr-defined]
    trainer.publish(2, old)
    trainer.publish(3, new)

    assert trainer.sender._group is group  # type: ignore[attr-defined]
    assert set(running.result(DEADLINE).versions) >= {0}
    completions = [trainer.generate(20) for _ in servers]
    for completion in completions:
        assert completion.versions == [3] * 20
        expected = reference_logprobs(reference_model(new_model_path), PROMPT, completion.output_ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_broadcast_corrupted_names_route_version_and_parameter(
    start: Any, new_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = start(1)
    new = parameters(new_model_path)
    put = broadcast._Group.put

    def corrupt(self: Any, piece: torch.Tensor, landings: Any) -> Any:
        piece = piece.clone()
        piece.view(torch.uint8)[-1] ^= 1  # the end of the last parameter in the bucket
        return put(self, piece, landings)

    monkeypatch.setattr(broadcast._Group, "put", corrupt)
    trainer_receipt = trainer.send(1, new, specs_of(new))
    (receipt,) = trainer.receipts.result(DEADLINE)

    with pytest.raises(WeightUpdateError, match=f"route broadcast, version 1.*parameter '{new[-1][0]}' differs"):
        verify_receipt(trainer_receipt, receipt, "broadcast")
    assert trainer.generate().versions == [0] * 5
    monkeypatch.undo()
    trainer.publish(2, new)
    assert trainer.generate().versions == [2] * 5


@pytest.mark.slow
@pytest.mark.parametrize("route", ["shm", "broadcast"])
def test_version_sent_by_two_ranks_is_served_completely(start: Any, new_model_path: Path, route: str) -> None:
    trainer, _ = start(2, route)
    new = parameters(new_model_path)
    senders = [trainer.sender, open_sender(route, trainer.sender.location, rank=1)]
    halves = [new[::2], new[1::2]]
    for version in (1, 2):
        metas = [sender.begin(version, specs_of(half)) for sender, half in zip(senders, halves, strict=True)]
        meta = WeightUpdateMeta(route, version, tuple(part for each in metas for part in each.parts))
        staging = trainer.loop.submit(trainer.engine.stage_weights(meta)) if route in RENDEZVOUS_ROUTES else None
        with ThreadPoolExecutor(2) as pool:
            checksums = list(pool.map(lambda pair: pair[0].send(iter(pair[1])), zip(senders, halves, strict=True)))
        staging = staging or trainer.loop.submit(trainer.engine.stage_weights(meta))

        for receipt in staging.result(DEADLINE):
            verify_receipt(WeightReceipt("trainer", version, checksums[0] | checksums[1]), receipt, route)
        trainer.loop.run(trainer.engine.commit_weights(version), DEADLINE)

    completion = trainer.generate(20)
    expected = reference_logprobs(reference_model(new_model_path), PROMPT, completion.output_ids)
    assert completion.versions == [2] * 20
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    senders[1].close()


@pytest.mark.slow
def test_broadcast_wrong_parameters_raises_with_name_before_transfer(start: Any, new_model_path: Path) -> None:
    trainer, _ = start(2)
    new = parameters(new_model_path)
    name = "model.norm.weight"
    missing = [(n, t) for n, t in new if n != name]
    half = [(n, t.bfloat16() if n == name else t) for n, t in new]
    for tensors, match in (
        (missing, r"were not sent, the first \['model.norm.weight'\]"),
        (half, r"'model.norm.weight': expected torch.float32 \[32\], found torch.bfloat16 \[32\]"),
    ):
        with pytest.raises(WeightUpdateError, match=match):
            trainer.send(1, tensors, specs_of(tensors))
        with pytest.raises(WeightUpdateError, match=match):
            trainer.receipts.result(DEADLINE)

    assert trainer.generate().versions == [0] * 5
    trainer.publish(1, new)
    assert trainer.generate().versions == [1] * 5


def signal_before_last(tensors: Tensors, server: ServerProcess, signum: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and send a signal to the server before the last one."""
    for index, pair in enumerate(tensors):
        if index == len(tensors) - 1:
            server.signal(signum)
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)],
    ids=["killed", "frozen"],
)
def test_broadcast_server_lost_midway_is_evicted_and_resend_works(
    start: Any, new_model_path: Path, signum: int
) -> None:
    trainer, servers = start(2)
    new = parameters(new_model_path)
    trainer.publish(1, new)

    with suppress(WeightUpdateError):  # a small parameter may be sent before the loss is detected
        trainer.send(2, signal_before_last(new, servers[0], signum), specs_of(new))
    with pytest.raises(ReceiversLostError, match=servers[0].address):
        trainer.receipts.result(DEADLINE)

    assert trainer.generate().versions == [1] * 5  # the other server, which must not serve a partial version
    begin = time.monotonic()
    trainer.publish(2, new)
    assert time.monotonic() - begin < STEP  # no process still waits in the previous group
    assert trainer.generate().versions == [2] * 5
    assert trainer.loop.run(trainer.engine.stats(), DEADLINE)["servers"] == 1


@pytest.mark.nightly
def test_broadcast_server_that_does_not_join_is_evicted_in_time(start: Any, new_model_path: Path) -> None:
    trainer, servers = start(2)
    new = parameters(new_model_path)
    servers[1].signal(signal.SIGSTOP)

    with pytest.raises(WeightUpdateError, match=r"receiver 2 of 2 did not join within 4 s.*Joined: 1"):
        trainer.send(1, new, specs_of(new))
    with pytest.raises(ReceiversLostError, match=servers[1].address):
        trainer.receipts.result(DEADLINE)

    trainer.publish(1, new)
    assert trainer.generate().versions == [1] * 5


@pytest.mark.slow
def test_broadcast_servers_added_or_removed_between_updates_get_ranks(
    start: Any, model_path: Path, new_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, servers = start(3)
    new, old = parameters(new_model_path), parameters(model_path)
    names = {str(number): server.address for number, server in enumerate(servers)}
    engine = trainer.engine
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", 0.1)
    engine.follow_discovery(lambda: dict(names))
    first, second, third = (server.address for server in servers)
    trainer.publish(1, new)

    del names["2"]
    wait_until(lambda: engine.servers == [first, second])
    trainer.publish(2, old)
    assert served_version(servers[2]) == 1, "a removed server must not receive the version"
    names["3"] = third
    wait_until(
        lambda: any(
            server.address == third and server.state is ServerState.REJOINING for server in engine._router.servers
        )
    )
    assert engine.servers == [first, second], "without stored weights, it joins with the next update"
    trainer.publish(3, new)
    assert engine.servers == [first, second, third]

    trainer_receipt = trainer.send(4, old, specs_of(old))
    for receipt in trainer.receipts.result(DEADLINE):
        verify_receipt(trainer_receipt, receipt, "broadcast")
    del names["0"]
    wait_until(lambda: engine.servers == [second, third])
    servers[0].stop()
    trainer.loop.run(engine.commit_weights(4), DEADLINE)
    trainer.publish(5, new)

    expected = reference_logprobs(reference_model(new_model_path), PROMPT[:1], PROMPT[1:])
    for address in (second, third):
        scores = trainer.loop.run(engine.score(PROMPT, server=address), DEADLINE)
        assert scores[1:] == pytest.approx(expected, abs=1e-5)
    assert trainer.generate().versions == [5] * 5


def served_version(server: ServerProcess) -> int:
    with urllib.request.urlopen(server.address + "/health", timeout=10) as response:
        return int(json.load(response)["version"])


@pytest.mark.slow
def test_shm_server_killed_during_stage_is_evicted_update_continues(start: Any, new_model_path: Path) -> None:
    trainer, servers = start(2, "shm")
    new = parameters(new_model_path)
    servers[0].signal(signal.SIGSTOP)
    trainer_receipt = trainer.send(1, new, specs_of(new))
    servers[0].signal(signal.SIGKILL)  # it never responds

    (receipt,) = trainer.receipts.result(DEADLINE)
    verify_receipt(trainer_receipt, receipt, "shm")
    trainer.loop.run(trainer.engine.commit_weights(1), DEADLINE)

    assert trainer.generate().versions == [1] * 5


def _send_and_die(addresses: list[str], tensors: Tensors) -> None:
    """Run a trainer that kills itself before the last parameter."""
    trainer = Trainer(addresses, "broadcast", "tcp://127.0.0.1:0?timeout=4")

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(tensors):
            if index == len(tensors) - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    trainer.send(2, pairs(), specs_of(tensors))


@pytest.mark.slow
def test_trainer_killed_midway_servers_continue_and_new_trainer_publishes(
    start: Any,
    model_path: Path,
    new_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath))  # lets the new process import this module
    # a long timeout, because servers join only after the timeout of the killed trainer
    trainer, servers = start(2, step=10 * STEP)
    new = parameters(new_model_path)
    trainer.publish(1, parameters(model_path))
    addresses = [server.address for server in servers]
    process = multiprocessing.get_context("spawn").Process(
        target=_send_and_die, args=(addresses, [(n, t.clone()) for n, t in new]), daemon=True
    )

    process.start()
    process.join(60)

    assert process.exitcode == -signal.SIGKILL
    assert trainer.generate().versions == [1] * 5
    for server in servers:
        assert served_version(server) == 1
    trainer.publish(2, new)
    assert trainer.generate().versions == [2] * 5


@pytest.mark.gpu
def test_ipc_server_on_same_gpu_serves_sent_weights(model_path: Path, new_model_path: Path, tmp_path: Path) -> None:
    new = [(name, tensor.cuda()) for name, tensor in parameters(new_model_path)]
    options = {"weights_dir": tmp_path / "weights", "max_sequences": 8, "device": "cuda"}
    with ServerProcess(model_path, tmp_path / "server.log", options=options) as server:
        trainer = Trainer([server.address], "shm", str(tmp_path / "weights"))
        trainer.sender = open_sender("ipc", "", device="cuda")
        for version in (1, 2):
            trainer.publish(version, new)
        assert trainer.generate().versions == [2] * 5
        trainer.close()


@pytest.mark.multi_gpu  # NCCL supports one rank per GPU
def test_broadcast_nccl_server_on_next_gpu_serves_sent_weights(
    model_path: Path, new_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = [(name, tensor.to("cuda:0")) for name, tensor in parameters(new_model_path)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # only for the server: CUDA is already initialized in this process
    options = {"weights_dir": tmp_path / "weights", "max_sequences": 8, "device": "cuda"}
    command = (sys.executable, "-m", "rl_inference.embedded_server")
    with ServerProcess(model_path, tmp_path / "server.log", options=options, command=command) as server:
        trainer = Trainer([server.address], "shm", str(tmp_path / "weights"))
        trainer.sender = open_sender("broadcast", f"tcp://127.0.0.1:0?timeout={DEADLINE}", device="cuda:0")
        for version in (1, 2):
            trainer.publish(version, new)
        assert trainer.generate().versions == [2] * 5
        trainer.close()
