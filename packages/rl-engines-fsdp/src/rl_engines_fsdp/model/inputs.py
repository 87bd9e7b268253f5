"""Arguments of the model's forward for a micro-batch, on the device of the model."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rl_contracts.batch.trajectory import PackedBatch
from rl_contracts.errors import EngineError
from rl_contracts.images import Image, read_image
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.vision import VisionInputs


class Filler(NamedTuple):
    """Sequence that a rank appends to a micro-batch for its collectives. No loss reads its outputs."""

    input_ids: Tensor
    """Token ids, int64 [L]."""
    images: tuple[Image, ...] = ()
    """Images of the sequence."""


class ModelInputs(NamedTuple):
    """Arguments of the forward of `PackedModel`."""

    input_ids: Tensor
    position_ids: Tensor
    temperature: Tensor
    segments: Segments
    vision: dict[str, Tensor] | None


def image_filler(vision: VisionInputs | None) -> Filler:
    """Return a short sequence: with a small image for a vision-language model, else of two tokens."""
    if vision is None:
        return Filler(torch.zeros(2, dtype=torch.int64))
    from PIL import Image as Picture

    images = (read_image(Picture.new("RGB", (32, 32))),)
    return Filler(torch.tensor(vision.image_ids(images)), images)


def model_inputs(
    packed: PackedBatch, filler: Filler, vision: VisionInputs | None, device: torch.device, dtype: torch.dtype
) -> ModelInputs:
    """Return the arguments for a micro-batch, on `device`, with image features in `dtype`.

    The filler is appended if the micro-batch has no tokens, or if the filler has an image and the micro-batch has none.

    Raises:
        EngineError: the sequences have images, but `vision` is None, or the placeholders do not fit the images.
    """
    ids, positions, temperature = packed["input_ids"], packed.position_ids, packed.per_token("temperature")
    sizes = packed.cu_seqlens.diff().tolist()
    images = [*packed.images] or [()] * len(sizes)
    if packed.num_tokens == 0 or (filler.images and not packed.images):
        length = len(filler.input_ids)
        ids = torch.cat([ids, filler.input_ids])
        positions = torch.cat([positions, torch.arange(length)])
        temperature = torch.cat([temperature, torch.ones(length)])
        sizes, images = [*sizes, length], [*images, filler.images]

    def move(value: Tensor, to: torch.dtype | None = None) -> Tensor:
        return value.to(device, to, non_blocking=True)

    features, blocks = None, None
    if vision is not None:
        inputs, blocks = vision(ids, sizes, images), vision.blocks(ids)
        features = {name: move(value, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
    elif any(images):
        raise EngineError("the batch has images, but this model reads only text; use a vision-language model.")
    edges = move(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32))
    segments = Segments(tuple(sizes), edges, images=None if blocks is None else move(blocks))
    return ModelInputs(move(ids), move(positions), move(temperature), segments, features)
