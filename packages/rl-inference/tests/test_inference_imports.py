"""Tests of the imports of the package."""

from __future__ import annotations

import subprocess
import sys

from rl_contracts.registry import load


def libraries_loaded_by(statement: str) -> set[str]:
    """Return the large libraries that a new interpreter has imported after a statement."""
    code = f"import sys; {statement}; print(*(m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(process.stdout.split())


def test_import_package_loads_no_large_library() -> None:
    assert libraries_loaded_by("import rl_inference; rl_inference.EmbeddedEngineConfig") == set()


def test_import_client_loads_neither_torch_nor_transformers() -> None:
    assert libraries_loaded_by("from rl_inference import EmbeddedEngine") == {"aiohttp"}


def test_registry_load_by_name_returns_engine() -> None:
    from rl_inference import EmbeddedEngine

    assert load("rl.inference_engines", "embedded") is EmbeddedEngine
