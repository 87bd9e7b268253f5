"""Record which settings a process reads. Python imports this file at startup if its directory is on PYTHONPATH.

The probe watches every settings dataclass of the modules whose names begin with one of SETTINGS_MODULES
(comma-separated). A setting counts as read if code accesses `config.name`, except in checks (`__post_init__`,
`check`), comparisons and representations. Loops over all fields (dumps, help, copies) use `getattr` and do not count.
Reads from a copy count.

Each process writes its own file in the directory SETTINGS_READ. A line contains `module:Class.field`, the key of the
setting and its value, separated by tabs. A key is relative to the object that was read first: the config
(`rollout.generation.top_p`), or a copied section (`top_p`).
"""

from __future__ import annotations

import dataclasses
import inspect
import opcode
import os
import sys
from types import FrameType
from typing import Any

OUT = os.environ["SETTINGS_READ"]
MODULES = tuple(os.environ["SETTINGS_MODULES"].split(","))
NOT_READING = frozenset(("__eq__", "__repr__", "__hash__"))
SETTINGS = ("Config", "Settings", "Options", "Spec")
"""Suffixes of the names of settings classes. Reads in the checks of these classes do not count."""
CHECKS = ("__post_init__", "check")
LOAD_ATTR, CACHE = opcode.opmap["LOAD_ATTR"], opcode.opmap["CACHE"]

_noted: set[str] = set()
KEY = "__key__"
"""Attribute with the key of a section, set when the section is read from its parent."""
_decorate = dataclasses.dataclass


def owner(cls: type, name: str) -> str:
    """Return the class that first declares a field, as `module:Class.field`."""
    declaring = [base for base in cls.__mro__ if name in inspect.get_annotations(base)]
    return f"{declaring[-1].__module__}:{declaring[-1].__qualname__}.{name}"


def _reads(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    while code[at] == CACHE:  # in specialized code, the position is after the instruction
        at -= 2
    if code[at] != LOAD_ATTR:
        return False
    while frame is not None:
        if frame.f_code.co_name in NOT_READING:
            return False
        if frame.f_code.co_name in CHECKS and type(frame.f_locals.get("self")).__name__.endswith(SETTINGS):
            return False
        frame = frame.f_back
    return True


def _get(self: Any, name: str) -> Any:
    value = object.__getattribute__(self, name)
    if name in type(self).__dataclass_fields__:
        key = f"{vars(self).get(KEY, '')}.{name}".removeprefix(".")
        if dataclasses.is_dataclass(value):
            if hasattr(value, "__dict__"):
                vars(value).setdefault(KEY, key)
            return value
        line = f"{owner(type(self), name)}\t{key}\t{value!r}"
        if line not in _noted and _reads(sys._getframe(1)):
            _noted.add(line)
            with open(f"{OUT}/{os.getpid()}", "a", encoding="utf-8") as file:
                file.write(line + "\n")
    return value


def _watched(cls: type) -> type:
    is_settings = cls.__module__.startswith(MODULES) and cls.__name__.endswith(SETTINGS)
    if is_settings and "__slots__" not in vars(cls) and cls.__getattribute__ is object.__getattribute__:
        cls.__getattribute__ = _get  # type: ignore[method-assign,assignment]
    return cls


def dataclass(cls: type | None = None, /, **options: Any) -> Any:
    """Create a dataclass like `dataclasses.dataclass`, and watch it if it is a settings class."""
    if cls is not None:
        return _watched(_decorate(cls, **options))
    return lambda made: _watched(_decorate(made, **options))


dataclasses.dataclass = dataclass  # type: ignore[assignment]
