"""Test of the CPU time for importing every module, relative to torch."""

from __future__ import annotations

import pkgutil
import resource
import statistics
import subprocess
import sys

import pytest

import rl_contracts

LIMIT = 1.3
ROUNDS = 5


def cpu_seconds(statement: str) -> float:
    """Return the CPU seconds of a statement in a new process; wall time would depend on the load of the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.nightly
def test_import_every_module_takes_at_most_1_3_times_torch() -> None:
    modules = [
        info.name
        for info in pkgutil.walk_packages(rl_contracts.__path__, "rl_contracts.")
        if ".conformance" not in info.name
        and not info.name.endswith(("__main__", ".kernel"))  # kernels are imported on first use
    ]
    statement = "import " + ", ".join(modules)
    for warm_up in ("import torch", statement):
        cpu_seconds(warm_up)  # fills the file cache

    # measured in alternation, so that both see the same load; the median, because single pairs are noisy
    ratios = [cpu_seconds(statement) / cpu_seconds("import torch") for _ in range(ROUNDS)]

    assert statistics.median(ratios) <= LIMIT, ratios
