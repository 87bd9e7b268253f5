"""Worker process of a reward function: read calls from stdin, write replies to the original stdout.

The first frame names the function: `{"target": name or dotted path, "path": sys.path, "timeout": seconds}`. The reply
is `{"ready": true}` or `{"import_error": text}`.

Each later frame is a call, `[prompt, completions, prompt_ids, completion_ids, data]`. The reply is `{"value": number,
"components": components}` or `{"error": text}`, plus `metrics` if the function recorded metrics.

`rl_contracts.reward_worker.messages` defines the format of frames. The output and logs (INFO and above) of the function
go to stderr.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import copy_context
from numbers import Real
from typing import Any, BinaryIO

from rl_contracts.errors import DataError, defined_at, raised_at
from rl_contracts.registry import load
from rl_contracts.reward import CompositeReward, components_of, is_valid_reward, set_time_limit, takes_final_text
from rl_contracts.reward_worker import messages
from rl_contracts.runtime.metric_docs import REWARDS, meaning
from rl_contracts.runtime.metrics import Metric, Metrics, collect

_PR_SET_PDEATHSIG = 1
_ERROR_LIMIT = 2000
_TRACE_LIMIT = 6000
_PID = os.getpid()


def main() -> None:
    """Import the function, then serve calls until stdin closes."""
    stream, results = _claim_pipes()
    _exit_with_parent(stream.fileno())
    faulthandler.enable()
    # On SIGTERM, a trainer finishes its step and needs the rewards for it. The handler does nothing, instead of
    # SIG_IGN, because exec resets handlers: programs that the function starts still end on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    calls = messages.calls(stream)
    first = next(calls, None)
    if first is None:
        return
    number, setup = first
    sys.path[:] = setup["path"]
    set_time_limit(setup["timeout"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        function = load("rl.rewards", setup["target"])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs arbitrary code; the parent reports it
        _write(results, number, {"import_error": _describe(error)})
        return
    if not callable(function):
        _write(
            results,
            number,
            {"import_error": f"{setup['target']!r} resolves to {function!r:.200}, which is not callable."},
        )
        return
    _write(results, number, {"ready": True})
    _serve(calls, results, function)


class _RewardMetrics(Metrics):
    """Metrics of one reward call, which must not have names of the run's own metrics."""

    __slots__ = ()

    def _merge(self, name: str, new: Metric) -> None:
        if _is_run_metric(name):
            raise DataError(f"metric {name!r} is recorded by the run; use another name in the reward function.")
        super()._merge(name, new)


@functools.lru_cache
def _is_run_metric(name: str) -> bool:
    """Return whether the run itself records a metric with this name, outside the section of reward metrics."""
    entry = meaning(name)
    return entry is not None and entry.section != REWARDS


def _serve(calls: Iterator[tuple[int, Any]], results: int, function: Callable[..., Any]) -> None:
    reads_final_text = takes_final_text(function)
    for number, call in calls:
        reply: dict[str, Any]
        if not reads_final_text:
            call[-1].pop("final_text", None)
        with collect(_RewardMetrics()) as metrics:
            try:
                value = _score(function, *call)
                reply = {"value": value, "components": components_of(value)}
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the reply reports any failure of the function
                reply = {"error": _describe(error, function)}
        if recorded := metrics.to_json():
            reply["metrics"] = recorded
        _write(results, number, reply)


def _score(
    function: Callable[..., Any],
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    data: Any,
) -> float:
    """Call the function, on an event loop if it is async, and return its reward.

    Raises:
        TypeError: the function does not accept the arguments, or does not return a number.
        ValueError: the reward is not finite in float32.
    """
    try:
        value = function(prompt, completions, prompt_ids, completion_ids, **data)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        signature = ", ".join(["prompt, completions, prompt_ids, completion_ids", *(f"{name}=..." for name in data)])
        hint = "; rename a column of the data set with data.columns.ARGUMENT=COLUMN" if "missing" in str(error) else ""
        raise TypeError(f"{error}; it is called with ({signature}){hint}") from error
    if inspect.isawaitable(value):
        value = _event_loop().run(_result(value), context=copy_context())
    if not isinstance(value, Real):
        raise TypeError(f"expected a number as reward, found {type(value).__name__}: {value!r:.200}")
    if not is_valid_reward(value):
        raise ValueError(f"expected a finite reward, found {value!r:.200}; it and its components must fit in float32")
    return value if isinstance(value, CompositeReward) else float(value)


@functools.cache
def _event_loop() -> Any:
    """Return the event loop of all calls; a single loop allows the function to keep connections open."""
    import asyncio

    return asyncio.Runner()


async def _result(awaitable: Any) -> Any:
    return await awaitable


def _claim_pipes() -> tuple[BinaryIO, int]:
    """Duplicate stdin and stdout for the protocol, and redirect the originals to /dev/null and stderr.

    The function can then read stdin and print to stdout without corrupting the protocol.
    """
    calls, results = os.dup(0), os.dup(1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a crash must not lose lines
    return os.fdopen(calls, "rb"), results


def _write(results: int, number: int, reply: dict[str, Any]) -> None:
    """Send a reply. A process that the function forked exits here instead, so that each call has one reply."""
    if os.getpid() != _PID:
        os._exit(1)
    frame = memoryview(messages.numbered(number, messages.encode(reply)))
    while frame:
        frame = frame[os.write(results, frame) :]


def _describe(error: BaseException, function: object = None) -> str:
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = str(error)[:_ERROR_LIMIT]
    return f"{type(error).__name__}: {text}{raised_at(error) or defined_at(function)}\n{trace[-_TRACE_LIMIT:]}"


def _exit_with_parent(calls: int) -> None:
    """Exit when the parent is killed, even if the function never returns.

    A thread waits until the other end of stdin closes, then kills the process group, including child processes of the
    function. On Linux the kernel also kills this process, in case the thread cannot run.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    hangup = select.poll()
    hangup.register(calls, 0)  # only the hang-up event, which poll always reports

    def watch() -> None:
        hangup.poll()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main()
