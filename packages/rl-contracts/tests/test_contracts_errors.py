"""The error taxonomy: one root, one boundary per class, told apart when counted."""

from __future__ import annotations

import inspect

import pytest

from rl_contracts import errors
from rl_contracts.errors import RLError, boundary_of

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


@pytest.mark.parametrize("error", CLASSES)
def test_error_class_has_the_one_root_and_says_when_it_is_raised(error: type[RLError]) -> None:
    assert issubclass(error, RLError)
    assert inspect.getdoc(error)


def test_boundaries_of_error_classes_that_name_one_are_all_different() -> None:
    boundaries = [error.boundary for error in CLASSES if "boundary" in vars(error)]

    assert len(set(boundaries)) == len(boundaries) > 10


def test_boundary_of_subclass_is_inherited_and_of_foreign_error_internal() -> None:
    class CrashedError(errors.RewardError):
        pass

    assert boundary_of(CrashedError("x")) == "reward"
    assert boundary_of(KeyError("x")) == "internal"
    assert boundary_of(KeyboardInterrupt()) == "internal"
