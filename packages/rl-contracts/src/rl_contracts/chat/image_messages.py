"""Images in chat messages, in the forms of OpenAI and of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_contracts.errors import DataError
from rl_contracts.images import Image, read_image

_SOURCES = ("image", "url", "path", "base64")
"""Keys under which a part of Hugging Face's form holds its image."""


def image_part(image: Image) -> dict[str, Any]:
    """Return an image as a part of a message's content, in OpenAI's form, which JSON can represent."""
    return {"type": "image_url", "image_url": {"url": image.data_url}}


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has images, without reading them."""
    contents = (message.get("content") for message in messages)
    return any(is_image_part(part) for content in contents if isinstance(content, list | tuple) for part in content)


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[Image, ...]:
    """Return the images of a conversation in order.

    A part is `{"type": "image_url", "image_url": {"url": data URL}}` (OpenAI), or `{"type": "image"}` with the image
    under `image`, `url`, `path` or `base64` (Hugging Face): any source of `rl_contracts.images.read_image`.

    Raises:
        DataError: an image is missing or cannot be read. The message names the chat message.
    """
    return tuple(image for index, message in enumerate(messages) for image in _images(index, message))


def _images(index: int, message: Mapping[str, Any]) -> Iterator[Image]:
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        if is_image_part(part):
            try:
                yield read_image(image_source(part))
            except DataError as error:
                raise DataError(f"message {index} ({message.get('role')}): {error}") from error


def image_source(part: Mapping[str, Any]) -> Any:
    """Return the source of the image in a part, for `read_image`; None if it is missing."""
    if part["type"] == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    key = next((key for key in _SOURCES if part.get(key) is not None), None)
    source = None if key is None else part[key]
    is_bare = key == "base64" and isinstance(source, str) and not source.startswith("data:")
    return f"data:image/png;base64,{source}" if is_bare else source


def with_read_images(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose images are `Image`s, so that each is decoded once. See `images_in` for errors."""
    return [_with_read_images(index, message) for index, message in enumerate(messages)]


def _with_read_images(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not has_images([message]):
        return message
    images = _images(index, message)
    parts = ({"type": "image", "image": next(images)} if is_image_part(part) else part for part in message["content"])
    return {**message, "content": [*parts]}


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as templates of processors expect it: each image as `{"type": "image"}`, without its data."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [{"type": "image"} if is_image_part(part) else part for part in content]}
