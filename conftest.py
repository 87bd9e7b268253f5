"""What holds for the tests of every package: GPU and nightly tests say why they are skipped; property tests draw the
same examples every time, so that a commit fails by what it changes, and new ones with `--nightly`."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the tests that are too long for every commit")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("commit", derandomize=True, deadline=None)
        settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
        settings.load_profile("nightly" if config.getoption("--nightly") else "commit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_nightly = pytest.mark.skip(reason="nightly: run with --nightly")
    no_gpu = pytest.mark.skip(reason="gpu: no CUDA device here")
    for item in items:
        if "nightly" in item.keywords and not config.getoption("--nightly"):
            item.add_marker(no_nightly)
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(no_gpu)


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
