"""Tests of the modules that an import loads: light modules stay light, heavy libraries load on first use."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

import rl_contracts

LIGHT = (
    "errors",
    "registry",
    "allocation",
    "allocation_grammar",
    "chat.rendering",
    "images",
    "runtime.aio",
    "runtime.lazy_imports",
    "runtime.logging",
    "runtime.metrics",
    "runtime.name_service",
)
FOR_TESTS = ("testing", "conformance")
HEAVY = ("transformers", "ray", "tensordict", "aiohttp", "PIL")


def _loaded_after_importing(modules: list[str]) -> set[str]:
    imports = f"[importlib.import_module(module) for module in {modules!r}]"
    code = f"import importlib, json, sys; {imports}; print(json.dumps([*sys.modules]))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120).stdout
    return set(json.loads(output))


def test_import_light_modules_does_not_load_torch() -> None:
    loaded = _loaded_after_importing([f"rl_contracts.{name}" for name in LIGHT])

    assert loaded.isdisjoint({"torch", "numpy", *HEAVY})


@pytest.mark.slow
def test_import_any_module_does_not_load_heavy_libraries() -> None:
    modules = [
        info.name
        for info in pkgutil.walk_packages(rl_contracts.__path__, "rl_contracts.")
        if info.name.split(".")[1] not in FOR_TESTS
        and not info.name.endswith(("__main__", "_kernel"))  # kernels are imported on first use
        and not info.name.startswith("rl_contracts.runtime.http_")  # require the extra `http`
    ]

    loaded = _loaded_after_importing(modules)

    assert set(modules) <= loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("name", ["allocation", "runtime.metrics"])
def test_docstring_examples_pass(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"rl_contracts.{name}"))

    assert results.attempted > 0
    assert results.failed == 0
