"""Where threads and tasks are, for alarms."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from rl_workflows.workflow_context import episode_of

if TYPE_CHECKING:
    from types import FrameType

    from rl_workflows.workflow_context import EpisodeContext

AWAITED = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Where coroutines, generators and asynchronous generators keep their frame, and what they wait for."""


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """The task's name and its whole chain of awaits, outermost first (asyncio itself shows only the outermost)."""
    summary = traceback.StackSummary()
    waits: Any = task.get_coro()
    while waits is not None:
        frame, waits = _step_into(waits)
        if frame is not None:
            summary.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    return f"task {task.get_name()}:\n{''.join(summary.format())}"


def _step_into(awaited: Any) -> tuple[FrameType | None, Any]:
    for frame, inner in AWAITED:
        if hasattr(awaited, frame):
            return getattr(awaited, frame), getattr(awaited, inner)
    return None, None


def episode_task(context: EpisodeContext) -> asyncio.Task[Any] | None:
    """The task of the running loop in which an episode runs; None if it has not begun or is over."""
    return next((task for task in asyncio.all_tasks() if episode_of(task) is context), None)


def stack_of_thread(name: str) -> str:
    """Where the thread of that name is."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == name and thread.ident in frames:
            return "".join(traceback.format_stack(frames[thread.ident]))
    return "(no such thread)"
