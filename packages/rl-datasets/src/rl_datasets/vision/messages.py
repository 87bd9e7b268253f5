"""Images in messages: content parts and `<image>` marks.

`mark_images` turns content parts into text with marks, which the readers of text data understand. `with_parts` turns
the marks into content parts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_contracts.errors import DataError
from rl_datasets.columns import Record, missing
from rl_datasets.conversations import Message, decoded, has_messages, parsed

MARK = "<image>"
"""Position of an image in a text."""
_IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of image parts (Hugging Face and TRL, OpenAI's chat completions, OpenAI's responses)."""
_SOURCES = ("image", "image_url", "url", "path")
"""Entries of an image part that contain the image."""
_IGNORED = ("type", "detail")
_CONTENT = ("content", "value")
_NEXT = object()
"""Placeholder for the next image of the column `images`."""


def mark_images(record: Record, column: str) -> tuple[Any, list[Any]]:
    """Replace the images in messages by marks.

    Args:
        record: location and columns of the record. Its column `images` is a list of images, one image, or null. These
            images belong, in order, to the marks of texts and to the image parts that contain no image.
        column: column with a text with marks, or with messages whose content is such a text or a list of parts.

    Returns:
        The text or messages, with one mark per image, and the sources of the images in order.

    Raises:
        DataError: the numbers of marks and images differ, or an image part cannot be read.
    """
    where, row = record
    value = decoded(row[column])
    sources: list[Any] = []
    if isinstance(value, str):
        value = _marked(where, value, sources)
    elif has_messages(value):
        messages = [value] if isinstance(value, Mapping) else value
        value = [
            {key: _marked(where, entry, sources) if key in _CONTENT else entry for key, entry in message.items()}
            for message in messages
        ]
    images = _as_list(row.get("images"))
    marks = sources.count(_NEXT)
    if marks and "images" not in row:
        raise missing(where, row, "images")
    if marks != len(images):
        raise DataError(
            f"{where}: expected one {MARK} mark or image part for each image of the column 'images', found {marks} of "
            f"them and {len(images)} images; correct or remove the example"
        )
    remaining = iter(images)
    return value, [next(remaining) if source is _NEXT else source for source in sources]


def with_parts(where: str, messages: list[Message], sources: list[Any]) -> list[Message]:
    """Return messages whose marks are content parts `{"type": "image", "image": source}`; others keep their text.

    Raises:
        DataError: a message of the assistant has an image, or `sources` has another number of images than marks.
    """
    for message in messages:
        if message["role"] == "assistant" and MARK in message["content"]:
            raise DataError(
                f"{where}: expected images only in prompts, found {MARK} in a message of the assistant; remove the "
                "example"
            )
    marks = sum(message["content"].count(MARK) for message in messages)
    if marks != len(sources):
        raise DataError(
            f"{where}: expected all {len(sources)} images in the prompt, found {marks} {MARK} marks; correct or remove "
            "the example"
        )
    remaining = iter(sources)
    return [{**message, "content": _parts(message["content"], remaining)} for message in messages]


def _parts(content: str, sources: Iterator[Any]) -> str | list[dict[str, Any]]:
    if MARK not in content:
        return content
    first, *texts = content.split(MARK)
    parts = [{"type": "text", "text": first}]
    for text in texts:
        parts += [{"type": "image", "image": next(sources)}, {"type": "text", "text": text}]
    return [part for part in parts if part != {"type": "text", "text": ""}]


def _marked(where: str, content: Any, sources: list[Any]) -> Any:
    """Return a content with a mark instead of each image part, and append the sources of all marks."""
    if isinstance(content, str):
        sources += [_NEXT] * content.count(MARK)
        return content
    if not isinstance(content, list):
        return content
    marked: list[Any] = []
    for part in content:
        entries = {key: entry for key, entry in part.items() if entry is not None} if isinstance(part, Mapping) else {}
        if entries.get("type") in _IMAGE_PARTS:
            sources.append(_source(where, entries))
            marked.append({"type": "text", "text": MARK})
        else:
            _marked(where, entries.get("text", part), sources)
            marked.append(part)
    return marked


def _source(where: str, part: dict[str, Any]) -> Any:
    """Return the image of a part without null entries."""
    images = [part[name] for name in _SOURCES if name in part]
    unread = sorted(part.keys() - {*_SOURCES, *_IGNORED})
    if len(images) > 1 or unread:
        raise DataError(
            f"{where}: expected an image part with one of {', '.join(_SOURCES)}, found {', '.join(map(repr, part))}; "
            "correct the example"
        )
    image = images[0] if images else _NEXT
    return image.get("url", image) if isinstance(image, Mapping) else image


def _as_list(images: Any) -> list[Any]:
    value = parsed(images)
    if value is None or isinstance(value, list):
        return value or []
    return [value]
