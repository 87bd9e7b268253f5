"""Images of the sequences of a batch, and their form as tensors for files and exchanges between ranks.

In a batch, the entry `images` holds a tuple of images per sequence, in the order of their placeholders. Equal images
are one object. As tensors, each image is stored once, and nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_contracts.images import Image

if TYPE_CHECKING:
    from tensordict import TensorDict

IMAGES_KEY = "images"
"""Optional entry of a batch: the images of each sequence. It is missing if no sequence has images."""

TENSORS = ("image_bytes", "image_sizes", "image_indices", "image_counts")
"""Names of the tensors of `to_tensors`."""

ImageRows = Sequence[tuple[Image, ...]]
"""Images of each sequence, [B]."""


def set_images(batch: TensorDict, rows: ImageRows) -> None:
    """Set the images of all sequences of a batch, or remove the entry if there are none."""
    from tensordict import NonTensorData, NonTensorStack

    if any(rows):
        # a stack, because indexing the batch would not index a plain list
        batch[IMAGES_KEY] = NonTensorStack(*(NonTensorData(row) for row in rows))
    elif IMAGES_KEY in batch:
        del batch[IMAGES_KEY]


def images_of(batch: TensorDict) -> ImageRows:
    """Return the images of each sequence of a batch."""
    if IMAGES_KEY not in batch:
        return [()] * batch.batch_size[0]
    return [tuple(row) for row in batch[IMAGES_KEY]]


def to_tensors(rows: ImageRows) -> dict[str, Tensor]:
    """Return the images of B sequences as tensors; `from_tensors` is the inverse.

    Returns:
        `image_bytes` uint8: the encoded images, each once, end to end. `image_sizes` int64 [images, 3]: bytes, width
        and height of each. `image_indices` int64: the images of all sequences, end to end. `image_counts` int64 [B].
    """
    images = {image.key: image for row in rows for image in row}
    number = {key: index for index, key in enumerate(images)}
    data = bytearray(b"".join(image.data for image in images.values()))
    sizes = [(len(image.data), image.width, image.height) for image in images.values()]
    return {
        "image_bytes": torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8),
        "image_sizes": torch.tensor(sizes, dtype=torch.int64).view(-1, 3),
        "image_indices": torch.tensor([number[image.key] for row in rows for image in row], dtype=torch.int64),
        "image_counts": torch.tensor([len(row) for row in rows], dtype=torch.int64),
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> list[tuple[Image, ...]]:
    """Return the images of each sequence from the result of `to_tensors`."""
    data, sizes = tensors["image_bytes"].numpy(), tensors["image_sizes"].tolist()
    edges = pairwise(accumulate((size for size, _, _ in sizes), initial=0))
    images = [
        Image(data[start:stop].tobytes(), width, height)
        for (start, stop), (_, width, height) in zip(edges, sizes, strict=True)
    ]
    indices = tensors["image_indices"].tolist()
    counts = pairwise(accumulate(tensors["image_counts"].tolist(), initial=0))
    return [tuple(images[index] for index in indices[start:stop]) for start, stop in counts]
