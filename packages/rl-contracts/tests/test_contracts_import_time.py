"""What an import of every module costs in time, compared with torch alone."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import time

import pytest

import rl_contracts

LIMIT = 1.3
ROUNDS = 3


def seconds(statement: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=300)
    return time.perf_counter() - begun


@pytest.mark.slow
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
    torch_alone = min(seconds("import torch") for _ in range(ROUNDS))

    assert min(seconds(statement) for _ in range(ROUNDS)) <= LIMIT * torch_alone
