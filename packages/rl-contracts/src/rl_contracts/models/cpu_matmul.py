"""Float32 matrix products on a CPU with the faster of the two libraries that torch includes, MKL and oneDNN.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of vendors other than Intel. oneDNN
does: on a Zen 5 core, with 64 or more tokens, it reaches 150 to 240 GFLOP/s against 60 to 105. Without AVX-512, MKL is
faster: 60 to 95 GFLOP/s against 40 to 80 on a Zen 3 core. The choice depends only on the processor and the sizes, not
on a measurement, so that a repeated or resumed run computes the same bits.
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
"""Minimum number of entries in a product for oneDNN, whose calls have a higher overhead than MKL's."""
_PROCESSORS = Path("/proc/cpuinfo")
"""File in which Linux lists the vendors of x86 processors."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, with gradients, using oneDNN where it is faster.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [..., out].
    """
    use_onednn = (
        x.numel() // x.shape[-1] * weight.shape[0] >= LEAST_OUTPUTS
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and prefers_onednn()
        # deterministic mode always uses torch's own product, so that all machines compute the same bits
        and not torch.are_deterministic_algorithms_enabled()
    )
    if not use_onednn:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def use_faster_matmul(model: nn.Module) -> int:
    """Make the linear layers of a model use `linear`.

    Layers still read their `weight` on each call, so weights may be replaced at any time.

    Returns:
        the number of changed layers; 0 where torch's own product is as fast.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if not layers or not prefers_onednn():
        return 0
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


@functools.cache
def prefers_onednn() -> bool:
    """Return whether oneDNN is faster on this processor, can be called, and computes correct results."""
    if not torch.backends.mkldnn.is_available() or not _mkl_wastes_speed():
        return False
    # torch caches a descriptor (0.25 MiB or more) for each of the last 1024 product sizes, and oneDNN a primitive.
    # Products come in many sizes. Both libraries read these limits once, at their first product.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    x, weight, bias = torch.linspace(-1, 1, 24).view(3, 8), torch.linspace(-2, 1, 40).view(5, 8), torch.arange(5.0)
    try:
        product = _onednn(x, weight, bias)
    except (AttributeError, NotImplementedError, RuntimeError):  # torch does not guarantee this private operator
        return False
    return bool(torch.allclose(product, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5))


def _mkl_wastes_speed() -> bool:
    """Return whether this processor is known to have vector instructions that MKL does not use."""
    vendors = re.findall(r"^vendor_id\s*: (\S+)", _PROCESSORS.read_text(), re.MULTILINE) if _PROCESSORS.exists() else []
    return bool(set(vendors) - {"GenuineIntel"}) and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return linear(x, layer.weight, layer.bias)
    if torch.is_grad_enabled():  # the compiler cannot differentiate the custom operator
        return F.linear(x, layer.weight, layer.bias)
    return torch.ops.rl_contracts.linear(x, layer.weight, layer.bias)  # selects the library at run time


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        # for inputs above two dimensions the operator returns a view, which callers could not modify in place
        product = _onednn(x.reshape(-1, x.shape[-1]), weight, bias)
        return torch.ops.aten._unsafe_view(product, (*x.shape[:-1], len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = linear(grad, weight.T) if needs_x else None
        grad_weight = linear(rows.T, x.reshape(-1, x.shape[-1]).T) if needs_weight else None
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_operators = torch.library.Library("rl_contracts", "DEF")
_operators.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_operators.impl("linear", linear, "CompositeExplicitAutograd")
torch.library.register_fake("rl_contracts::linear", _linear_shape, lib=_operators)
