"""Real Ray clusters of `infra/clusters/ray.py` for tests, which are skipped if Ray is not installed."""

import importlib.util
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "infra" / "clusters" / "ray.py"


def _load():
    spec = importlib.util.spec_from_file_location("infra_clusters_ray", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


clusters = _load()


def _reset_token_cache():
    """Clear Ray's cached authentication token, if this process has loaded Ray."""
    if "ray" in sys.modules:
        from ray._private.authentication_test_utils import reset_auth_token_state

        reset_auth_token_state()


@contextmanager
def ray(**shape):
    """Run a cluster, which commands started by this process use until it ends."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; run `uv sync`")
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RAY_")}
    with clusters.running(**shape) as cluster:
        os.environ.update(cluster.environment)
        _reset_token_cache()
        try:
            yield cluster
        finally:
            for name in cluster.environment:
                os.environ.pop(name)
            os.environ.update(before)
            _reset_token_cache()
    assert not any(cluster.processes(number) for number in range(9))
