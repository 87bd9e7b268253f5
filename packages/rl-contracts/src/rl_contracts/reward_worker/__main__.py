"""The worker process: reads calls of one reward function from stdin, writes results to what was stdout.

The first frame names the function: `{"target": name or dotted path, "path": sys.path, "timeout": seconds}`; the reply
is `{"ready": true}` or `{"refused": text}`. Each further frame is a call, `[prompt, completions, prompt_ids,
completion_ids, data]`; its reply is `{"value": number}` or `{"error": text}`, with the `figures` that the function
recorded, if it did. `rl_contracts.reward_worker.messages` has the format of frames. Output of the function and its logs
(from INFO on) go to stderr.
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
    """Serve until stdin ends."""
    stream, results = _claim_pipes()
    _die_with_parent(stream.fileno())
    faulthandler.enable()
    # a trainer that is asked to stop ends its step first, and needs the rewards; a handler goes with an exec, so that
    # programs which the function starts end as usual
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any code runs at import; the parent reports it
        _write(results, number, {"refused": _describe(error)})
        return
    if not callable(function):
        _write(
            results, number, {"refused": f"{setup['target']!r} stands for {function!r:.200}, which cannot be called."}
        )
        return
    _write(results, number, {"ready": True})
    _serve(calls, results, function)


class _RewardFigures(Metrics):
    """Metrics of one call."""

    __slots__ = ()

    def _merge(self, name: str, new: Metric) -> None:
        if _is_taken(name):
            raise DataError(f"metric {name!r} is one that the run records; a reward must use another name.")
        super()._merge(name, new)


@functools.lru_cache
def _is_taken(name: str) -> bool:
    """Whether the run has a metric of this name that is not a reward's."""
    known = meaning(name)
    return known is not None and known.section != REWARDS


def _serve(calls: Iterator[tuple[int, Any]], results: int, function: Callable[..., Any]) -> None:
    reads_final_text = takes_final_text(function)
    for number, call in calls:
        answer: dict[str, Any]
        if not reads_final_text:
            call[-1].pop("final_text", None)
        with collect(_RewardFigures()) as figures:
            try:
                value = _score(function, *call)
                answer = {"value": value, "parts": components_of(value)}
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the function's own failure is the call's answer
                answer = {"error": _describe(error, function)}
        if recorded := figures.to_json():
            answer["figures"] = recorded
        _write(results, number, answer)


def _score(
    function: Callable[..., Any],
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    data: Any,
) -> float:
    """Call the function, on an event loop if it is async, and insist on a finite number."""
    try:
        value = function(prompt, completions, prompt_ids, completion_ids, **data)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        called = ", ".join(["prompt, completions, prompt_ids, completion_ids", *(f"{name}=..." for name in data)])
        renamed = "; data.columns.OURS=THEIRS gives a column its name" if "missing" in str(error) else ""
        raise TypeError(f"{error}; it is called with ({called}){renamed}") from error
    if inspect.isawaitable(value):
        value = _event_loop().run(_result(value), context=copy_context())
    if not isinstance(value, Real):
        raise TypeError(f"expected a number as reward, found {type(value).__name__}: {value!r:.200}")
    if not is_valid_reward(value):
        raise ValueError(f"expected a finite reward, found {value!r:.200}; float32 must hold it and its parts")
    return value if isinstance(value, CompositeReward) else float(value)


@functools.cache
def _event_loop() -> Any:
    """One for all calls, so that the function may keep connections."""
    import asyncio

    return asyncio.Runner()


async def _result(awaitable: Any) -> Any:
    return await awaitable


def _claim_pipes() -> tuple[BinaryIO, int]:
    """Move the protocol off stdin and stdout, so that nothing the function reads or prints can disturb it."""
    calls, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # lines before a crash must arrive
    return os.fdopen(calls, "rb"), results


def _write(results: int, number: int, answer: dict[str, Any]) -> None:
    """Send a reply. A process that the function forked ends here instead: the call has one reply."""
    if os.getpid() != _PID:
        os._exit(1)
    frame = memoryview(messages.numbered(number, messages.encode(answer)))
    while frame:
        frame = frame[os.write(results, frame) :]


def _describe(error: BaseException, function: object = None) -> str:
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = str(error)[:_ERROR_LIMIT]
    return f"{type(error).__name__}: {text}{raised_at(error) or defined_at(function)}\n{trace[-_TRACE_LIMIT:]}"


def _die_with_parent(calls: int) -> None:
    """Leave no worker behind a parent that was killed, even when the function never comes back.

    A thread waits for the other end of stdin to close and kills the process group, the function's own children
    included. On Linux the kernel kills this process as well, in case the thread cannot run.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    hangup = select.poll()
    hangup.register(calls, 0)  # no event but the hang-up, which is always reported

    def watch() -> None:
        hangup.poll()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main()
