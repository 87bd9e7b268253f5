"""Real Slurm clusters of `infra/clusters/slurm.py` for tests, which are skipped if Slurm cannot run here."""

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
    """Run a cluster, which the Slurm commands of this process use until it ends."""
    if os.geteuid() != 0:
        pytest.skip("starting Slurm daemons requires root")
    try:
        clusters.install()
    except RuntimeError as error:
        pytest.skip(f"Slurm cannot be installed: {error}")
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SLURM")}
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:  # a short path, since socket paths are limited
        with clusters.running(Path(directory), clusters.Shape(**shape)) as cluster:
            os.environ.update(cluster.environment)
            try:
                yield cluster
            finally:
                os.environ.pop("SLURM_CONF")
                os.environ.update(before)
        assert cluster.processes() == []
