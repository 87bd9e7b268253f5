"""What the ranks of a run tell each other about checkpoints and groups of parameters, as JSON: torch and megatron-core
would send pickles, with which whoever reaches their process group could run code."""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from math import prod
from numbers import Integral, Real
from traceback import StackSummary
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d

from rl_contracts.errors import EngineError

MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Whose data classes and enums may be told; nothing of them is called when one is made."""
NAMED = (torch.dtype, torch.layout, torch.memory_format)
"""Told by their names in torch."""
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


@contextmanager
def without_pickles() -> Iterator[None]:
    """What torch's collectives of objects send and read is that of `encode` and `decode`. On all ranks at once."""

    def to_tensor(value: Any, device: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).clone()  # of a size that torch may change
        return found.to(device), torch.tensor([found.numel()], device=device)

    def to_object(tensor: torch.Tensor, size: Any, *_: Any, **__: Any) -> Any:
        return decode(tensor.cpu().numpy().tobytes()[: int(size)])

    with patch.multiple(distributed_c10d, _object_to_tensor=to_tensor, _tensor_to_object=to_object):
        yield


def encode(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        EngineError: something in it is no data of a checkpoint.
    """
    return json.dumps(_told(value), separators=(",", ":")).encode()


def decode(content: bytes) -> Any:
    """What `encode` was given; of an error its name and text.

    Raises:
        EngineError: the message is malformed, or names what no checkpoint has.
    """
    try:
        return _heard(json.loads(content))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise EngineError(
            f"a message of another rank cannot be read: {error!r}. Do all run the same versions?"
        ) from error


def _told(value: Any) -> Any:
    """Plain values are themselves; of all else a list with its kind first."""
    if value is None or isinstance(value, bool | str):
        return value
    match value:
        case Enum():
            return ["enum", _name(type(value)), value.name]
        case torch.Size():
            return ["size", *value]
        case torch.Tensor():
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return ["tensor", _told(value.dtype), list(value.shape), b64encode(content.numpy().tobytes()).decode()]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return ["torch", str(value).removeprefix("torch.")]
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case bytes():
            return ["bytes", b64encode(value).decode()]
        case slice():
            return ["slice", *map(_told, (value.start, value.stop, value.step))]
        case StackSummary():
            return ["stack", *([frame.filename, frame.lineno, frame.name, frame.line] for frame in value)]
        case BaseException():
            return ["error", f"{type(value).__name__}: {value}"]
        case dict():
            return ["dict", *([_told(key), _told(entry)] for key, entry in value.items())]
        case list() | tuple() | set() if type(value) in CONTAINERS.values():
            return [type(value).__name__, *map(_told, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return ["object", _name(type(value)), *([key, _told(entry)] for key, entry in vars(value).items())]
    raise EngineError(f"a rank would tell the others {type(value)}, which is no data of a checkpoint")


def _heard(told: Any) -> Any:
    if not isinstance(told, list):
        return told
    kind, *rest = told
    match kind:
        case "list" | "tuple" | "set":
            return CONTAINERS[kind](map(_heard, rest))
        case "dict":
            return {_heard(key): _heard(value) for key, value in rest}
        case "size":
            return torch.Size(rest)
        case "slice":
            return slice(*map(_heard, rest))
        case "torch":
            return _named(*rest)
        case "bytes":
            return b64decode(*rest)
        case "tensor":
            dtype, shape, content = _heard(rest[0]), rest[1], bytearray(b64decode(rest[2]))
            if prod(shape) * dtype.itemsize != len(content):
                raise ValueError(f"a tensor of shape {shape} has {len(content)} bytes")
            return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)
        case "enum":
            return _class(rest[0], Enum)[rest[1]]
        case "object":
            made = object.__new__(_class(rest[0]))
            vars(made).update({key: _heard(value) for key, value in rest[1:]})
            return made
        case "error":
            return EngineError(*rest)
        case "stack":
            return StackSummary.from_list([tuple(frame) for frame in rest])
    raise ValueError(f"unknown kind {kind!r}")


def _named(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, NAMED):
        raise ValueError(f"torch.{name} is none of {NAMED}")
    return found


def _name(kind: type) -> str:
    if not f"{kind.__module__}.".startswith(MODULES):
        raise EngineError(f"a rank would tell the others {kind}, which is of none of {MODULES}")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str, base: type = object) -> Any:
    """One that is imported here, and was made where it is looked for."""
    module, _, qualified = name.partition(":")
    found = getattr(sys.modules[module], qualified)
    if not f"{module}.".startswith(MODULES) or not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{name} is no class of {MODULES}")
    if not (issubclass(found, Enum) if base is Enum else is_dataclass(found)):
        raise ValueError(f"{name} is no data class or enum")
    return found
