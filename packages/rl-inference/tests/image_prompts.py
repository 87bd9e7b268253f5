"""Prompts with images, and their log-probs in transformers."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from transformers import AutoModelForImageTextToText

from rl_contracts.images import Image, read_image
from rl_contracts.images.features import ImageProcessor, placeholder_id

TYPES = ("mm_token_type_ids", "token_type_ids")


def noise(width: int, height: int, seed: int) -> Image:
    """Return an image of random pixels."""
    pixels = random.Random(seed).randbytes(3 * width * height)
    return read_image(Picture.frombytes("RGB", (width, height), pixels))


def prompt_ids(directory: Path, images: Sequence[Image]) -> list[int]:
    """Return the ids of a prompt with images between texts."""
    image_ids = ImageProcessor(str(directory)).features(tuple(images)).input_ids if images else []
    return [65, 66, *image_ids, 70, 71]


def reference_vision_model(directory: Path) -> Any:
    """Load a vision-language model with transformers' eager attention."""
    return AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()


def image_logprobs(
    model: Any, directory: Path, images: Sequence[Image], prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Return log-probs of `output` after a prompt with images, from one forward pass of a reference model."""
    names = inspect.signature(type(model.base_model).forward).parameters
    ids = torch.tensor([[*prompt, *output]])
    features = ImageProcessor(str(directory)).features(tuple(images)).tensors if images else {}
    inputs = {name: value for name, value in features.items() if name in names}
    inputs |= {name: (ids == placeholder_id(model.config)).long() for name in TYPES if name in names}
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
    logprobs: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].tolist()
    return logprobs
