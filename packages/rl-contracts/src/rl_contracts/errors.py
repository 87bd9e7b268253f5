"""Every error that this project raises on purpose, one class per boundary.

A message says what was expected, what was found and what to do. To add an error, subclass the boundary at which it
arises; add a boundary only if a failed episode or a failed run should be counted apart from the others.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

__all__ = [
    "AgentError",
    "ConfigError",
    "DataError",
    "EngineError",
    "InferenceError",
    "LaunchError",
    "ModelError",
    "NoServersError",
    "RLError",
    "ReceiversLostError",
    "RewardError",
    "ServerStartError",
    "StalledError",
    "StopRequestedError",
    "TaskEnvironmentError",
    "WeightUpdateError",
    "boundary_of",
    "causes",
    "defined_at",
    "did_you_mean",
    "is_user_error",
    "raised_at",
]


class RLError(Exception):
    """Root of all errors of the rl packages. `boundary` is the name under which a failure is counted."""

    boundary = "internal"
    user_error = False
    """Whether the user's code, data or settings are to blame, so that it would come again."""


class ConfigError(RLError):
    """A setting, or a combination of settings, that cannot work. Raised before any process starts."""

    boundary = "config"
    user_error = True


class DataError(RLError):
    """A data set, a row or a batch that is not what its reader was promised."""

    boundary = "data"
    user_error = True


class ModelError(RLError):
    """A model directory, checkpoint or architecture that cannot be used as asked."""

    boundary = "model"
    user_error = True


class EngineError(RLError):
    """A train engine could not do what was asked: bad batch, non-finite numbers past their limit, lost rank."""

    boundary = "engine"


class InferenceError(RLError):
    """An inference server or its client failed: refused, unreachable, no progress before the deadline."""

    boundary = "inference"


class NoServersError(InferenceError):
    """No inference server is left, and none came back in time: every further request would fail, too."""


class WeightUpdateError(RLError):
    """New weights did not arrive as sent. Names the route, the version and the first wrong parameter."""

    boundary = "weights"


class ReceiversLostError(WeightUpdateError):
    """Servers were lost while weights went to all of them at once. They are evicted; the others still serve the version
    before, and sending again reaches them."""


class RewardError(RLError):
    """A reward could not be computed (crash, deadline, missing gold answer). Never stands for a reward of zero."""

    boundary = "reward"
    user_error = True


class TaskEnvironmentError(RLError):
    """An environment of a multi-step task failed in `reset` or `step`."""

    boundary = "environment"
    user_error = True


class AgentError(RLError):
    """An agent (user code that drives the episode) raised."""

    boundary = "agent"
    user_error = True


class LaunchError(RLError):
    """A process could not be started, or ended when it should not have. Shows the last lines of its log."""

    boundary = "launch"


class ServerStartError(LaunchError):
    """A server ended before it was ready: with this model and these settings it cannot be started."""


class StopRequestedError(RLError):
    """The process was asked to stop: while it waited between two steps, or so urgently that a step was abandoned."""

    weights_unchanged = False
    """Whether the weights are known to be those of the last finished step."""


class StalledError(RLError):
    """Nothing moved for longer than allowed. Names the stage and its age."""

    boundary = "stalled"


def is_user_error(error: BaseException) -> bool:
    """Whether an error, or one that led to it, lies in the user's code, data or settings.

    The boundaries that it crossed decide; only an error that crossed none is judged by the code that raised it.
    """
    ours = [each for each in causes(error) if isinstance(each, RLError)]
    if any(each.user_error for each in ours):
        return True
    return all(each.boundary == RLError.boundary for each in ours) and bool(raised_at(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that led to it, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def raised_at(error: BaseException) -> str:
    """` (file:line)` of the user's code that led to an error, the innermost that is neither installed nor ours (modules
    called `rl_...`); empty where there is none."""
    *_, root = causes(error)
    places = [
        # compiled code names the file that it was made of, its module the file that is installed
        (frame.f_globals.get("__file__") or frame.f_code.co_filename, frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(root.__traceback__)
        if not (frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")).startswith("rl_")
    ]
    if isinstance(root, SyntaxError) and root.filename:
        places.append((root.filename, root.filename, root.lineno or 0))
    installed = (sys.prefix, sys.base_prefix, "<")
    user_frames = [f" ({file}:{line})" for module, file, line in places if not module.startswith(installed)]
    return user_frames[-1] if user_frames else ""


def defined_at(function: object) -> str:
    """` (file:line)` of a function's first line; empty where it has no source."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def boundary_of(error: BaseException) -> str:
    """The boundary at which `error` arose: its own if it is an `RLError`, else `"internal"`."""
    return error.boundary if isinstance(error, RLError) else RLError.boundary


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean ...?` with the name that is nearest to a word; empty where none is near."""
    near = get_close_matches(word, [*known], n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
