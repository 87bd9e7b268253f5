"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

from rl_contracts.registry import load


def loaded_by(statement: str) -> set[str]:
    """Which heavy libraries a fresh interpreter has after a statement."""
    code = f"import sys; {statement}; print(*(m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_package_loads_nothing_heavy() -> None:
    assert loaded_by("import rl_inference; rl_inference.EmbeddedEngineConfig") == set()


def test_import_client_loads_no_model_stack() -> None:
    assert loaded_by("from rl_inference import EmbeddedEngine") == {"aiohttp"}


def test_registry_finds_the_engine_by_name() -> None:
    from rl_inference import EmbeddedEngine

    assert load("rl.inference_engines", "embedded") is EmbeddedEngine
