"""The client among the parts of a trainer process: who speaks to servers, how often, and for how long it waits."""

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


def _parts(directory, *overrides, server="http://127.0.0.1:1"):
    config = gsm8k_grpo.APP.config(overrides)
    return Components(Run(config, layout_of(config.allocation, "required"), directory, "cpu", (server,)))


def _client(parts, parallel=None):
    return parts.client(SimpleNamespace(parallel=parallel or ParallelContext()))


@pytest.fixture
def servers_are_ready(monkeypatch):
    monkeypatch.setattr(Components, "await_servers", lambda parts, spec, ranks: None)


def test_client_waits_for_returning_servers_only_where_somebody_restarts_them(tmp_path, servers_are_ready):
    def rejoin_timeout(*overrides):
        with _parts(tmp_path, *overrides) as parts:
            return _client(parts).config.rejoin_timeout

    assert rejoin_timeout() == 180
    assert rejoin_timeout("rollout.client.rejoin_timeout=7") == 7
    assert rejoin_timeout("launcher.max_restarts=0") == 0


@pytest.fixture
def sigterm():
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def test_request_to_stop_that_an_import_swallowed_ends_the_trainer_before_its_first_step(tmp_path, sigterm):
    signal.signal(signal.SIGTERM, SigtermHandler())
    with pytest.raises(SystemExit, match="143"):  # as a library catches it that tries an import
        os.kill(os.getpid(), signal.SIGTERM)

    with _parts(tmp_path) as parts, pytest.raises(SystemExit, match="143"):
        parts.recover({"actor": SimpleNamespace(parallel=ParallelContext())}, {})


def test_request_to_stop_counts_as_long_as_the_command_is_there_and_tells_the_client(
    tmp_path, servers_are_ready, sigterm, monkeypatch
):
    engine = SimpleNamespace(parallel=ParallelContext())
    with _parts(tmp_path) as parts:
        client = _client(parts)
        points = parts.recover({"actor": engine}, {})
        assert not points.stop_requested()
        assert not client._router.final
        os.kill(os.getpid(), signal.SIGTERM)
        assert points.stop_requested()
        assert client._router.final

        monkeypatch.setattr(os, "getppid", lambda: 1)  # it was killed, and its keeper was faster than the kernel
        for ask in (points.stop_requested, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            with pytest.raises(SystemExit) as ended:
                ask()
            assert ended.value.code == 143


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

    with _parts(tmp_path) as parts:
        points = parts.recover({"actor": SimpleNamespace(parallel=ParallelContext())}, {})
        os.kill(os.getpid(), signal.SIGTERM)
        assert points.stop_requested()
        assert not is_abandoned()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(is_abandoned, 10)
    assert signal.set_wakeup_fd(-1) == -1


class _Rank(ParallelContext):
    """One of two ranks that run one after the other: what rank 0 has told, rank 1 is told."""

    told: ClassVar[list[Any]] = []

    def broadcast_json(self, value):
        if self.is_main:
            self.told.append(value)
        return value if self.is_main else self.told.pop(0)


def test_client_of_a_rank_that_is_no_head_sends_nothing_to_the_servers(tmp_path):
    asked = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if len(asked) > 2 else 503)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    counts = []
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for rank in range(2):
            with _parts(tmp_path, "allocation=embedded:d1+fsdp:t2", server=address) as parts:
                _client(parts, _Rank(rank, 2, is_dp_leader=rank == 0))
            counts.append(len(asked))
        server.shutdown()
    assert asked == ["/health"] * 3
    assert counts == [3, 3]


@pytest.mark.parametrize(("heads", "expected"), [(1, 2.0), (8, 16.0), (15, 30.0), (1000, 30.0)])
def test_client_of_one_of_many_heads_probes_as_seldom_as_noticing_a_lost_server_allows(
    tmp_path, servers_are_ready, heads, expected
):
    with _parts(tmp_path) as parts:
        client = _client(parts, ParallelContext(world_size=heads, dp_size=heads))
    assert client.config.probe_interval == expected


def test_client_follows_the_names_that_the_launcher_keeps(tmp_path, servers_are_ready):
    with _parts(tmp_path) as parts:
        source = _client(parts)._monitor.discovery._source
        assert source() == {}
        assert not (tmp_path / "names").exists(), "who reads makes nothing"
        names = FileNames(tmp_path / "names")
        names.add("servers/rollout/0", "http://127.0.0.1:1")
        names.add("servers/other/0", "http://127.0.0.1:2")

        assert source() == {"servers/rollout/0": "http://127.0.0.1:1"}
    with _parts(tmp_path, "rollout.server.addresses=[http://127.0.0.1:1]") as parts:
        assert _client(parts)._monitor.discovery is None, "somebody else's servers are those that the config names"


def test_await_servers_one_that_was_moved_is_not_waited_for(tmp_path):
    FileNames(tmp_path / "names").add("servers/rollout/0", "http://127.0.0.1:2")  # the trainer was told port 1

    with _parts(tmp_path, "rollout.server.ready_timeout=30") as parts:
        _client(parts)
