"""One side of the loss comparison of `train_step.py`, alone in a process so that its peak memory can be measured.

    python train_step_loss.py SIDE TOKENS VOCABULARY HIDDEN THREADS

`SIDE` is `fused` (`rl_contracts.models.fused_logprobs`) or `materialized` (a linear layer and torch's cross-entropy in
float32). Both compute the log-prob of each token from hidden states. Both run backward to hidden states and weight,
with a different gradient for each token. Peak memory is the growth of the resident set from before the forward pass to
its peak (`VmHWM`, reset before the clock starts). It includes blocks of logits, activations kept for backward, and the
two gradients. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_contracts.models.fused_logprobs import HeadOptions, LogitTransform, token_logprobs

LossSide = Callable[[Tensor, Tensor, Tensor], Tensor]
BLOCK = 1 << 19
"""`max_logits` that the engine uses on a CPU."""


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probs [M], computed in blocks of logits."""
    options = HeadOptions(LogitTransform(), BLOCK, entropy_grad=False)
    logprobs, _ = token_logprobs(hidden, weight, None, targets, torch.ones(len(targets)), options)
    return logprobs


def materialized(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probs [M] from a float32 logits tensor [M, V]."""
    return -F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")


SIDES: dict[str, LossSide] = {"fused": fused, "materialized": materialized}


def status(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def measure(side: LossSide, tokens: int, vocabulary: int, hidden_size: int) -> dict[str, float]:
    """Return seconds and bytes of one forward and backward pass, with `logprob` and `gradient` to compare sides."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size).mul_(hidden_size**-0.5).requires_grad_()
    targets, gradient = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.perf_counter()
    logprobs = side(hidden, weight, targets)
    forward = time.perf_counter() - begin
    logprobs.backward(gradient)
    seconds = time.perf_counter() - begin
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "tokens": tokens,
        "seconds": seconds,
        "forward_seconds": forward,
        "peak_bytes": status("VmHWM") - before,
        "logprob": logprobs.detach().mean().item(),
        "gradient": (hidden.grad.double().norm() + weight.grad.double().norm()).item(),
    }


def main(name: str, tokens: int, vocabulary: int, hidden: int, threads: int) -> None:
    """Warm up on a few tokens, measure once, and print the result."""
    torch.set_num_threads(threads)
    measure(SIDES[name], 16, min(vocabulary, 4096), hidden)
    print(json.dumps(measure(SIDES[name], tokens, vocabulary, hidden)))


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
