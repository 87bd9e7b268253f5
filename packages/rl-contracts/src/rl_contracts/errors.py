"""Every error that this project raises on purpose, one class per boundary.

A message says what was expected, what was found and what to do. To add an error, subclass the boundary at which it
arises; add a boundary only if a failed episode or a failed run should be counted apart from the others.
"""

from __future__ import annotations


class RLError(Exception):
    """Root of all errors of the rl packages. `boundary` is the name under which a failure is counted."""

    boundary = "internal"


class ConfigError(RLError):
    """A setting, or a combination of settings, that cannot work. Raised before any process starts."""

    boundary = "config"


class DataError(RLError):
    """A data set, a row or a batch that is not what its reader was promised."""

    boundary = "data"


class ModelError(RLError):
    """A model directory, checkpoint or architecture that cannot be used as asked."""

    boundary = "model"


class EngineError(RLError):
    """A train engine could not do what was asked: bad batch, non-finite numbers past their limit, lost rank."""

    boundary = "engine"


class InferenceError(RLError):
    """An inference server or its client failed: refused, unreachable, no progress before the deadline."""

    boundary = "inference"


class WeightUpdateError(RLError):
    """New weights did not arrive as sent. Names the route, the version and the first wrong parameter."""

    boundary = "weights"


class ReceiversLostError(WeightUpdateError):
    """Servers were lost while weights went to all of them at once. They are evicted; the others still serve the version
    before, and sending again reaches them."""


class RewardError(RLError):
    """A reward could not be computed (crash, deadline, missing gold answer). Never stands for a reward of zero."""

    boundary = "reward"


class TaskEnvironmentError(RLError):
    """An environment of a multi-step task failed in `reset` or `step`."""

    boundary = "environment"


class AgentError(RLError):
    """An agent (user code that drives the episode) raised."""

    boundary = "agent"


class LaunchError(RLError):
    """A process could not be started, or ended when it should not have. Shows the last lines of its log."""

    boundary = "launch"


class StalledError(RLError):
    """Nothing moved for longer than allowed. Names the stage and its age."""

    boundary = "stalled"


def boundary_of(error: BaseException) -> str:
    """The boundary at which `error` arose: its own if it is an `RLError`, else `"internal"`."""
    return error.boundary if isinstance(error, RLError) else RLError.boundary
