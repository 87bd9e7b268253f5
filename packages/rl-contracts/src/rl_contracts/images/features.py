"""Image features of vision-language models: the inputs of the vision encoder, computed by the model's processor.

Features belong to all images of a sequence together, because some processors split an image into tiles depending on
the other images.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_contracts.errors import DataError, ModelError
from rl_contracts.images import Image, open_images
from rl_contracts.models.directory import IMAGE_TOKENS

__all__ = [
    "TOKEN_TYPES",
    "ImageFeatures",
    "ImageProcessor",
    "RotaryPositions",
    "auto_class",
    "has_vision",
    "join_features",
    "placeholder_id",
    "text_attention",
]

CACHE_BYTES = 2**30
"""Maximum size of the features kept in host memory."""
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take the token types: 1 for placeholders of images, 0 for other tokens."""
_TOKENS = ("input_ids", "attention_mask", *TOKEN_TYPES)
"""Outputs of a processor that describe tokens, not images."""


class ImageFeatures(NamedTuple):
    """Features of the images of one sequence."""

    tensors: dict[str, Tensor]
    """Inputs of the model by name, such as `pixel_values`."""
    input_ids: list[int]
    """Placeholders of the images as the processor writes them, with tokens around and text between them."""

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ImageProcessor:
    """Processor of a model directory, as a function from images to features.

    Args:
        path: model directory.

    Raises:
        ModelError: the directory has no processor, or a library that it needs is missing.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoProcessor

        try:
            processor: Any = AutoProcessor.from_pretrained(path)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"model {path}: cannot load its processor: {error}") from error
        if not hasattr(processor, "image_processor"):
            raise ModelError(
                f"model {path}: expected a processor for images, found {type(processor).__name__}; add the file "
                "preprocessor_config.json of the model"
            )
        self.path = path
        """Model directory."""
        self.processor = processor
        """The processor of transformers, also for `rl_contracts.chat.rendering.ChatRenderer`."""
        self._mark = processor.image_token
        self._cache: OrderedDict[tuple[str, ...], ImageFeatures] = OrderedDict()
        self._cache_bytes = 0
        self._lock = Lock()

    def features(self, images: tuple[Image, ...]) -> ImageFeatures:
        """Return the features of the images of a sequence, from the cache if possible.

        Threads take turns, so the sequences of a group run the processor once.

        Raises:
            DataError: the processor rejects an image.
        """
        key = tuple(image.key for image in images)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = self._compute(images)
                self._cache_bytes += self._cache[key].nbytes
            features = self._cache[key]
            self._cache.move_to_end(key)
            while self._cache_bytes > CACHE_BYTES:
                self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        return features

    def _compute(self, images: tuple[Image, ...]) -> ImageFeatures:
        pictures = open_images(images)
        try:
            # nested, because some processors read a flat list as one image for each of several texts
            output = self.processor(
                text=[" ".join([self._mark] * len(images))],
                images=[pictures],
                add_special_tokens=False,
                return_tensors="pt",
            )
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise DataError(f"images of {sizes} pixels: the processor of the model rejects them: {error}") from error
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor) and name not in _TOKENS}
        return ImageFeatures(tensors, output["input_ids"][0].tolist())


class RotaryPositions:
    """Rotary positions of sequences with images, from the model's hook `compute_3d_position_ids` if it has one.

    Args:
        model: model of `AutoModelForImageTextToText`.
    """

    def __init__(self, model: Any) -> None:
        self._placeholder = placeholder_id(model.config)
        self._hook = getattr(model.base_model, "compute_3d_position_ids", None)
        self._parameters = {} if self._hook is None else inspect.signature(self._hook).parameters
        self.axes = 1 if self._hook is None else 3
        """Number of positions of a token: 1, or 3 for time, height and width."""

    def __call__(self, ids: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Return the positions of one sequence, int64 [axes, L], on the host.

        Args:
            ids: tokens of the sequence, int64 [L].
            features: `ImageFeatures.tensors` of its images.
        """
        index = torch.arange(len(ids)).expand(self.axes, -1)
        if self._hook is None:
            return index
        values = {"input_ids": ids[None], "mm_token_type_ids": (ids == self._placeholder).long()[None], **features}
        required = {name: None for name, value in self._parameters.items() if value.default is value.empty}
        given = {name: value for name, value in values.items() if name in self._parameters}
        positions = self._hook(**required | given)
        return index if positions is None else positions[:, 0].cpu()

    def as_argument(self, positions: Tensor) -> Tensor:
        """Return positions [axes, N] as the argument `position_ids` of the model: [1, N] or [3, 1, N]."""
        return positions if self._hook is None else positions[:, None]


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers for a language model or vision-language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def text_attention(config: Any, name: str) -> str | dict[str, str]:
    """Return the value of `attn_implementation` that sets only the attention of text; a vision encoder keeps its own.

    Args:
        config: configuration of transformers.
        name: registered attention function.
    """
    if not has_vision(config):
        return name
    text_config = config.get_text_config()
    return {part: name for part in config.sub_configs if getattr(config, part) is text_config}


def has_vision(config: Any) -> bool:
    """Return whether the configuration of transformers describes a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def placeholder_id(config: Any) -> int:
    """Return the token id that the model replaces by image features.

    Raises:
        ModelError: the configuration names no such token.
    """
    for name in IMAGE_TOKENS:
        if (token := getattr(config, name, None)) is not None:
            return int(token)
    raise ModelError(
        f"model type {config.model_type!r}: expected image_token_id in the configuration, found none; images are not "
        "supported for this model"
    )


def join_features(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the features of several sequences along the first dimension; other dimensions are padded with 0."""
    return {name: _concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _concatenate(values: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded = []
    for value in values:
        missing = [longest - size for longest, size in zip(shape, value.shape[1:], strict=True)]
        widths = [width for size in reversed(missing) for width in (0, size)]
        padded.append(pad(value, widths) if any(missing) else value)
    return torch.cat(padded)
