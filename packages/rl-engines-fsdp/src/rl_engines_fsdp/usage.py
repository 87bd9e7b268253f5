"""How well a step used the machine: peak memory and model FLOP utilisation."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rl_engines_fsdp.model.packed import PackedModel

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


def matrix_parameters(model: PackedModel, frozen: bool = True) -> int:
    """Parameters by which each token is multiplied: all matrices, the input embedding only where it is the head too.

    Adapters count too. None of this holds for mixtures of experts, of which a token meets a few only.

    Args:
        frozen: count those too that are not trained.
    """
    inner: Any = model.model
    table, head = inner.get_input_embeddings().weight, inner.get_output_embeddings()
    looked_up = head is None or head.weight is not table
    counted = (p for p in model.parameters() if p.ndim == 2 and not (looked_up and p is table))
    return sum(p.numel() for p in counted if frozen or p.requires_grad)


def step_flops(model: PackedModel, tokens: int, squared_lengths: int) -> float | None:
    """Useful floating-point operations of a training step (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    For each matrix parameter and token 2 forward, 2 backward for the gradient of what it is multiplied by, and 2 for
    its own gradient where it is trained: those under adapters are not. And 6 * layers * heads * head size * L^2 for the
    causal attention of a sequence of L tokens, half of what attention to all tokens takes. What is computed twice
    (checkpointing, the vocabulary projection) does not count.

    Args:
        tokens: over all ranks.
        squared_lengths: sum of the squares of the rows' lengths, over all ranks.

    Returns:
        None for a mixture of experts.
    """
    config = model.model.config.get_text_config()
    if any(p.ndim == 3 for p in model.parameters()) or getattr(config, "num_experts", None):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * size * squared_lengths
    passes = 4 * matrix_parameters(model) + 2 * matrix_parameters(model, frozen=False)
    return float(passes * tokens + attention)


class UsageMeter:
    """Adds up what training steps did since it was last read."""

    def __init__(self) -> None:
        self._seconds, self._tokens, self._squares = 0.0, 0, 0

    def add(self, seconds: float, tokens: int, squared_lengths: int) -> None:
        """Count one step: its wall time, and tokens and squared lengths over all ranks."""
        self._seconds += seconds
        self._tokens += tokens
        self._squares += squared_lengths

    def read(self, model: PackedModel, device: torch.device, dtype: str, ranks: int) -> dict[str, float | None]:
        """`memory/peak_gib` of this rank; `time/train_batch` and `throughput/mfu` of the steps since the last call.

        `time/train_batch` is the seconds that this rank spent in `train_batch`: forward, backward and optimizer step of
        every micro-batch, the exchanges between ranks and what waits for them; not answers, log-probs before the step,
        publishing or saving. `throughput/mfu` is useful FLOPs (`step_flops`) over peak FLOPs of all devices in that
        time; None without a step, or where model or device are not known.
        """
        flops, peak = step_flops(model, self._tokens, self._squares), peak_flops(device, dtype)
        known = flops is not None and peak is not None and self._seconds > 0
        mfu = flops / (peak * ranks * self._seconds) if known else None  # type: ignore[operator]
        figures = {"memory/peak_gib": peak_gib(device), "throughput/mfu": mfu, "time/train_batch": self._seconds}
        self._seconds, self._tokens, self._squares = 0.0, 0, 0
        return figures
