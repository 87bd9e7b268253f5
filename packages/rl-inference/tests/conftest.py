"""Fixtures of all tests of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_inference.testing import tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # for modules that are shared by several test files


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model") / "qwen3")
