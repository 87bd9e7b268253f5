"""Tests of the error classes: one base class, and distinct boundaries under which failures are counted."""

from __future__ import annotations

import inspect

from rl_contracts import errors
from rl_contracts.errors import RLError, boundary_of, did_you_mean

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


def test_error_classes_derive_from_rl_error_with_distinct_boundaries() -> None:
    assert all(issubclass(error, RLError) for error in CLASSES)
    boundaries = [error.boundary for error in CLASSES if "boundary" in vars(error)]

    assert len(set(boundaries)) == len(boundaries) > 10


def test_boundary_of_subclass_is_inherited_and_of_other_error_internal() -> None:
    class CrashedError(errors.RewardError):
        pass

    assert boundary_of(CrashedError("x")) == "reward"
    assert boundary_of(KeyError("x")) == "internal"
    assert boundary_of(KeyboardInterrupt()) == "internal"


def test_did_you_mean_ignores_case_and_prefers_the_same_letters() -> None:
    assert "'grpo'" in did_you_mean("gpro", ["grpo", "gspo"])
    assert "'grpo'" in did_you_mean("GRPO", ["grpo", "gspo"])
