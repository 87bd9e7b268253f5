"""The forward pass compiled by torch, where that was asked for.

Everything up to the head becomes one graph for any number of tokens, in which the small operations between products
and attention are fused. Weights are its inputs, so an update needs nothing new. It takes tens of seconds at every
start, which pays for a server that runs for long.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rl_contracts.errors import ModelError


def compile_pass(model: Any) -> None:
    """Compile the layers of a transformers model in place; its first passes do the work.

    Raises:
        ModelError: there is no C++ compiler, on a CPU.
    """
    if model.device.type == "cpu":
        _require_compiler()
    base = model.base_model
    base.compile(dynamic=True)


def stance(tokens: int) -> AbstractContextManager[Any]:
    """How a pass of so many tokens is to be run: a single one as it is, since the compiler would make another graph for
    it."""
    return uncompiled() if tokens == 1 else nullcontext()


def uncompiled() -> AbstractContextManager[Any]:
    """Within it nothing is compiled, and nothing compiled is used."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call, no-any-return]


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ModelError(
            "compile=true: torch finds no C++ compiler, which it needs on a CPU. Install g++ (or name one in CXX), or "
            "set compile=false."
        ) from error
