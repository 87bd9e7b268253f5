"""Whether servers that were ready still answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rl_contracts.scheduler import JobSpec, Worker, WorkerStatus
from rl_launchers import readiness

PROBE_SECONDS = 5.0
"""Time for one answer, where the limit is not shorter."""
PROBES_AT_ONCE = 8
"""Threads that ask."""


@dataclass
class _Patient:
    pid: int | None
    due: float
    was_well: bool = False
    failing_since: float | None = None
    problem: str = ""
    probe: Future[str | None] | None = None


class HealthChecks:
    """Asks workers in threads for their readiness path, so that one that is silent holds up nobody.

    Args:
        interval: seconds between two questions to one worker.
        limit: seconds without a good answer after which a worker counts as hung. One that was started anew has its
            role's `ready_timeout` for its first good answer.
    """

    def __init__(self, interval: float, limit: float) -> None:
        self._interval, self._limit = interval, limit
        self._threads = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="health")
        self._patients: dict[str, _Patient] = {}

    def hung(self, workers: Iterable[tuple[Worker, JobSpec]]) -> list[tuple[Worker, str]]:
        """Those that have been silent for too long, and in words why they are thought to hang. Returns at once.

        Args:
            workers: all that should answer now, with their roles.
        """
        now, found = time.monotonic(), []
        for worker, spec in workers:
            if spec.ready_path is None or worker.port is None or worker.exit_code is not None:
                continue
            patient = self._patients.get(worker.name)
            if patient is None or patient.pid != worker.pid:
                patient = self._patients[worker.name] = _Patient(worker.pid, now)
            self._read(patient, worker, now)
            if patient.probe is None and now >= patient.due:
                patient.due = now + self._interval
                patient.probe = self._threads.submit(
                    readiness.probe, worker.host, worker.port, spec.ready_path, min(PROBE_SECONDS, self._limit)
                )
            limit = self._limit if patient.was_well or not worker.restarts else spec.ready_timeout
            if patient.failing_since is not None and now - patient.failing_since > limit:
                found.append((worker, f"gave no good answer for {limit:g} s (last: {patient.problem})"))
        return found

    def close(self) -> None:
        """Ask no more; questions under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, patient: _Patient, worker: Worker, now: float) -> None:
        if patient.probe is None or not patient.probe.done():
            return
        problem = patient.probe.result()
        patient.probe = None
        if problem is None:
            patient.was_well, patient.failing_since = True, None
            worker.status = WorkerStatus.RUNNING
        else:
            patient.problem = problem
            patient.failing_since = patient.failing_since or now
