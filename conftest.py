"""What holds for the tests of every package.

Three tiers, each of which includes the one before: `pytest` runs the quick tests, `pytest --all` the slow ones too,
`pytest --nightly` everything. What is left out says why. Where no paths are given, two files run at a time, each in one
process from its first test to its last, so that what a module's fixtures start is started once; `-n` changes that.

Property tests draw the same examples every time, so that a commit fails by what it changes, and new ones with
`--nightly`.
"""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

PROCESSES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the slow tests, as CI does for every commit")
    parser.addoption("--nightly", action="store_true", help="run everything, also what is too long for every commit")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All tests run in two processes, unless the command says otherwise; those of given paths in this one."""
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return  # a worker that started workers of its own would never end
    option = config.option
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if everything and option.numprocesses is None and not (option.usepdb or option.collectonly):
        option.numprocesses = PROCESSES
        # a core each: on two busy cores, threads that wait for each other made 300 s and more of a test's 8
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if option.dist == "no":
        option.dist = "loadfile"
    option.loadscopereorder = False  # by pytest_collection_modifyitems, not by the number of a file's tests


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; what tests start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("commit", derandomize=True, deadline=None)
        settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
        settings.load_profile("nightly" if config.getoption("--nightly") else "commit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly = config.getoption("--nightly")
    skipped = {
        "nightly": None if nightly else "nightly: run with --nightly",
        "slow": None if nightly or config.getoption("--all") else "slow: run with --all",
        "gpu": None if _has_gpu(items) else "gpu: no CUDA device here",
    }
    for item in items:
        for mark, reason in skipped.items():
            if reason and item.get_closest_marker(mark):  # a folder of that name is among the keywords, too
                item.add_marker(pytest.mark.skip(reason=reason))
    # What starts whole programs takes longest and goes first, so that no process is left with it at the end.
    items.sort(key=lambda item: "packages" in item.path.relative_to(config.rootpath).parts)


def _has_gpu(items: list[pytest.Item]) -> bool:
    """Whether a GPU is here; torch is imported only if a test asks for one."""
    if importlib.util.find_spec("torch") is None or not any(item.get_closest_marker("gpu") for item in items):
        return False
    import torch

    return torch.cuda.is_available()
