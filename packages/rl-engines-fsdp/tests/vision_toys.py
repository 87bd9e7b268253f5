"""Batches with images for tiny vision-language models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Picture
from tensordict import TensorDict
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import Trajectory, stack
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import VISION_PARTS, FinetuneSpec
from rl_contracts.images import Image, read_image
from rl_contracts.images.features import ImageProcessor
from rl_contracts.testing.processes import rank_device
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig

ROWS = (((24, 32),), (), ((32, 16), (16, 24)), ((9, 40),), (), ())
"""Sizes of the images of each sequence."""
LAYOUTS = {
    "data": (ParallelStrategy(2), ()),
    "context": (ParallelStrategy(context=2), ()),
    "tensor": (ParallelStrategy(tensor=2), ()),
    "frozen": (ParallelStrategy(2), VISION_PARTS),
}
"""Layout and frozen parts of each case on two ranks."""


def noise(width: int, height: int, seed: int = 0) -> Image:
    pixels = random.Random(seed).randbytes(3 * width * height)
    return read_image(Picture.frombytes("RGB", (width, height), pixels))


def make_images() -> list[tuple[Image, ...]]:
    return [tuple(noise(*size, seed=index) for index, size in enumerate(sizes)) for sizes in ROWS]


def make_vision_batch(directory: str, rows: list[tuple[Image, ...]] | None = None) -> TensorDict:
    """Return sequences of text and images, the last five tokens of each to train on."""
    processor, rng = ImageProcessor(directory), random.Random(1)
    trajectories = []
    for index, images in enumerate(make_images() if rows is None else rows):
        image_ids = processor.features(images).input_ids if images else []
        ids = np.array([65, 66, *image_ids, *(rng.randrange(60, 100) for _ in range(6 + index))])
        mask = np.arange(len(ids)) >= len(ids) - 5
        versions = np.where(mask, 0, -1).astype(np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        trajectories.append(Trajectory(ids, mask, logprobs, versions, images=images, group_id=index, episode_id=index))
    return stack(trajectories)


def make_vision_engine(
    directory: str,
    max_tokens: int = 4096,
    strategy: ParallelStrategy | None = None,
    freeze: tuple[str, ...] = (),
    **settings: Any,
) -> FSDPEngine:
    engine = FSDPEngine(FSDPEngineConfig(**settings), strategy)
    optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=0.0)
    micro_batch = MicroBatchConfig(max_tokens)
    engine.initialize(
        FinetuneSpec(directory, 10, optimizer=optimizer, micro_batch=micro_batch, device=rank_device(), freeze=freeze)
    )
    return engine


def negative_logprobs(outputs: Any, packed: Any) -> tuple[Tensor, dict[str, Any]]:
    return -(outputs.logprobs * packed["loss_mask"]).sum(), {}


def trained_tokens(batch: TensorDict) -> Tensor:
    return batch["loss_mask"].sum()


def step(engine: FSDPEngine, batch: TensorDict) -> dict[str, float]:
    return engine.train_batch(batch, negative_logprobs, trained_tokens)


def output_path(directory: Path, layout: str, rank: int) -> Path:
    return directory / f"{layout}-{rank}.safetensors"
