"""Peak memory and model FLOP utilization of training steps."""

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
"""Dense peak in 10^12 FLOP/s of devices whose name contains the key, first match, from NVIDIA's data sheets.

float32 is the peak without TensorFloat-32, which torch does not use for products by default.
"""


def peak_gib(device: torch.device) -> float | None:
    """Return the peak memory of this process in GiB, or None where the system does not report it.

    On CUDA this is the peak of its tensors since it started; on a CPU, its largest resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak of one device in FLOP/s, or None if it is unknown, as for any CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks_by_dtype = next((peaks for key, peaks in PEAK_TFLOPS.items() if key in name), {})
    return peaks_by_dtype[dtype] * 1e12 if dtype in peaks_by_dtype else None


def attended_pairs(lengths: torch.Tensor, windows: Sequence[int | None]) -> torch.Tensor:
    """Return twice the number of attended token pairs over all sequences and layers.

    A pair is a token and a token that it attends to, itself included. To first order, a sequence of L tokens counts
    L^2, and L^2 - (L - W)^2 in a layer with a window of W tokens.

    Args:
        lengths: lengths of the sequences in tokens, [B].
        windows: window of each layer in tokens; None if it attends to all previous tokens.

    Returns:
        float64 scalar.
    """
    sizes, total = lengths.double(), torch.zeros((), dtype=torch.float64)
    for window, layers in Counter(windows).items():
        beyond = 0.0 if window is None else (sizes - window).clamp(min=0).square()
        total += layers * (sizes.square() - beyond).sum()
    return total


def step_flops(matrices: int, trained: int, attention: int, tokens: int, pairs: int) -> float:
    """Return the useful floating-point operations of a training step.

    The count follows Chowdhery et al. 2022, arXiv:2204.02311, appendix B. Each matrix parameter costs 2 operations
    per token in forward, and 2 in backward for the gradient of its input. A trained parameter costs 2 more for its own
    gradient; base weights under adapters are not trained. Each of `attended_pairs` costs 6 * heads * head size.
    Recomputation (activation checkpointing, the vocabulary projection) does not count.

    Args:
        matrices: number of parameters that each token is multiplied by; of experts, only those it is routed to.
        trained: number of these parameters that are trained.
        attention: heads * head size.
        tokens: number of tokens over all ranks.
        pairs: see `attended_pairs`, over all ranks.
    """
    return float((4 * matrices + 2 * trained) * tokens + 6 * attention * pairs)


class UsageMeter:
    """Accumulator of the time, tokens and attended pairs of training steps since the last read."""

    def __init__(self) -> None:
        self._seconds, self._tokens, self._pairs = 0.0, 0, 0

    def add(self, seconds: float, tokens: int, pairs: int) -> None:
        """Add one step: its wall time in seconds, and tokens and `attended_pairs` over all ranks."""
        self._seconds += seconds
        self._tokens += tokens
        self._pairs += pairs

    def read(
        self, flops_of: Callable[[int, int], float | None], device: torch.device, dtype: str, ranks: int
    ) -> dict[str, float | None]:
        """Return this rank's `memory/peak_gib`, and `time/train_batch` and `throughput/mfu` since the last call.

        `time/train_batch` is the time in seconds that this rank spent in `train_batch`. It includes forward, backward,
        the optimizer step, communication between ranks and waiting for it. It excludes generation, log-probs before the
        step, publishing and saving. `throughput/mfu` is the useful FLOPs divided by the peak FLOPs of all devices in
        that time. It is None without a step, or if the model or the device is unknown.

        Args:
            flops_of: returns the useful FLOPs for numbers of tokens and `attended_pairs`, or None if unknown.
            device: device of this rank.
            dtype: dtype of the computation.
            ranks: number of ranks, each with one such device.
        """
        flops, peak = flops_of(self._tokens, self._pairs), peak_flops(device, dtype)
        is_known = flops is not None and peak is not None and self._seconds > 0
        mfu = flops / (peak * ranks * self._seconds) if is_known else None  # type: ignore[operator]
        metrics = {"memory/peak_gib": peak_gib(device), "throughput/mfu": mfu, "time/train_batch": self._seconds}
        self._seconds, self._tokens, self._pairs = 0.0, 0, 0
        return metrics
