"""Images in decode slots: the vision encoder runs once per prompt's images and version of the weights.

No family is named here. The model itself computes the embeddings of a prompt; they are recorded where they enter its
decoder. A pass then consists of recorded rows for the placeholders of images, and of token embeddings.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

from rl_contracts.errors import InferenceError
from rl_contracts.images import Image
from rl_contracts.images.features import TOKEN_TYPES, ImageProcessor, RotaryPositions, placeholder_id

CACHE_BYTES = 256 * 2**20
"""Maximum size of the encoded images that are kept for later prompts."""


@dataclass(eq=False)
class PromptImages:
    """Images of a prompt, as the decode thread needs them."""

    keys: tuple[str, ...]
    """Hashes of the images in order."""
    image_ids: list[int]
    """Tokens of the images as the processor writes them."""
    features: dict[str, torch.Tensor]
    """Inputs of the vision encoder."""
    identity: list[int]
    """Token ids of the prompt, where negative numbers that depend on the images replace the placeholders."""
    positions: torch.Tensor
    """Rotary positions of the prompt's tokens without those of an interrupted completion, int64 [1 or 3, tokens]."""
    placeholders: list[int]
    """Indices of the prompt's placeholders, ascending."""

    @property
    def delta(self) -> int:
        """Difference of rotary position and index for the tokens after the prompt."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def rotary(self, start: int, count: int) -> torch.Tensor:
        """Return the rotary positions of tokens of prompt and completion from `start` on, int64 [1 or 3, count]."""
        known = self.positions[:, start : start + count]
        later = torch.arange(start + known.shape[1], start + count) + self.delta
        return torch.cat([known, later.expand(len(known), -1)], 1)


@dataclass(frozen=True)
class Encoded:
    """Embeddings of the placeholders of a prompt's images."""

    rows: torch.Tensor
    """Inputs of the decoder, [placeholders, H]."""
    deep: tuple[torch.Tensor, ...] = ()
    """Values that the first decoder layers add to their outputs (deepstack), each [placeholders, H]."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.nbytes for tensor in (self.rows, *self.deep))


@dataclass
class ImagePass:
    """Images of the tokens of one pass."""

    rotary: torch.Tensor
    """Rotary positions of all tokens, int64 [1 or 3, tokens]."""
    indices: torch.Tensor
    """Indices of the placeholders in the pass, int64 [placeholders], ascending."""
    encoded: Encoded | None = None
    """Embeddings of these placeholders, or None if there are none."""


class _RecordedError(Exception):
    """The inputs of the decoder are recorded; the rest of the pass is not needed."""


class VisionModel:
    """Vision-language model of transformers, run in parts.

    Args:
        model: model of `AutoModelForImageTextToText`.
        processor: processor of its directory.
    """

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self._model, self._processor = model, processor
        self.decoder = model.get_decoder()
        self._names = inspect.signature(type(model.base_model).forward).parameters
        self._placeholder = placeholder_id(model.config)
        self._rotary = RotaryPositions(model)
        self._cache: OrderedDict[tuple[str, ...], Encoded] = OrderedDict()
        self.axes = self._rotary.axes
        """Number of rotary positions of a token."""

    def image_ids(self, images: tuple[Image, ...]) -> list[int]:
        """Return the tokens of images as the processor writes them."""
        return self._processor.features(images).input_ids

    def prepare(self, prompt: list[int], images: tuple[Image, ...], resumed: int = 0) -> PromptImages:
        """Return the images of a prompt for the decode thread. Callable from any thread.

        Args:
            prompt: token ids, including those of an interrupted completion.
            images: images of the prompt.
            resumed: number of tokens of the interrupted completion.

        Raises:
            InferenceError: the placeholders in the prompt do not fit the images.
            DataError: the processor rejects an image.
        """
        features, image_ids = self._processor.features(images)
        given = prompt[: len(prompt) - resumed]
        self.check_placeholders(given, len(images), image_ids)
        placeholders = [index for index, token in enumerate(given) if token == self._placeholder]
        identity, keys = [*prompt], tuple(image.key for image in images)
        for number, index in enumerate(placeholders):
            identity[index] = -1 - (hash((keys, number)) & 0x7FFFFFFFFFFFFFFF)
        features = {name: value for name, value in features.items() if name in self._names}
        return PromptImages(keys, image_ids, features, identity, self._positions(given, features), placeholders)

    def check_placeholders(self, ids: Sequence[int], images: int = 0, image_ids: Sequence[int] = ()) -> None:
        """Reject a prompt whose placeholders do not belong to its images.

        Images without a token between them share a run of placeholders.

        Args:
            ids: the prompt.
            images: number of images.
            image_ids: tokens of the images as the processor writes them.

        Raises:
            InferenceError: the placeholders have another number, or are split into other runs.
        """
        ends, expected = self._run_ends(ids), self._run_ends(image_ids)
        if ends[-1] != expected[-1] or not set(ends) <= set(expected):
            raise InferenceError(
                f"input_ids: expected {expected[-1]} placeholders (token {self._placeholder}) in the runs of the "
                f"model's processor for {images} images, found {ends[-1]} in {len(ends) - 1} runs."
            )

    def _run_ends(self, ids: Sequence[int]) -> list[int]:
        """Return 0, and for each run of placeholders the number of placeholders up to its end."""
        runs = groupby(ids, lambda token: token == self._placeholder)
        return [*accumulate((len([*run]) for is_placeholder, run in runs if is_placeholder), initial=0)]

    def _positions(self, prompt: list[int], features: dict[str, torch.Tensor]) -> torch.Tensor:
        try:
            return self._rotary(torch.tensor(prompt), features)
        except (RuntimeError, ValueError, IndexError) as error:
            raise InferenceError(f"input_ids: the model finds no rotary positions for its images: {error}") from error

    def encode(self, prompt: PromptImages) -> Encoded:
        """Return the embeddings of a prompt's images with the current weights, from the cache if possible."""
        if prompt.keys not in self._cache:
            self._cache[prompt.keys] = self._encode(prompt)
            while len(self._cache) > 1 and sum(encoded.nbytes for encoded in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(prompt.keys)
        return self._cache[prompt.keys]

    def forget(self) -> None:
        """Discard the embeddings of all images; call it when the weights change."""
        self._cache.clear()

    def chunk(self, prompt: PromptImages, start: int, count: int) -> ImagePass:
        """Return rotary positions and images of tokens `start` to `start + count` of a prompt and its completion."""
        begin, end = (bisect_left(prompt.placeholders, at) for at in (start, start + count))
        indices = [index - start for index in prompt.placeholders[begin:end]]
        device, encoded = self._model.device, None
        if indices:
            whole = self.encode(prompt)
            encoded = Encoded(whole.rows[begin:end], tuple(rows[begin:end] for rows in whole.deep))
        return ImagePass(prompt.rotary(start, count).to(device), torch.tensor(indices, device=device).long(), encoded)

    def inputs(self, prompt: PromptImages, ids: list[int]) -> dict[str, Any]:
        """Return the inputs of transformers' forward pass over a prompt."""
        device = self._model.device
        tokens = torch.tensor(ids, device=device)[None]
        inputs = {name: (tokens == self._placeholder).long() for name in TOKEN_TYPES if name in self._names}
        for name, value in prompt.features.items():
            inputs[name] = value.to(device, self._model.dtype if value.is_floating_point() else None)
        return {"input_ids": tokens, **inputs}

    @torch.inference_mode()
    def _encode(self, prompt: PromptImages) -> Encoded:
        recorded = dict[str, Any]()

        def record(_: torch.nn.Module, __: Any, keywords: dict[str, Any]) -> None:
            recorded.update(keywords)
            raise _RecordedError

        inputs = self.inputs(prompt, prompt.image_ids)
        hook = self.decoder.register_forward_pre_hook(record, with_kwargs=True)
        try:
            self._model.base_model(**inputs, use_cache=False)
        except _RecordedError:
            pass
        finally:
            hook.remove()
        deep = recorded.get("deepstack_visual_embeds") or ()
        return Encoded(recorded["inputs_embeds"][inputs["input_ids"] == self._placeholder], tuple(deep))

    def run(self, tokens: torch.Tensor, images: ImagePass) -> torch.Tensor:
        """Return the logits of a pass, [wanted, vocab]; see `SlotModel.run`."""
        embeddings = self._model.get_input_embeddings()(tokens)[None]
        deepstack: dict[str, Any] = {}
        if images.encoded is not None:
            embeddings = embeddings.index_copy(1, images.indices, images.encoded.rows[None])
            if images.encoded.deep:
                mask = torch.zeros(1, len(tokens), dtype=torch.bool, device=tokens.device)
                mask[0, images.indices] = True
                deepstack = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(images.encoded.deep)}
        positions = self._rotary.as_argument(images.rotary)
        hidden = self.decoder(inputs_embeds=embeddings, position_ids=positions, use_cache=False, **deepstack)[0]
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)[0]
        return logits


def join(parts: Sequence[ImagePass]) -> ImagePass:
    """Return one pass over the tokens of several, in order."""
    starts = accumulate((part.rotary.shape[1] for part in parts), initial=0)
    indices = [part.indices + start for part, start in zip(parts, starts, strict=False)]
    encoded = [part.encoded for part in parts if part.encoded is not None]
    deep = zip(*(each.deep for each in encoded), strict=True)
    rows = Encoded(torch.cat([each.rows for each in encoded]), tuple(map(torch.cat, deep))) if encoded else None
    return ImagePass(torch.cat([part.rotary for part in parts], 1), torch.cat(indices), rows)
