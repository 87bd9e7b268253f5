"""Tests of `ServerHealth`: the time after which a restarted server counts as lost."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_contracts.scheduler import JobSpec, Worker
from rl_contracts.testing.waiting import wait_until
from rl_launchers.supervise import server_health
from rl_launchers.supervise.server_health import RestartConfig, ServerHealth


@pytest.mark.nightly
@pytest.mark.parametrize("was_ready", [True, False])
def test_restarted_server_hang_after_ready_is_found_by_health_timeout(monkeypatch, was_ready):
    """Until a restarted server is ready, the role's `ready_timeout` applies instead."""
    result, restarts = {"now": "status 503"}, []
    monkeypatch.setattr(server_health, "probe", lambda *_: result["now"])
    scheduler = SimpleNamespace(restart_worker=lambda worker, note: restarts.append(note))
    spec = JobSpec("rollout", ("serve",), ready_path="/health", ready_timeout=600.0)
    worker = Worker("rollout", 0, "here", 1, Path("r.log"), restarts=1)
    health = ServerHealth(scheduler, RestartConfig(health_timeout=1.0), [spec])

    def check_for(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health.restart_unhealthy([worker])
            time.sleep(0.02)

    try:
        check_for(0.5)
        result["now"] = None if was_ready else "status 503"
        check_for(0.8)
        result["now"] = "timed out"
        if was_ready:
            wait_until(lambda: health.restart_unhealthy([worker]) or restarts, 10.0)
            assert restarts[0].startswith("it failed its readiness checks for 1 s (last: timed out)")
        else:
            check_for(4.0)
            assert not restarts
    finally:
        health.close()
