"""How well a step used the machine: peak memory and model FLOP utilisation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch

GIB = 2**30
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250.0, "float32": 75.0},
    "H200": {"bfloat16": 989.0, "float32": 67.0},
    "H100 PCIe": {"bfloat16": 756.0, "float32": 51.0},
    "H100 NVL": {"bfloat16": 835.0, "float32": 60.0},
    "H100": {"bfloat16": 989.0, "float32": 67.0},
    "A100": {"bfloat16": 312.0, "float32": 19.5},
    "L40S": {"bfloat16": 362.0, "float32": 91.6},
    "L4": {"bfloat16": 121.0, "float32": 30.3},
    "A10": {"bfloat16": 125.0, "float32": 31.2},
}
"""Dense peak of a device whose name contains the key, first match, in 10^12 FLOP/s, from NVIDIA's data sheets. float32
is that of the ordinary units: torch does not use TensorFloat-32 for products unless it is told to."""


def peak_gib(device: torch.device) -> float | None:
    """Most memory held at once, in GiB: on CUDA by tensors of this process since it began; on a CPU the process's
    largest resident set. None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak of one device in FLOP/s; None where it is not known, as of any CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((peaks for key, peaks in PEAK_TFLOPS.items() if key in name), {})
    return known[dtype] * 1e12 if dtype in known else None


def attended_pairs(lengths: torch.Tensor, windows: Sequence[int | None]) -> torch.Tensor:
    """Twice the pairs of a token and one that it sees, itself included, over all rows and layers; float64 scalar. They
    are L^2 of a row of L tokens, to first order, and L^2 - (L - W)^2 where a layer sees W tokens.

    Args:
        lengths: of rows, [B].
        windows: of each layer; None: it sees all tokens before.
    """
    sizes, total = lengths.double(), torch.zeros((), dtype=torch.float64)
    for window, layers in Counter(windows).items():
        beyond = 0.0 if window is None else (sizes - window).clamp(min=0).square()
        total += layers * (sizes.square() - beyond).sum()
    return total


def step_flops(matrices: int, trained: int, attention: int, tokens: int, pairs: int) -> float:
    """Useful floating-point operations of a training step (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    For each matrix parameter and token 2 forward, 2 backward for the gradient of what it is multiplied by, and 2 for
    its own gradient where it is trained: those under adapters are not. And 6 * heads * head size for each of
    `attended_pairs`. What is computed twice (checkpointing, the vocabulary projection) does not count.

    Args:
        matrices: parameters by which each token is multiplied; of experts, those that it is sent to.
        trained: those of them that are trained.
        attention: heads * head size.
        tokens: over all ranks.
        pairs: see `attended_pairs`, over all ranks.
    """
    return float((4 * matrices + 2 * trained) * tokens + 6 * attention * pairs)


class UsageMeter:
    """Adds up what training steps did since it was last read."""

    def __init__(self) -> None:
        self._seconds, self._tokens, self._pairs = 0.0, 0, 0

    def add(self, seconds: float, tokens: int, pairs: int) -> None:
        """Count one step: its wall time, and tokens and `attended_pairs` over all ranks."""
        self._seconds += seconds
        self._tokens += tokens
        self._pairs += pairs

    def read(
        self, flops_of: Callable[[int, int], float | None], device: torch.device, dtype: str, ranks: int
    ) -> dict[str, float | None]:
        """`memory/peak_gib` of this rank; `time/train_batch` and `throughput/mfu` of the steps since the last call.

        `time/train_batch` is the seconds that this rank spent in `train_batch`: forward, backward and optimizer step of
        every micro-batch, the exchanges between ranks and what waits for them; not answers, log-probs before the step,
        publishing or saving. `throughput/mfu` is useful FLOPs over peak FLOPs of all devices in that time; None without
        a step, or where model or device are not known.

        Args:
            flops_of: useful FLOPs of so many tokens and `attended_pairs`; None where not known.
        """
        flops, peak = flops_of(self._tokens, self._pairs), peak_flops(device, dtype)
        known = flops is not None and peak is not None and self._seconds > 0
        mfu = flops / (peak * ranks * self._seconds) if known else None  # type: ignore[operator]
        figures = {"memory/peak_gib": peak_gib(device), "throughput/mfu": mfu, "time/train_batch": self._seconds}
        self._seconds, self._tokens, self._pairs = 0.0, 0, 0
        return figures
