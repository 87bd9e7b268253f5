"""Matrix products of a CPU server by whichever library is faster here.

torch multiplies float32 matrices with MKL, which leaves half of the speed of some processors unused (those of AMD, as
of 2026), and holds oneDNN as well, which does not. A short measurement at the start decides; both compute the same sums
in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_contracts.logging import get_logger

logger = get_logger("inference.server.linear")

_TOKENS = (8, 16, 32, 64)
"""Numbers of tokens that are tried."""
_ADVANTAGE = 1.1
"""oneDNN is taken where it is this much faster."""
_MEASURE_SECONDS = 0.001
"""For each measurement; large products take one call."""


def speed_up(model: nn.Module) -> int:
    """Let the linear layers of a float32 model on a CPU use oneDNN for passes of many tokens, where that is faster.

    Layers go on reading their `weight`, so weights may be exchanged at any time.

    Returns:
        how many layers use oneDNN.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if not layers or not _available(layers[0]):
        return 0
    least: dict[tuple[int, ...], int | None] = {}
    changed = 0
    for layer in layers:
        shape = tuple(layer.weight.shape)
        if shape not in least:
            least[shape] = _least_tokens(layer)
        if (tokens := least[shape]) is not None:
            layer.forward = partial(_forward, layer, tokens * layer.in_features)  # type: ignore[method-assign]
            changed += 1
    logger.info("%d of %d linear layers use oneDNN for many tokens", changed, len(layers))
    return changed


def _least_tokens(layer: nn.Linear) -> int | None:
    """The least number of tokens from which on oneDNN is faster; None if it never is."""
    least = None
    for tokens in reversed(_TOKENS):
        if not _faster(layer, tokens):
            break
        least = tokens
    return least


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _forward(layer: nn.Linear, least: int, x: torch.Tensor) -> torch.Tensor:
    """`nn.Linear.forward` for inputs of at least `least` numbers by oneDNN."""
    if x.numel() < least:
        return F.linear(x, layer.weight, layer.bias)
    return _onednn(x, layer.weight, layer.bias)


def _available(layer: nn.Linear) -> bool:
    """Whether oneDNN can be called, and means what we think it does."""
    weight = layer.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    x = torch.linspace(-1, 1, 2 * layer.in_features).view(2, -1)
    try:
        found = _onednn(x, weight, layer.bias)
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # an operator that torch does not promise
        logger.info("oneDNN's linear layer is not available: %s", error)
        return False
    return bool(torch.allclose(found, F.linear(x, weight, layer.bias), rtol=1e-4, atol=1e-5))


@torch.inference_mode()
def _faster(layer: nn.Linear, tokens: int) -> bool:
    x = torch.ones(tokens, layer.in_features)
    ours = _seconds(lambda: _onednn(x, layer.weight, layer.bias))
    theirs = _seconds(lambda: F.linear(x, layer.weight, layer.bias))
    return ours * _ADVANTAGE < theirs


def _seconds(call: Callable[[], Any]) -> float:
    """The shortest of some calls, in seconds of this thread: other processes may be busy."""
    call()
    best, until = float("inf"), time.thread_time() + _MEASURE_SECONDS
    while (begin := time.thread_time()) < until:
        call()
        best = min(best, time.thread_time() - begin)
    return best
