"""The real Slurm of `infra/clusters/slurm.py` for tests: skipped, with the reason, where it cannot be had."""

import importlib.util
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "infra" / "clusters" / "slurm.py"


def _load():
    spec = importlib.util.spec_from_file_location("infra_clusters_slurm", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


clusters = _load()


@contextmanager
def slurm(**shape):
    """A cluster of its own, to which Slurm's commands of this process speak meanwhile."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root")
    try:
        clusters.install()
    except RuntimeError as error:
        pytest.skip(f"Slurm cannot be installed: {error}")
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SLURM")}
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:  # short: sockets are in it
        with clusters.running(Path(directory), clusters.Shape(**shape)) as cluster:
            os.environ.update(cluster.environment)
            try:
                yield cluster
            finally:
                os.environ.pop("SLURM_CONF")
                os.environ.update(before)
        assert cluster.processes() == []
