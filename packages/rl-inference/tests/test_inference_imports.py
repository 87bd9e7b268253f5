"""Tests of the imports of the package."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

def show():
    print(*[name for name in ("torch", "transformers", "aiohttp") if name in sys.modules])

import rl_inference
rl_inference.EmbeddedEngineConfig
show()
rl_inference.EmbeddedEngine
show()
"""


def test_import_of_settings_loads_no_large_library_and_client_only_aiohttp() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)

    assert process.stdout.splitlines() == ["", "aiohttp"]
