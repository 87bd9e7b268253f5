"""Watches one process of a run for `count_hops.py`: Python imports this file by itself where it lies on PYTHONPATH.

It changes nothing that the process does. `sys.monitoring` tells of functions that start and of calls; at three moments
the files of ours on the stacks are written to HOPS_DIR: when the request of an episode is written, when a token of it
is sampled, and at each call from one of our packages into another that is part of a publication.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

OUT = Path(os.environ["HOPS_DIR"])
TOOL = 4
EVENTS = sys.monitoring.events
SAMPLED = "SamplingBatch.sample"
"""The function that draws tokens."""
PUBLICATION = ("WeightPublisher.publish", "ServerApp.stage_weights", "ServerApp.commit_weights")
"""Where a publication begins, in the trainer and in the server."""
SAMPLES_BEFORE = 3
"""Tokens that are sampled before one is looked at: the request's handler waits for its answer by then."""

_parents: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_task: ContextVar[Any] = ContextVar("task", default=None)
_lock = threading.Lock()
_samples = 0
_borders: dict[str, str] = {}
_publishing: ContextVar[bool] = ContextVar("publishing", default=False)
"""True in what a publication calls, in the tasks that it starts too."""


def package_of(filename: str) -> str | None:
    """`rl_trainers` for a file of that package; None for one that is not ours."""
    parts = Path(filename).parts
    return next((p for p in parts if p.startswith("rl_")), None) if "src" in parts or "site-packages" in parts else None


def where(code: CodeType) -> str:
    """`rl_trainers/loop.py train`."""
    parts = Path(code.co_filename).parts
    return "/".join(parts[parts.index(package_of(code.co_filename) or parts[0]) :]) + " " + code.co_qualname


def stack(frame: FrameType | None) -> list[str]:
    """Ours on a stack, outermost first."""
    found = []
    while frame is not None:
        if package_of(frame.f_code.co_filename):
            found.append(where(frame.f_code))
        frame = frame.f_back
    return found[::-1]


def awaited(coroutine: Any) -> list[str]:
    """Ours on the await chain of a coroutine that is suspended, outermost first."""
    found = []
    while coroutine is not None:
        kind = next((k for k in ("cr", "ag", "gi") if hasattr(coroutine, f"{k}_code")), None)
        if kind is None:  # what an `async for` awaits does not name its generator
            coroutine = next((x for x in gc.get_referents(coroutine) if inspect.isasyncgen(x)), None)
            continue
        code = getattr(coroutine, f"{kind}_code")
        if package_of(code.co_filename):
            found.append(where(code))
        coroutine = getattr(coroutine, {"cr": "cr_await", "ag": "ag_await", "gi": "gi_yieldfrom"}[kind])
    return found


def write(name: str, value: Any) -> None:
    """Write what was seen, once: the first of several processes or moments counts."""
    path = OUT / f"{name}.json"
    if not path.exists():
        path.with_suffix(f".{os.getpid()}").write_text(json.dumps(value))
        path.with_suffix(f".{os.getpid()}").rename(path)


def request_written() -> None:
    """In the trainer: its thread inside `next_batch`, the task that writes, and the tasks that started it."""
    trainer = stack(sys._current_frames()[threading.main_thread().ident or 0])
    begin = next((i for i, place in enumerate(trainer) if place.endswith(".next_batch")), None)
    task = asyncio.current_task()
    if begin is None or task is None:
        return  # an evaluation, or a request beside the training step
    chains = [stack(sys._getframe(2))]
    while (task := _parents.get(task)) is not None:
        if not task.done():
            chains.append(awaited(task.get_coro()))
    write("request", {"next_batch": trainer[begin:], "episode": [p for chain in chains[::-1] for p in chain]})


def token_sampled() -> None:
    """In the server: the decode thread, and the handlers that wait for what it finds."""
    global _samples
    _samples += 1
    if _samples >= SAMPLES_BEFORE:
        tasks = [x for x in gc.get_objects() if isinstance(x, asyncio.Task) and not x.done()]
        handlers = [chain for chain in (awaited(x.get_coro()) for x in tasks) if any(".generate" in p for p in chain)]
        if handlers:
            write("token", {"handler": handlers[0], "decode": stack(sys._getframe(2))})


def on_start(code: CodeType, _: int) -> Any:
    """A function starts."""
    if code.co_name == "write_headers" and "aiohttp" in code.co_filename:
        line = str(sys._getframe(1).f_locals.get("status_line", ""))
        return request_written() if "/generate" in line else None
    if not package_of(code.co_filename):
        return sys.monitoring.DISABLE
    if code.co_flags & inspect.CO_COROUTINE:
        remember_parent()
    elif code.co_qualname == SAMPLED:
        token_sampled()
    if code.co_qualname in PUBLICATION:
        _publishing.set(True)
        sys.monitoring.set_local_events(TOOL, code, EVENTS.PY_RETURN)
    return None


def remember_parent() -> None:
    """Remember which task started the current one: it begins with a copy of that one's context."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    parent = _task.get()
    if task is not None and parent is not task:
        if task not in _parents:
            _parents[task] = parent
        _task.set(task)


def on_return(code: CodeType, *_: Any) -> None:
    """A publication, or the server's part of it, has ended."""
    _publishing.set(False)


def on_call(code: CodeType, _: int, called: Any, __: Any) -> Any:
    """One of our functions calls something."""
    package = package_of(code.co_filename)
    if not package:
        return sys.monitoring.DISABLE
    if not _publishing.get():
        return None
    module = getattr(called, "__module__", None)
    other = module.partition(".")[0] if isinstance(module, str) else None
    if other and other != package and other.startswith("rl_"):
        kind = "data" if isinstance(called, type) and hasattr(called, "__dataclass_fields__") else "code"
        key = f"{package} {other} {module} {kind}"
        if key not in _borders:
            with _lock:
                _borders[key] = f"{where(code)} -> {getattr(called, '__qualname__', called)}"
                (OUT / f"borders-{os.getpid()}.json").write_text(json.dumps(_borders))
    return None


sys.monitoring.use_tool_id(TOOL, "hops")
sys.monitoring.register_callback(TOOL, EVENTS.PY_START, on_start)
sys.monitoring.register_callback(TOOL, EVENTS.PY_RETURN, on_return)
sys.monitoring.register_callback(TOOL, EVENTS.CALL, on_call)
sys.monitoring.set_events(TOOL, EVENTS.PY_START | EVENTS.CALL)
