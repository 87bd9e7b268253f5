"""Tests of the error classes: one base class, and distinct boundaries under which failures are counted."""

from __future__ import annotations

import inspect

import pytest

from rl_contracts import errors
from rl_contracts.errors import RLError, boundary_of

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


@pytest.mark.parametrize("error", CLASSES)
def test_error_class_derives_from_rl_error_and_has_docstring(error: type[RLError]) -> None:
    assert issubclass(error, RLError)
    assert inspect.getdoc(error)


def test_error_classes_with_own_boundary_have_distinct_boundaries() -> None:
    boundaries = [error.boundary for error in CLASSES if "boundary" in vars(error)]

    assert len(set(boundaries)) == len(boundaries) > 10


def test_boundary_of_subclass_is_inherited_and_of_other_error_internal() -> None:
    class CrashedError(errors.RewardError):
        pass

    assert boundary_of(CrashedError("x")) == "reward"
    assert boundary_of(KeyError("x")) == "internal"
    assert boundary_of(KeyboardInterrupt()) == "internal"
