"""When a server counts as lost."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_contracts.scheduler import JobSpec, Worker
from rl_contracts.testing.waiting import wait_until
from rl_launchers.supervise import server_health
from rl_launchers.supervise.server_health import RestartConfig, ServerHealth


@pytest.mark.nightly
@pytest.mark.parametrize("was_back", [True, False])
def test_server_that_hangs_as_soon_as_it_is_back_is_started_anew_after_the_health_timeout(monkeypatch, was_back):
    """And one that never was has the time that its role gives it to start."""
    says, started = {"now": "it answered 503"}, []
    monkeypatch.setattr(server_health, "probe", lambda *_: says["now"])
    scheduler = SimpleNamespace(restart_worker=lambda worker, why: started.append(why))
    spec = JobSpec("rollout", ("serve",), ready_path="/health", ready_timeout=600.0)
    worker = Worker("rollout", 0, "here", 1, Path("r.log"), restarts=1)
    care = ServerHealth(scheduler, RestartConfig(health_timeout=1.0, health_interval=2.0), [spec])

    def goes_on(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            care.restart_unhealthy([worker])
            time.sleep(0.02)

    try:
        goes_on(0.5)
        says["now"] = None if was_back else "it answered 503"
        goes_on(0.8)
        says["now"] = "timed out"
        if was_back:
            wait_until(lambda: care.restart_unhealthy([worker]) or started, 10.0)
            assert started[0].startswith("it gave no good answer for 1 s (last: timed out)")
        else:
            goes_on(4.0)
            assert not started
    finally:
        care.close()
