"""What an import of every module costs in processor time, compared with torch alone."""

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


def seconds(statement: str) -> float:
    """Processor seconds, not those of a clock: what else runs on the machine must not decide."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.nightly
def test_import_every_module_takes_at_most_1_3_times_torch_alone() -> None:
    modules = [
        info.name
        for info in pkgutil.walk_packages(rl_contracts.__path__, "rl_contracts.")
        if ".conformance" not in info.name
        and not info.name.endswith(("__main__", ".kernel"))  # a kernel is imported at its first use
    ]
    statement = "import " + ", ".join(modules)
    for warm in ("import torch", statement):
        seconds(warm)  # files into the cache

    # One after the other, so that both meet the same machine; the median of the pairs, as single ones are noisy.
    ratios = [seconds(statement) / seconds("import torch") for _ in range(ROUNDS)]

    assert statistics.median(ratios) <= LIMIT, ratios
