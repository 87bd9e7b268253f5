"""Replacements for the CUDA functions that megatron-core calls on a CPU. Without effect on a GPU.

megatron-core (0.19) queries `torch.cuda` for its device, streams and random states, creates tensors on "cuda", and
compares names of tensor types with CUDA's names. Inside `without_cuda` these calls return values for the CPU, and
`torch.compile` is disabled. Outside of it nothing is patched, because other code computes in the same process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

SETTINGS = {"use_cpu_initialization": True, "batch_p2p_comm": False}
"""Arguments of `TransformerConfig` on a CPU."""


@contextmanager
def without_cuda(device: torch.device) -> Iterator[None]:
    """Patch torch and megatron-core inside the `with` block so that megatron-core runs on `device`."""
    if device.type == "cuda":
        yield
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        replacements: dict[str, Any] = {
            "current_device": lambda: CPU,
            "current_stream": lambda *_: _Stream(),
            "Stream": _Stream,
            "Event": _Stream,
            "stream": lambda _: nullcontext(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *_: torch.get_rng_state(),
        }
        for name, replacement in replacements.items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
        stack.enter_context(patch.object(random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state()))
        stack.enter_context(patch.object(random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)))
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _tensor_to_host))
        stack.enter_context(patch.object(dist, "all_gather", _padding_all_gather(dist.all_gather)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_OnCPU())
        yield


def _tensor_to_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return token counts in the form that all-to-all takes. megatron-core converts only GPU tensors to arrays."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _padding_all_gather(all_gather_equal: Any) -> Any:
    """Return an `all_gather` that also supports different numbers of rows per rank.

    Ranks with different experts have different numbers of tokens. NCCL accepts different shapes, gloo does not.
    """

    def all_gather(outputs: list[Tensor], local: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len({tensor.shape for tensor in outputs}) == 1:
            return all_gather_equal(outputs, local, *args, **kwargs)
        padded = local.new_zeros(max(len(tensor) for tensor in outputs), *local.shape[1:])
        padded[: len(local)] = local
        gathered = [torch.empty_like(padded) for _ in outputs]
        all_gather_equal(gathered, padded, *args, **kwargs)
        for output, rows in zip(outputs, gathered, strict=True):
            output.copy_(rows[: len(output)])
        return None

    return all_gather


class _Stream:
    """Stream or event of a CPU, on which all work is complete when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class _OnCPU(TorchFunctionMode):
    """Torch function mode that creates CUDA tensors on the CPU and reports CUDA types for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)
