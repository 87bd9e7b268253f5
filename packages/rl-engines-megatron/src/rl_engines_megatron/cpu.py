"""What megatron-core needs where there is no CUDA. Nothing here has an effect where there is.

megatron-core (0.19) asks `torch.cuda` for its device, streams and random states, makes tensors on "cuda", and compares
the names of tensor types with those of CUDA. Inside `without_cuda` all of that is answered for the CPU, and nothing is
compiled; outside nothing is changed, for others compute in the same process.
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
"""Of a `TransformerConfig` on a CPU."""


@contextmanager
def without_cuda(device: torch.device) -> Iterator[None]:
    """A block in which megatron-core runs on `device`."""
    if device.type == "cuda":
        yield
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        answers: dict[str, Any] = {
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
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state()))
        stack.enter_context(patch.object(random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)))
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host))
        stack.enter_context(patch.object(dist, "all_gather", _gathering(dist.all_gather)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_OnCPU())
        yield


def _on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Counts of tokens as all-to-all takes them; megatron-core makes arrays of what comes from a GPU only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _gathering(gather: Any) -> Any:
    """`all_gather`, also where ranks have other numbers of rows, as experts that are split have of tokens: nccl takes
    that, and gloo does not."""

    def all_gather(found: list[Tensor], own: Tensor, *arguments: Any, **named: Any) -> Any:
        if len({tensor.shape for tensor in found}) == 1:
            return gather(found, own, *arguments, **named)
        padded = own.new_zeros(max(len(tensor) for tensor in found), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in found]
        gather(parts, padded, *arguments, **named)
        for tensor, part in zip(found, parts, strict=True):
            tensor.copy_(part[: len(tensor)])
        return None

    return all_gather


class _Stream:
    """A stream or an event, of which there is one: what is asked for is done already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class _OnCPU(TorchFunctionMode):
    """Tensors for CUDA are made on the CPU, and say that they are CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)
