"""Inputs of vision-language models for packed sequences: image features, token types and positions.

No family is named here. The model itself replaces placeholders by features, and computes positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.batch.image_entries import ImageRows
from rl_contracts.data import VISION_PARTS
from rl_contracts.errors import EngineError, ModelError
from rl_contracts.images import Image
from rl_contracts.images.features import TOKEN_TYPES, ImageProcessor, RotaryPositions, join_features, placeholder_id

MERGER = "merger"
"""Word in the names of projectors that are modules of the vision tower, instead of modules next to it."""


def freeze(model: Any, parts: Collection[str]) -> None:
    """Exclude parts of a vision-language model from training, in place.

    Args:
        model: model of `AutoModelForImageTextToText`.
        parts: names of `rl_contracts.data.VISION_PARTS`.

    Raises:
        ModelError: the model has no such part.
    """
    found = vision_parts(model)
    for part in parts:
        if not found[part]:
            raise ModelError(
                f"{type(model).__name__}: freeze: found no parameters of the {part}; remove it from freeze."
            )
        for parameter in found[part]:
            parameter.requires_grad_(False)


def vision_parts(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each part of `rl_contracts.data.VISION_PARTS`; all others are of the language model."""
    language, tower = ({*module.parameters()} for module in (model.get_decoder(), model.get_encoder(modality="image")))
    parts: dict[str, list[nn.Parameter]] = {name: [] for name in VISION_PARTS}
    for name, parameter in model.base_model.named_parameters():
        if parameter not in language:
            is_tower = parameter in tower and MERGER not in name
            parts["vision_tower" if is_tower else "projector"].append(parameter)
    return parts


class VisionInputs:
    """Inputs of a vision-language model for packed sequences, computed on the host.

    Args:
        model: model of `AutoModelForImageTextToText`.
        processor: processor of its directory.
    """

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self._processor, self._placeholder = processor, placeholder_id(model.config)
        self._names = inspect.signature(type(model.base_model).forward).parameters
        self._positions = RotaryPositions(model)
        self.bidirectional = False
        """True if the tokens of an image attend to each other in both directions."""

    @property
    def directory(self) -> str:
        """Model directory with the files of the processor."""
        return self._processor.path

    def image_ids(self, images: tuple[Image, ...]) -> list[int]:
        """Return the tokens of images as the processor writes them."""
        return self._processor.features(images).input_ids if images else []

    def blocks(self, input_ids: Tensor) -> Tensor | None:
        """Return `Segments.images` of the tokens of all sequences, int64 [N]: a run of placeholders is an image."""
        if not self.bidirectional:
            return None
        is_image = input_ids == self._placeholder
        starts = is_image & ~torch.cat([is_image.new_zeros(1), is_image[:-1]])
        return torch.where(is_image, starts.cumsum(0) - 1, -1)

    def __call__(self, input_ids: Tensor, lengths: Sequence[int], images: ImageRows) -> dict[str, Tensor]:
        """Return the model's inputs in addition to token ids: token types, positions and features, on the host.

        Args:
            input_ids: tokens of all sequences end to end, int64 [N], on the host.
            lengths: tokens of each sequence.
            images: images of each sequence; empty if no sequence has images.

        Raises:
            EngineError: the placeholders of a sequence do not fit its images.
        """
        sequences = input_ids.split([*lengths])
        features = [self._features(ids, row) for ids, row in zip(sequences, images or [()] * len(lengths), strict=True)]
        parts = [part for part in features if part]
        types = {name: (input_ids == self._placeholder).long()[None] for name in TOKEN_TYPES if name in self._names}
        positions = torch.cat([self._positions(*pair) for pair in zip(sequences, features, strict=True)], -1)
        return {"position_ids": self._positions.as_argument(positions), **types, **join_features(parts)}

    def _features(self, ids: Tensor, images: tuple[Image, ...]) -> dict[str, Tensor]:
        found = int((ids == self._placeholder).sum())
        if not images:
            expected, tensors = 0, dict[str, Tensor]()
        else:
            tensors, image_ids = self._processor.features(images)
            expected = image_ids.count(self._placeholder)
        if found != expected:
            raise EngineError(
                f"a sequence has {found} placeholders of images (token {self._placeholder}), but its {len(images)} "
                f"images need {expected}. Reject completions with placeholders, and do not truncate inside an image."
            )
        return {name: value for name, value in tensors.items() if name in self._names}
