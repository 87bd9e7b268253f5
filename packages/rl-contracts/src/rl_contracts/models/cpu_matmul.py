"""Float32 matrix products on a CPU by the faster of the two libraries that torch brings along.

torch multiplies float32 matrices with MKL, which never uses AVX-512 on processors of other makers than its own. torch
holds oneDNN as well, which does: on a Zen 5 core, 64 tokens and more, 150 to 240 GFLOP/s against 60 to 105. Without
AVX-512 MKL is the faster one: 60 to 95 against 40 to 80 on a Zen 3 core. The choice follows from the processor and the
sizes alone, never from a measurement, so that a run that is repeated or resumed computes the same bits.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_OUTPUTS = 8192
"""Entries of a product from which on oneDNN is taken; its calls cost more than MKL's."""
_PROCESSORS = Path("/proc/cpuinfo")
"""Where Linux names the makers of x86 processors."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with gradients, by oneDNN where that is faster.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [..., out].
    """
    worthwhile = (
        x.numel() // x.shape[-1] * weight.shape[0] >= LEAST_OUTPUTS
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and prefers_onednn()
        # who asks for the same bits everywhere gets torch's own product everywhere
        and not torch.are_deterministic_algorithms_enabled()
    )
    if not worthwhile:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def use_faster_matmul(model: nn.Module) -> int:
    """Let the linear layers of a model use `linear`.

    Layers go on reading their `weight`, so weights may be exchanged at any time.

    Returns:
        how many layers were changed; 0 where torch's own product is as fast.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if not layers or not prefers_onednn():
        return 0
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is the faster one here, can be called, and computes what it should."""
    if not torch.backends.mkldnn.is_available() or not _mkl_wastes_speed():
        return False
    # torch keeps a description for each of the last 1024 sizes of a product, 0.25 MiB and more, and oneDNN a primitive;
    # passes and micro-batches have all sizes. Both look at these once, at their first product.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    x, weight, bias = torch.linspace(-1, 1, 24).view(3, 8), torch.linspace(-2, 1, 40).view(5, 8), torch.arange(5.0)
    try:
        found = _onednn(x, weight, bias)
    except (AttributeError, NotImplementedError, RuntimeError):  # an operator that torch does not promise
        return False
    return bool(torch.allclose(found, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5))


def _mkl_wastes_speed() -> bool:
    """Whether this processor is known to have vector instructions that MKL does not use on it."""
    makers = re.findall(r"^vendor_id\s*: (\S+)", _PROCESSORS.read_text(), re.MULTILINE) if _PROCESSORS.exists() else []
    return bool(set(makers) - {"GenuineIntel"}) and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return linear(x, layer.weight, layer.bias)
    if torch.is_grad_enabled():  # the compiler makes the gradients of what it knows
        return F.linear(x, layer.weight, layer.bias)
    return torch.ops.rl_contracts.linear(x, layer.weight, layer.bias)  # the choice is made when it runs


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        # of more than two dimensions the operator returns a view, which nobody may change in place
        product = _onednn(x.reshape(-1, x.shape[-1]), weight, bias)
        return torch.ops.aten._unsafe_view(product, (*x.shape[:-1], len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = linear(grad, weight.T) if wants_x else None
        grad_weight = linear(rows.T, x.reshape(-1, x.shape[-1]).T) if wants_weight else None
        grad_bias = rows.sum(0) if ctx.has_bias and wants_bias else None
        return grad_x, grad_weight, grad_bias


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_operators = torch.library.Library("rl_contracts", "DEF")
_operators.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_operators.impl("linear", linear, "CompositeExplicitAutograd")
torch.library.register_fake("rl_contracts::linear", _linear_shape, lib=_operators)
