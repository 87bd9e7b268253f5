"""Components of a trainer process: the client of the servers, and requests to stop."""

import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import rl_apps.run.components
from rl_apps.programs import gsm8k_grpo
from rl_apps.run.app import Run
from rl_apps.run.components import Components, SigtermHandler
from rl_apps.settings.device_layout import layout_of
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import StopRequestedError
from rl_contracts.models import step_gate
from rl_contracts.models.step_gate import StepGate
from rl_contracts.runtime.name_service import FileNames
from rl_contracts.testing.waiting import wait_until


def _components(directory, *overrides, server="http://127.0.0.1:1"):
    config = gsm8k_grpo.APP.config(overrides)
    return Components(Run(config, layout_of(config.allocation, "required"), directory, "cpu", (server,)))


def _client(components, parallel=None):
    return components.client(SimpleNamespace(parallel=parallel or ParallelContext()))


@pytest.fixture
def servers_are_ready(monkeypatch):
    monkeypatch.setattr(Components, "await_servers", lambda components, spec, ranks: None)


def test_client_waits_for_lost_servers_only_if_they_are_restarted(tmp_path, servers_are_ready):
    def rejoin_timeout(*overrides):
        with _components(tmp_path, *overrides) as components:
            return _client(components).spec.rejoin_timeout

    assert rejoin_timeout() == 240
    assert rejoin_timeout("rollout.server.ready_timeout=7") == 67
    assert rejoin_timeout("launcher.max_restarts=0") == 0
    attached = "rollout.server.addresses=[http://127.0.0.1:1]"
    assert rejoin_timeout("launcher.max_restarts=0", attached) == 240, "the owner of the servers restarts them"


def test_client_evicts_slow_server_before_the_publication_fails(tmp_path, servers_are_ready):
    with _components(tmp_path, "publish.timeout=500") as components:
        assert _client(components).spec.update_timeout == pytest.approx(450)


@pytest.fixture
def sigterm():
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def test_stop_swallowed_by_an_import_ends_the_trainer(tmp_path, sigterm):
    signal.signal(signal.SIGTERM, SigtermHandler())
    with pytest.raises(SystemExit, match="143"):  # caught, as by a library that handles errors of an import
        os.kill(os.getpid(), signal.SIGTERM)

    with _components(tmp_path) as components, pytest.raises(SystemExit, match="143"):
        components.recovery({"actor": SimpleNamespace(parallel=ParallelContext())}, {})


def test_stop_is_requested_while_the_command_lives_else_exits(tmp_path, servers_are_ready, sigterm, monkeypatch):
    engine = SimpleNamespace(parallel=ParallelContext())
    with _components(tmp_path) as components:
        client = _client(components)
        checkpoints = components.recovery({"actor": engine}, {})
        assert not checkpoints.stop_requested()
        assert not client._router.final
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.stop_requested()
        assert client._router.final

        monkeypatch.setattr(os, "getppid", lambda: 1)  # the command was killed; the signal comes from its reaper
        for check in (checkpoints.stop_requested, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            with pytest.raises(SystemExit) as error:
                check()
            assert error.value.code == 143


def test_second_request_to_stop_abandons_the_running_step(tmp_path, sigterm, monkeypatch):
    gate = StepGate()
    monkeypatch.setattr(step_gate, "STEP", gate)
    monkeypatch.setattr(rl_apps.run.components, "ONE_REQUEST", 0.0)

    def is_abandoned():
        with gate.step():
            try:
                gate.begin_micro_batch()
            except StopRequestedError:
                return True
        return False

    with _components(tmp_path) as components:
        checkpoints = components.recovery({"actor": SimpleNamespace(parallel=ParallelContext())}, {})
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.stop_requested()
        assert not is_abandoned()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(is_abandoned, 10)
    assert signal.set_wakeup_fd(-1) == -1


class _Rank(ParallelContext):
    """One of two ranks that run one after the other: rank 1 receives what rank 0 has broadcast."""

    sent: ClassVar[list[Any]] = []

    def broadcast_json(self, value):
        if self.is_main:
            self.sent.append(value)
        return value if self.is_main else self.sent.pop(0)


def test_client_of_other_ranks_sends_nothing_to_the_servers(tmp_path):
    requests = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200 if len(requests) > 2 else 503)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    counts = []
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for rank in range(2):
            with _components(tmp_path, "allocation=embedded:d1+fsdp:t2", server=address) as components:
                _client(components, _Rank(rank, 2, is_dp_leader=rank == 0))
            counts.append(len(requests))
        server.shutdown()
    assert requests == ["/health"] * 3
    assert counts == [3, 3]


@pytest.mark.parametrize(("dp_leaders", "expected"), [(1, 2.0), (8, 16.0), (1000, 30.0)])
def test_client_probes_less_often_with_more_dp_leaders(tmp_path, servers_are_ready, dp_leaders, expected):
    with _components(tmp_path) as components:
        client = _client(components, ParallelContext(world_size=dp_leaders, dp_size=dp_leaders))
    assert client._monitor.probe_interval == expected


def test_client_follows_the_addresses_of_the_launcher(tmp_path, servers_are_ready):
    with _components(tmp_path) as components:
        source = _client(components)._monitor.discovery._source
        assert source() == {}
        assert not (tmp_path / "names").exists(), "reading names must not create the directory"
        names = FileNames(tmp_path / "names")
        names.add("servers/rollout/0", "http://127.0.0.1:1")
        names.add("servers/other/0", "http://127.0.0.1:2")

        assert source() == {"servers/rollout/0": "http://127.0.0.1:1"}
    with _components(tmp_path, "rollout.server.addresses=[http://127.0.0.1:1]") as components:
        assert _client(components)._monitor.discovery is None, "attached servers are those of the config"


def test_await_servers_ignores_a_server_that_was_moved(tmp_path):
    FileNames(tmp_path / "names").add("servers/rollout/0", "http://127.0.0.1:2")  # the trainer has port 1

    with _components(tmp_path, "rollout.server.ready_timeout=30") as components:
        _client(components)
