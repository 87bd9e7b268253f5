"""All errors that this project raises deliberately, one class per boundary.

A message says what is wrong, what was expected and what to do. To add an error, subclass the error class of its
boundary. Add a boundary only if its failures of episodes or runs should be counted separately.
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
    """Base class of all errors of the rl packages."""

    boundary = "internal"
    """Name under which failures are counted."""
    user_error = False
    """True if the user's code, data or settings caused the error, so that it would recur after a restart."""


class ConfigError(RLError):
    """Invalid setting or combination of settings. Raised before any process starts."""

    boundary = "config"
    user_error = True


class DataError(RLError):
    """Data set, example or batch with invalid contents or format."""

    boundary = "data"
    user_error = True


class ModelError(RLError):
    """Model directory, checkpoint or architecture that cannot be used as requested."""

    boundary = "model"
    user_error = True


class EngineError(RLError):
    """Failure of a train engine: invalid batch, too many steps with non-finite gradients, or lost rank."""

    boundary = "engine"


class InferenceError(RLError):
    """Failure of an inference server or its client: rejected request, unreachable server, or no progress in time."""

    boundary = "inference"


class NoServersError(InferenceError):
    """All inference servers are lost and none returned in time, so every further request would fail too."""


class WeightUpdateError(RLError):
    """New weights did not arrive as sent. The message names the route, the version and the first wrong parameter."""

    boundary = "weights"


class ReceiversLostError(WeightUpdateError):
    """Servers were lost during a broadcast of weights. They are evicted.

    The other servers still serve the previous version. Sending the weights again reaches them.
    """


class RewardError(RLError):
    """Failure to compute a reward (crash, deadline, missing gold answer). It is never counted as a reward of 0."""

    boundary = "reward"
    user_error = True


class TaskEnvironmentError(RLError):
    """Failure of a multi-turn environment in `reset` or `step`."""

    boundary = "environment"
    user_error = True


class AgentError(RLError):
    """Exception in an agent (user code that drives the episode)."""

    boundary = "agent"
    user_error = True


class LaunchError(RLError):
    """Process that could not be started, or that ended unexpectedly. The message shows the last lines of its log."""

    boundary = "launch"


class ServerStartError(LaunchError):
    """Server that ended before it was ready, so it cannot start with this model and these settings."""


class StopRequestedError(RLError):
    """This process received a stop request, which ended the wait for a batch or the running step."""

    weights_unchanged = False
    """True if the weights have certainly not changed since the last finished step."""


class StalledError(RLError):
    """No progress for longer than allowed. The message names the stage and how long it has waited."""

    boundary = "stalled"


def is_user_error(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, lies in the user's code, data or settings.

    The boundaries of the errors decide. If all of them are `internal`, the code that raised the first error decides.
    """
    rl_errors = [each for each in causes(error) if isinstance(each, RLError)]
    if any(each.user_error for each in rl_errors):
        return True
    return all(each.boundary == RLError.boundary for each in rl_errors) and bool(raised_at(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of its cause, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def raised_at(error: BaseException) -> str:
    """Return ` (file:line)` of the user's code that raised an error, or "" if there is none.

    This is the innermost frame outside installed packages and modules named `rl_...`.
    """
    *_, root = causes(error)
    locations = [
        # for compiled code, `co_filename` is the source file, and `__file__` is the installed file
        (frame.f_globals.get("__file__") or frame.f_code.co_filename, frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(root.__traceback__)
        if not (frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")).startswith("rl_")
    ]
    if isinstance(root, SyntaxError) and root.filename:
        locations.append((root.filename, root.filename, root.lineno or 0))
    installed = (sys.prefix, sys.base_prefix, "<")
    user_frames = [f" ({file}:{line})" for module, file, line in locations if not module.startswith(installed)]
    return user_frames[-1] if user_frames else ""


def defined_at(function: object) -> str:
    """Return ` (file:line)` of a function's first line, or "" if it has no Python code."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def boundary_of(error: BaseException) -> str:
    """Return the boundary of `error` if it is an `RLError`, else `"internal"`."""
    return error.boundary if isinstance(error, RLError) else RLError.boundary


def did_you_mean(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` Did you mean ...?` with the known name that is most similar to a word, or "" if none is similar."""
    word = word.lower()
    # a name with the same letters in another order comes first
    matches = sorted(get_close_matches(word, [*names], cutoff=cutoff), key=lambda name: sorted(name) != sorted(word))
    return f" Did you mean {matches[0]!r}?" if matches else ""
