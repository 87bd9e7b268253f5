"""Launcher side of the node agents, with agents that the tests simulate."""

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
from rl_launchers.testing import LocalNodes


class SimulatedMachines(LocalNodes):
    """Starts no processes; an agent counts as ended once a test sets its reason in `why`."""

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
def machines() -> SimulatedMachines:
    return SimulatedMachines()


@pytest.fixture
def agents(machines: SimulatedMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgents]:
    monkeypatch.setattr(module, "END_SECONDS", 0.5)
    node_agents = NodeAgents(machines, {}, tmp_path, {}, "127.0.0.1")
    node_agents.start(machines.nodes())
    yield node_agents
    node_agents.close()
    assert not any(thread.is_alive() for thread in node_agents._threads)


def connect(agents: NodeAgents, name: str) -> MessageConnection:
    host, _, port = agents._address.rpartition(":")
    wire = connect_to_launcher(host, int(port), agents._secret)
    wire.send({"hello": name})
    return wire


def next_order_id(wire: MessageConnection, order: str) -> int:
    """Receive messages up to the next order of this kind and return its id."""
    while (message := wire.receive())["do"] != order:
        pass
    return int(message["id"])


def lose(agents: NodeAgents, machines: SimulatedMachines, name: str) -> None:
    machines.why[name] = "was killed by SIGKILL"
    agents.check()


def seconds_of(threads: list[threading.Thread]) -> float:
    """Return the CPU time of these threads. Other threads of the process may be busy."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def test_request_with_loss_of_machine_others_still_reply(agents: NodeAgents, machines: SimulatedMachines) -> None:
    wires = {node.name: connect(agents, node.name) for node in machines.nodes()}
    agents.wait(lambda: None)
    first = agents.request(agents._machines["node0"], "meet", role="actor")
    order_id = next_order_id(wires["node0"], "meet")

    lose(agents, machines, "node0")
    wires["node0"].send({"answer": order_id, "result": 1})
    with pytest.raises(LaunchError, match="node0 was lost: it was killed by SIGKILL"):
        first.result(5)

    second = agents.request(agents._machines["node1"], "meet", role="actor")
    wires["node1"].send({"answer": next_order_id(wires["node1"], "meet"), "result": 2})
    assert second.result(5) == 2
    for wire in wires.values():
        wire.close()


def test_connection_of_lost_machine_is_closed_and_uses_no_cpu(agents: NodeAgents, machines: SimulatedMachines) -> None:
    lose(agents, machines, "node0")
    wire = connect(agents, "node0")
    with pytest.raises((EOFError, OSError)):
        wire.receive()
    assert agents._machines["node0"].wire is None
    wire.close()
    connect(agents, "node1").close()  # connects and leaves again
    wait_until(lambda: agents._machines["node1"].lost != "")
    before = seconds_of(agents._threads)
    time.sleep(0.5)
    assert seconds_of(agents._threads) - before < 0.25


def test_agent_disconnects_machine_lost_with_reason_of_provider(
    agents: NodeAgents, machines: SimulatedMachines
) -> None:
    wires = [connect(agents, node.name) for node in machines.nodes()]
    agents.wait(lambda: None)
    machines.why["node0"] = "is unreachable: the Ray driver process ended"

    for wire in wires:
        wire.close()

    wait_until(lambda: all(machine.lost for machine in agents._machines.values()))
    assert agents._machines["node0"].lost == machines.why["node0"]
    assert "lost its connection" in agents._machines["node1"].lost


def test_wait_detects_losses_of_connected_and_missing_machines(agents: NodeAgents, machines: SimulatedMachines) -> None:
    wire = connect(agents, "node0")
    threading.Timer(0.2, machines.why.update, [{"node0": "was killed"}]).start()
    threading.Timer(0.6, machines.why.update, [{"node1": "never began"}]).start()
    agents.wait(lambda: None)
    assert {name: machine.lost for name, machine in agents._machines.items()} == machines.why
    wire.close()


def test_agent_without_timely_connection_error_names_setting(machines: SimulatedMachines, tmp_path: Path) -> None:
    machines.start_seconds = 0.2
    agents = NodeAgents(machines, {}, tmp_path, {}, "127.0.0.1")
    agents.start(machines.nodes()[:1])
    agents.wait(lambda: None)
    assert "launcher.options.host" in agents._machines["node0"].lost
    assert "node node0 (127.0.0.1): its agent" in str(agents.failure(agents._machines["node0"]))
    agents.close()


def test_accept_recovers_after_running_out_of_file_descriptors(
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
    wire = connect(agents, "node0")
    wait_until(lambda: agents._machines["node0"].wire is not None)
    assert caplog.text.count("Too many open files") == 1
    wire.close()


def test_slow_unauthenticated_connections_are_limited_and_closed(
    agents: NodeAgents, machines: SimulatedMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALLERS", 8)
    monkeypatch.setattr(module, "MESSAGE_SECONDS", 1.0)
    host, _, port = agents._address.rpartition(":")
    peers = [socket.create_connection((host, int(port))) for _ in range(24)]
    threads = threading.active_count()
    wait_until(lambda: len(agents._authenticating) == 8)
    for _ in range(5):
        for peer in peers:
            with suppress(OSError):
                peer.sendall(b"\0")
        assert len(agents._authenticating) <= 8
        assert threading.active_count() <= threads + 8
        time.sleep(0.1)
    wire = connect(agents, "node0")  # it connects once the other connections are closed
    wait_until(lambda: agents._machines["node0"].wire is not None)
    wait_until(lambda: not agents._authenticating)
    for peer in (*peers, wire):
        peer.close()


def test_close_stops_listening_and_is_idempotent(agents: NodeAgents) -> None:
    host, _, port = agents._address.rpartition(":")
    agents.close()
    assert int(port) not in [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    agents.close()


def test_host_of_other_machine_is_rejected_with_setting_name(machines: SimulatedMachines, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"launcher\.options\.host=10\.255\.255\.1: "):
        NodeAgents(machines, {}, tmp_path, {}, "10.255.255.1")


def test_init_deletes_secrets_file_of_killed_launcher(machines: SimulatedMachines, tmp_path: Path) -> None:
    stale = tmp_path / ".agents-0123"
    stale.write_text("key")
    NodeAgents(machines, {}, tmp_path, {}, "127.0.0.1").close()
    assert not list(tmp_path.glob(".agents-*"))


@pytest.mark.parametrize("silent", ["launcher", "agent"])
def test_receive_of_incomplete_message_fails_after_timeout(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    from rl_launchers.cluster import messages

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[MessageConnection] = []

        def accept() -> None:
            peer, _ = listener.accept()
            with peer:
                accepted.append(messages.accept_agent(peer, b"secret", patience=0.3))

        thread = threading.Thread(target=accept)
        thread.start()
        agent_side = connect_to_launcher("127.0.0.1", listener.getsockname()[1], b"secret", patience=0.3)
        thread.join()
    sender, receiver = (accepted[0], agent_side) if silent == "launcher" else (agent_side, accepted[0])
    os.write(sender.fileno(), b"\0\0")
    began = time.monotonic()
    with pytest.raises((OSError, EOFError)):
        receiver.receive()
    assert time.monotonic() - began < 5
    sender.close()
    receiver.close()
    receiver.close()
