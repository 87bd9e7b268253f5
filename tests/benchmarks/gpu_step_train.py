"""Part a of `gpu_step.py`: a packed training step of the FSDP engine at the widths of published models.

Each model is built with random weights at two small depths. Seconds and peak memory are linear in the number of layers,
so a line through the two depths gives the values at the full depth.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from train_step import nll

TOP_KERNELS = 10
"""Number of kernels listed per combination, sorted by self time."""
BUDGET_SPENT = {"skipped": "the time budget of its part is spent"}
"""Fields of a measurement that did not start."""
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
"""Widths of every model with `--tiny`."""


@dataclass(frozen=True)
class Shape:
    """Widths and full depth of a published model."""

    name: str
    model_type: str
    """Name of the architecture in transformers."""
    layers: int
    """Decoder layers of the published model."""
    fields: dict[str, Any]
    """Fields of its configuration."""

    def save(self, directory: Path, layers: int, device: str, tiny: bool) -> Path:
        """Write a random bfloat16 model of `layers` decoder layers, unless the directory exists."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path = directory / f"{self.name}-{layers}"
        if not path.is_dir():
            narrow = {name: value for name, value in TINY.items() if name in self.fields} if tiny else {}
            fields = self.fields | narrow | {"num_hidden_layers": layers, "max_position_embeddings": 4096}
            torch.manual_seed(0)
            with torch.device(device):  # a GPU draws the weights in milliseconds
                config = AutoConfig.for_model(self.model_type, **fields)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(path)
        return path


def _shape(
    name: str, model_type: str, layers: int, sizes: tuple[int, int, int, int, int], tied: bool, **more: int
) -> Shape:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return Shape(name, model_type, layers, dict(zip(names, sizes, strict=True)) | {"tie_word_embeddings": tied} | more)


EXPERTS = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
SHAPES = (
    _shape("Qwen2.5-1.5B", "qwen2", 28, (1536, 8960, 12, 2, 151_936), True),
    _shape("Qwen2.5-7B", "qwen2", 28, (3584, 18_944, 28, 4, 152_064), False),
    _shape("Qwen3-30B-A3B", "qwen3_moe", 48, (2048, 6144, 32, 4, 151_936), False, **EXPERTS),
)
TINY_SHAPES = {False: SHAPES[::2], True: SHAPES[:1]}
"""Models with `--tiny`, by `compile`: one per architecture, or with `compile` the model that compiles fastest."""


@dataclass(frozen=True)
class Load:
    """Batch and repetitions of a measurement."""

    depths: tuple[int, int] = (2, 4)
    """Number of decoder layers of the two measured models."""
    rows: int = 64
    lengths: tuple[int, int] = (256, 768)
    """Shortest and longest sequence, in tokens."""
    max_tokens: int = 16_384
    """Token limit of a micro-batch."""
    warmup: int = 2
    """Number of steps before the timed ones."""
    timed: int = 3
    vocabulary: int = 150_000
    """Exclusive upper bound of the token ids."""


@dataclass(frozen=True)
class Measurement:
    """Results of one combination at one depth."""

    seconds: float
    """Median seconds of the timed steps."""
    memory_gib: float | None
    """Peak memory: of tensors on a GPU, or on a CPU the peak resident set of the process."""
    flops: float
    """Useful floating-point operations per step."""
    kernels: list[dict[str, Any]]
    """Most expensive kernels of an additional step."""


def make_engine(path: Path, load: Load, device: str, compiled: bool) -> Any:
    """Build and initialize an engine by dotted path, which needs no installed entry points."""
    from rl_contracts import registry
    from rl_contracts.config import MicroBatchConfig, OptimizerConfig
    from rl_contracts.data import FinetuneSpec

    name = "rl_engines_fsdp:FSDPEngine"
    optimizer = OptimizerConfig(name="rl_engines_fsdp.optimizer:adamw", lr=1e-5)
    micro_batch = MicroBatchConfig(load.max_tokens)
    spec = FinetuneSpec(str(path), 100, optimizer=optimizer, micro_batch=micro_batch, device=device, dtype="bfloat16")
    config = registry.settings("rl.train_engines", name)(compile=compiled, verify_model=False)
    engine = registry.load("rl.train_engines", name)(config)
    engine.initialize(spec)
    return engine


def set_checkpointing(engine: Any, enabled: bool) -> None:
    """Switch gradient checkpointing of an initialized engine without reloading the model."""
    from rl_engines_fsdp.ranks.sharding import decoder_layers

    engine.config.gradient_checkpointing = enabled
    for layer in decoder_layers(engine._model):
        vars(layer).pop("forward", None)
    engine._maker._prepare_layers(engine._model)


def timed(step: Callable[[], Any], device: str) -> float:
    """Return the seconds of one call, including all of its kernels."""
    import torch

    begin = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def top_kernels(step: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """Return the kernels (on a CPU: operators) of a step with the most self time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        timed(step, device)
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    own = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [e for e in profiler.key_averages() if e.device_type == kind and not e.is_user_annotation]
    total = sum(getattr(event, own) for event in events)
    events.sort(key=lambda event: -getattr(event, own))
    return [
        {
            "name": event.key[:100],
            "ms": round(getattr(event, own) / 1e3, 3),
            "fraction": round(getattr(event, own) / (total or 1.0), 4),
            "calls": event.count,
        }
        for event in events[:TOP_KERNELS]
    ]


def measure(engine: Any, batch: Any, load: Load, device: str) -> Measurement:
    """Time, profile and count a training step of an engine."""
    import torch

    from rl_contracts.models.attention_windows import layer_windows
    from rl_contracts.models.usage import attended_pairs, peak_gib
    from rl_engines_fsdp.usage import step_flops

    step = partial(engine.train_batch, batch, nll, lambda rows: rows["loss_mask"].sum())
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(load.warmup):
        timed(step, device)
    seconds = statistics.median(timed(step, device) for _ in range(load.timed))
    memory, sizes = peak_gib(torch.device(device)), batch["attention_mask"].sum(-1)
    windows = layer_windows(engine._model.model.config)
    flops = step_flops(engine._model, int(sizes.sum()), int(attended_pairs(sizes, windows))) or 0.0
    return Measurement(seconds, memory, flops, top_kernels(step, device))


def rates(seconds: float, memory: float | None, flops: float, tokens: int, device: str) -> dict[str, Any]:
    """Return the rates of a combination at one depth; `mfu` is None if the peak FLOP/s of the device is unknown."""
    import torch

    from rl_contracts.models.usage import peak_flops

    peak = peak_flops(torch.device(device), "bfloat16")
    return {
        "seconds_per_step": round(seconds, 5),
        "tokens_per_s": round(tokens / seconds, 1),
        "mfu": round(flops / (peak * seconds), 4) if peak else None,
        "memory_gib": None if memory is None else round(memory, 3),
    }


def at_depth(layers: int, depths: tuple[int, int], values: tuple[float, float]) -> float:
    """Extrapolate values at two depths linearly to `layers`; a negative slope is noise and becomes 0."""
    (shallow, deep), (low, high) = depths, values
    return low + max(0.0, (high - low) / (deep - shallow)) * (layers - shallow)


def summary(shape: Shape, load: Load, measured: dict[int, Measurement], tokens: int, device: str) -> dict[str, Any]:
    """Return the fields of a combination measured at both depths."""
    shallow, deep = (measured[depth] for depth in load.depths)

    def extrapolate(name: str) -> float:
        return at_depth(shape.layers, load.depths, (getattr(shallow, name) or 0.0, getattr(deep, name) or 0.0))

    full = rates(extrapolate("seconds"), extrapolate("memory_gib"), extrapolate("flops"), tokens, device)
    return {
        "tokens": tokens,
        "depths": {
            str(depth): rates(values.seconds, values.memory_gib, values.flops, tokens, device)
            for depth, values in measured.items()
        },
        "full_depth": {"layers": shape.layers, **full},
        "kernels": deep.kernels,
    }


def outcome(error: BaseException) -> dict[str, str]:
    """Return the field that reports an error: `skipped` (a module is missing), `out_of_memory`, or `failed`."""
    import torch

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return {"skipped": f"module {cause.name} is not installed"}
        if isinstance(cause, torch.OutOfMemoryError):
            return {"out_of_memory": str(cause)[:300]}
        cause = cause.__cause__
    return {"failed": f"{type(error).__name__}: {str(error)[-2000:]}"}


def combinations(
    shape: Shape, load: Load, device: str, compiled: bool, make: Callable[[int], Any], deadline: float
) -> Iterator[dict[str, Any]]:
    """Measure a model with and without gradient checkpointing; yield the fields of each combination.

    Args:
        make: builds an engine with the given number of layers.
        deadline: time of `time.monotonic` after which no measurement starts.
    """
    from rl_contracts.testing import make_batch

    batch = make_batch(load.rows, vocab_size=load.vocabulary, lengths=load.lengths)
    tokens, measured = int(batch["attention_mask"].sum()), {True: dict[int, Measurement](), False: {}}
    for depth in load.depths:
        engine = make(depth) if measured and time.monotonic() < deadline else None
        for checkpointing in list(measured):  # with checkpointing first, because it needs less memory
            fields: dict[str, Any] = {}
            try:
                if engine is None or time.monotonic() > deadline:
                    fields = BUDGET_SPENT
                else:
                    set_checkpointing(engine, checkpointing)
                    measured[checkpointing][depth] = measure(engine, batch, load, device)
                    if depth == load.depths[-1]:
                        fields = summary(shape, load, measured[checkpointing], tokens, device)
            except Exception as error:
                fields = outcome(error)
            if fields:
                measured.pop(checkpointing)
                yield {"gradient_checkpointing": checkpointing, "compile": compiled, **fields}
        if engine is not None:
            engine.destroy()
            del engine
            gc.collect()


def lines(device: str, tiny: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the fields of every combination, starting with all models without `compile`."""
    import torch

    load = Load((1, 2), 6, (32, 128), 256, 1, 2, TINY["vocab_size"]) if tiny else Load()
    if device == "cpu":
        torch.set_num_threads(1)  # on busy cores, threads wait for each other at every operation
    with tempfile.TemporaryDirectory() as directory:
        for compiled in (False, True):
            backend = "inductor" if device == "cuda" else "eager"  # inductor takes minutes on a CPU
            patch: AbstractContextManager[Any] = nullcontext()
            if compiled and backend == "eager":
                patch = mock.patch.object(torch, "compile", partial(torch.compile, backend=backend))
            for shape in TINY_SHAPES[compiled] if tiny else SHAPES:

                def make(depth: int, shape: Shape = shape, compiled: bool = compiled) -> Any:
                    path = shape.save(Path(directory), depth, device, tiny)
                    return make_engine(path, load, device, compiled)

                torch.compiler.reset()  # dynamo recompiles the code of a layer only a few times
                model = {"model": shape.name, "compile_backend": backend if compiled else None}
                try:
                    with patch:
                        for fields in combinations(shape, load, device, compiled, make, deadline):
                            yield model | fields
                except Exception as error:
                    yield model | {"compile": compiled} | outcome(error)
