"""Small copies of the images of completions, as data URLs."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from rl_contracts.errors import DataError
from rl_contracts.images import Image, read_image

PIXELS = 128 * 128
"""Maximum width * height of a thumbnail."""


def thumbnails_of(files: Iterable[Path], characters: int) -> dict[str, str]:
    """Return the data URL of each image by file name, as many as fit into a number of characters.

    Files that are missing or damaged have none.

    Args:
        files: images, the most important first.
        characters: maximum length of all data URLs together.
    """
    thumbnails: dict[str, str] = {}
    for file in files:
        if file.name in thumbnails:
            continue
        with suppress(DataError):
            url = thumbnail(file)
            characters -= len(url)
            if characters < 0:
                break
            thumbnails[file.name] = url
    return thumbnails


@lru_cache(maxsize=4096)  # for the next page: the name of a file is the hash of its content
def thumbnail(file: Path) -> str:
    """Return a small copy of an image as a data URL.

    Raises:
        DataError: the file cannot be read, or is not an image.
    """
    image, buffer = read_image(file, PIXELS), io.BytesIO()
    image.open().save(buffer, "JPEG")
    jpeg = Image(buffer.getvalue(), image.width, image.height)
    return min(image, jpeg, key=lambda copy: len(copy.data)).data_url  # PNG is smaller for drawings, JPEG for photos
