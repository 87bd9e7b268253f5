"""Test tiers and options for all packages.

Each of three tiers includes the previous one: `pytest` runs the quick tests, `pytest --all` also the slow ones,
`pytest --nightly` all tests. Skipped tests show the reason. Without paths, two files run at a time; `-n` changes the
number. All tests of a file run in one process, so that module fixtures start once.

Property tests use the same examples in every run, so that only a change in code changes a result. With `--nightly`
they draw new examples.
"""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

PROCESSES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the slow tests, as CI does for every commit")
    parser.addoption("--nightly", action="store_true", help="run all tests, including those too slow for every commit")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run all tests in two processes unless `-n` is given, and tests of given paths in this process."""
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return  # a worker that starts workers never ends
    option = config.option
    runs_all_tests = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if runs_all_tests and option.numprocesses is None and not (option.usepdb or option.collectonly):
        option.numprocesses = PROCESSES
        # one thread per process: more threads on two busy cores slowed a test from 8 s to over 300 s
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if option.dist == "no":
        option.dist = "loadfile"
    option.loadscopereorder = False  # pytest_collection_modifyitems orders the files


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in background jobs; child processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("commit", derandomize=True, deadline=None)
        settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
        settings.load_profile("nightly" if config.getoption("--nightly") else "commit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly, gpus = config.getoption("--nightly"), _count_gpus(items)
    skipped = {
        "nightly": None if nightly else "nightly: run with --nightly",
        "slow": None if nightly or config.getoption("--all") else "slow: run with --all",
        "gpu": None if gpus else "gpu: no CUDA device here",
        "multi_gpu": None if gpus > 1 else f"multi_gpu: needs several CUDA devices, found {gpus}",
    }
    for item in items:
        for mark, reason in skipped.items():
            if reason and item.get_closest_marker(mark):  # keywords would also match folder names
                item.add_marker(pytest.mark.skip(reason=reason))
    # Tests outside packages start whole programs and take longest. They run first, so that both processes end together.
    items.sort(key=lambda item: "packages" in item.path.relative_to(config.rootpath).parts)


def _count_gpus(items: list[pytest.Item]) -> int:
    """Return the number of CUDA devices. Imports torch only if a test has the mark `gpu` or `multi_gpu`."""
    is_needed = any(item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu") for item in items)
    if importlib.util.find_spec("torch") is None or not is_needed:
        return 0
    import torch

    return torch.cuda.device_count()
