"""The launcher's side of the agents, with agents that a test plays itself."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import Node
from rl_contracts.testing.waiting import wait_until
from rl_launchers.cluster import node_agents as module
from rl_launchers.cluster.messages import MessageConnection, connect_to_launcher
from rl_launchers.cluster.node_agents import NodeAgents
from rl_launchers.testing import MachinesOfTests


class Played(MachinesOfTests):
    """Nothing is started; an agent has ended when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}

    def start(self, *_: object) -> None:
        pass

    def end_reason(self, node: Node) -> str:
        return self.why.get(node.name, "")

    def close(self) -> None:
        pass


@pytest.fixture
def machines() -> Played:
    return Played()


@pytest.fixture
def agents(machines: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgents]:
    monkeypatch.setattr(module, "END_SECONDS", 0.5)
    made = NodeAgents(machines, {}, tmp_path, {}, "127.0.0.1", start_timeout=5.0, silence=20.0)
    made.start(machines.nodes())
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


def call(agents: NodeAgents, name: str) -> MessageConnection:
    host, _, port = agents._address.rpartition(":")
    wire = connect_to_launcher(host, int(port), agents._secret)
    wire.send({"hello": name})
    return wire


def hear(wire: MessageConnection, order: str) -> int:
    """The number of the next such order."""
    while (message := wire.receive())["do"] != order:
        pass
    return int(message["id"])


def lose(agents: NodeAgents, machines: Played, name: str) -> None:
    machines.why[name] = "was killed, says srun"
    agents.check()


def seconds_of(threads: list[threading.Thread]) -> float:
    """The processor time of these threads alone: others of the same process may be at work."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


@pytest.mark.parametrize("lost_first", [True, False])
def test_answer_beside_a_loss_leaves_the_others_heard(agents: NodeAgents, machines: Played, lost_first: bool) -> None:
    wires = {node.name: call(agents, node.name) for node in machines.nodes()}
    agents.wait(lambda: None)
    asked = agents.request(agents._machines["node0"], "meet", role="actor")
    number = hear(wires["node0"], "meet")

    if lost_first:
        lose(agents, machines, "node0")
    wires["node0"].send({"answer": number, "result": 1})
    if lost_first:
        with pytest.raises(LaunchError, match="node node0 was lost: it was killed, says srun"):
            asked.result(5)
    else:
        assert asked.result(5) == 1
        lose(agents, machines, "node0")

    other = agents.request(agents._machines["node1"], "meet", role="actor")
    wires["node1"].send({"answer": hear(wires["node1"], "meet"), "result": 2})
    assert other.result(5) == 2
    for wire in wires.values():
        wire.close()


def test_caller_whose_machine_is_lost_is_hung_up_and_costs_nothing(agents: NodeAgents, machines: Played) -> None:
    lose(agents, machines, "node0")
    wire = call(agents, "node0")
    with pytest.raises((EOFError, OSError)):
        wire.receive()
    assert agents._machines["node0"].wire is None
    wire.close()
    call(agents, "node1").close()  # one that was there, and goes
    wait_until(lambda: agents._machines["node1"].lost != "")
    before = seconds_of(agents._threads)
    time.sleep(0.5)
    assert seconds_of(agents._threads) - before < 0.25


def test_agent_that_hangs_up_is_lost_for_its_providers_reason(agents: NodeAgents, machines: Played) -> None:
    wires = [call(agents, node.name) for node in machines.nodes()]
    agents.wait(lambda: None)
    machines.why["node0"] = "cannot be reached: Ray's driver is gone"

    for wire in wires:
        wire.close()

    wait_until(lambda: all(machine.lost for machine in agents._machines.values()))
    assert agents._machines["node0"].lost == machines.why["node0"]
    assert "not heard any more" in agents._machines["node1"].lost


def test_machine_is_lost_while_another_is_waited_for_is_seen(agents: NodeAgents, machines: Played) -> None:
    wire = call(agents, "node0")
    threading.Timer(0.2, machines.why.update, [{"node0": "was killed"}]).start()
    threading.Timer(0.6, machines.why.update, [{"node1": "never began"}]).start()
    agents.wait(lambda: None)
    assert {name: machine.lost for name, machine in agents._machines.items()} == machines.why
    wire.close()


def test_agent_that_calls_too_late_is_lost_with_the_setting(machines: Played, tmp_path: Path) -> None:
    agents = NodeAgents(machines, {}, tmp_path, {}, "127.0.0.1", start_timeout=0.2, silence=20.0)
    agents.start(machines.nodes()[:1])
    agents.wait(lambda: None)
    assert "launcher.options.start_timeout" in agents._machines["node0"].lost
    assert "node node0 (127.0.0.1): its agent did not call" in str(agents.failure(agents._machines["node0"]))
    agents.close()


def test_descriptors_run_out_for_a_moment_agents_can_call_afterwards(
    agents: NodeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, refused = socket.socket.accept, list[socket.socket]()

    def refuse(listener: socket.socket) -> object:
        if len(refused) < 3:
            refused.append(listener)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", refuse)
    wait_until(lambda: len(refused) == 3)
    wire = call(agents, "node0")
    wait_until(lambda: agents._machines["node0"].wire is not None)
    assert caplog.text.count("takes no calls of agents for now") == 1
    wire.close()


def test_strangers_that_drip_bytes_are_few_and_let_go_in_time(
    agents: NodeAgents, machines: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALLERS", 8)
    monkeypatch.setattr(module, "MESSAGE_SECONDS", 1.0)
    host, _, port = agents._address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(24)]
    threads = threading.active_count()
    wait_until(lambda: len(agents._proving) == 8)
    for _ in range(5):
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(b"\0")
        assert len(agents._proving) <= 8
        assert threading.active_count() <= threads + 8
        time.sleep(0.1)
    wire = call(agents, "node0")  # its turn comes
    wait_until(lambda: agents._machines["node0"].wire is not None)
    wait_until(lambda: not agents._proving)
    for peer in (*strangers, wire):
        peer.close()


def test_close_nothing_listens_and_may_be_called_again(agents: NodeAgents) -> None:
    host, _, port = agents._address.rpartition(":")
    agents.close()
    assert int(port) not in [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    agents.close()


@pytest.mark.parametrize("host", ["10.255.255.1", "no-such-host.invalid"])
def test_host_that_is_not_this_machine_is_refused_with_the_setting(machines: Played, tmp_path: Path, host: str) -> None:
    with pytest.raises(LaunchError, match=f"launcher.options.host={host}: expected an address of this machine"):
        NodeAgents(machines, {}, tmp_path, {}, host, start_timeout=5.0, silence=20.0)


def test_secrets_of_a_launcher_that_was_killed_go_with_the_next(machines: Played, tmp_path: Path) -> None:
    left = tmp_path / ".agents-0123"
    left.write_text("key")
    NodeAgents(machines, {}, tmp_path, {}, "127.0.0.1", start_timeout=5.0, silence=20.0).close()
    assert not list(tmp_path.glob(".agents-*"))


@pytest.mark.parametrize("silent", ["launcher", "agent"])
def test_peer_is_silent_in_the_middle_of_a_message_is_given_up(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    from rl_launchers.cluster import messages as wires

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours: list[MessageConnection] = []

        def accept() -> None:
            peer, _ = listener.accept()
            with peer:
                ours.append(wires.accept_agent(peer, b"secret", patience=0.3))

        thread = threading.Thread(target=accept)
        thread.start()
        theirs = connect_to_launcher("127.0.0.1", listener.getsockname()[1], b"secret", patience=0.3)
        thread.join()
    speaker, other = (ours[0], theirs) if silent == "launcher" else (theirs, ours[0])
    os.write(speaker.fileno(), b"\0\0")
    began = time.monotonic()
    with pytest.raises((OSError, EOFError)):
        other.receive()
    assert time.monotonic() - began < 5
    speaker.close()
    other.close()
    other.close()
