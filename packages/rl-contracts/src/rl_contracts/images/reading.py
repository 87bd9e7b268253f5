"""Read an image from bytes, a file, a data URL, Pillow or a Hugging Face column, and convert it to upright RGB."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError
from rl_contracts.images.image import Image

if TYPE_CHECKING:
    import PIL.Image

MAX_BYTES = 32 * 2**20
"""Maximum size of an encoded image."""
MAX_PIXELS = 2**26
"""Maximum width * height of an image before it is scaled. A small file can decode to gigabytes, so larger images are
rejected before they are decoded."""
MAX_TOTAL_PIXELS = 4 * MAX_PIXELS
"""Maximum number of pixels of the images of a prompt, which processors need decoded at the same time."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of Pillow that are read. Others are rare, have many variants (TIFF), or run external programs (EPS)."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation; 1 is upright."""
_PNG_BIT_DEPTH = 24
"""Position of the bits per channel in a PNG file."""


def read_image(source: Any, max_pixels: int | None = None) -> Image:
    """Read an image, turn it upright, convert it to RGB, and scale it down if it has too many pixels.

    Transparent pixels become white. 16-bit channels are reduced to 8 bits. A JPEG or PNG file that needs none of this
    is kept byte for byte. All other images become PNG files, which are lossless.

    Args:
        source: `Image`, image of Pillow, encoded bytes, path, data URL, or the value of an image column of Hugging
            Face (`{"bytes": ..., "path": ...}`). A text from an untrusted source could be the path of a local file;
            pass it through `decode_data_url`.
        max_pixels: maximum of width * height, at least 1; None for no limit.

    Raises:
        DataError: the source is none of these, is missing, is not an image, has several frames, or is too large.
    """
    if isinstance(source, Image):
        if max_pixels is None or source.width * source.height <= max_pixels:
            return source
        source = source.data
    file = _file(source)
    picture = source if file is None else _opened(file)
    try:
        _check(picture)
        return _normalized(picture, file, max_pixels)
    except DataError:
        raise
    except Exception as error:  # decoders raise errors of many classes for broken files
        raise DataError(f"image: cannot be decoded: {error}; replace or remove it") from error


def open_images(images: Sequence[Image]) -> list[PIL.Image.Image]:
    """Return the decoded images of a prompt, in mode RGB.

    Raises:
        DataError: the images have too many pixels together.
    """
    pixels = sum(image.width * image.height for image in images)
    if pixels > MAX_TOTAL_PIXELS:
        raise DataError(
            f"images: expected at most {MAX_TOTAL_PIXELS} pixels in the {len(images)} images of a prompt together, "
            f"found {pixels}; scale them down"
        )
    return [image.open() for image in images]


def decode_data_url(url: str) -> bytes:
    """Return the encoded image in a data URL.

    Raises:
        DataError: it is not a data URL of an image in base64, or is too large.
    """
    head, _, body = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise DataError(f"image: expected a data URL 'data:image/...;base64,...', found {url[:40]!r}")
    _require_size(len(body) * 3 // 4)
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:  # also binascii.Error
        raise DataError(f"image: expected base64 in the data URL, found {body[:40]!r}: {error}") from error


def _file(source: Any) -> bytes | None:
    """Return the encoded image of a source, or None for an image of Pillow."""
    if isinstance(source, Mapping):
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if isinstance(source, str) and source.startswith("data:"):
        source = decode_data_url(source)
    if isinstance(source, str | Path):
        source = _read_file(source)
    if isinstance(source, bytes | bytearray | memoryview):
        _require_size(len(source))
        return bytes(source)

    import PIL.Image

    if not isinstance(source, PIL.Image.Image):
        raise DataError(
            f"image: expected an image of Pillow, bytes, a path, a data URL or a mapping with one of these as 'bytes' "
            f"or 'path', found {source!r:.60}"
        )
    return None


def _read_file(path: str | Path) -> bytes:
    if str(path).startswith(("http://", "https://")):
        raise DataError(f"image: expected a file or a data URL, found {str(path)[:80]!r}; download it first")
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # for example, a null character, or ~ of an unknown user
        raise DataError(f"image: cannot read the file {str(path)[:80]!r}: {error}") from error


def _require_size(size: int) -> None:
    if size > MAX_BYTES:
        raise DataError(f"image: expected at most {MAX_BYTES} bytes, found {size}; scale it down")


def _opened(file: bytes) -> PIL.Image.Image:
    """Return the image of Pillow, whose pixels are not decoded yet."""
    import PIL.Image

    try:
        return PIL.Image.open(io.BytesIO(file), formats=_FORMATS)
    except Exception as error:  # Pillow raises errors of many classes for broken files
        raise DataError(
            f"image: expected a file in one of the formats {', '.join(_FORMATS)}, found {file[:16]!r}: {error}"
        ) from error


def _check(picture: PIL.Image.Image) -> None:
    """Reject several frames and too many pixels, without decoding the image."""
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != "MPO":  # a JPEG file of a camera with additional previews
        raise DataError(f"image: expected one frame, found {frames} (an animation or pages); extract one frame")
    if picture.width * picture.height > MAX_PIXELS:
        raise DataError(
            f"image: expected at most {MAX_PIXELS} pixels, found {picture.width} x {picture.height}; scale it down"
        )


def _normalized(picture: PIL.Image.Image, file: bytes | None, max_pixels: int | None) -> Image:
    """Return the image in RGB, upright, opaque and small enough."""
    import PIL.Image
    import PIL.ImageOps

    is_upright = picture.getexif().get(_ORIENTATION, 1) == 1
    picture.load()
    upright = picture if is_upright else PIL.ImageOps.exif_transpose(picture)
    size = _scaled(upright.size, max_pixels)
    if file is not None and is_upright and size == upright.size and _is_plain(picture, file):
        return Image(file, *size)
    rgb = _to_rgb(upright)
    if size != rgb.size:
        rgb = rgb.resize(size, PIL.Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    rgb.save(buffer, "PNG", compress_level=1)
    return Image(buffer.getvalue(), *size)


def _is_plain(picture: PIL.Image.Image, file: bytes) -> bool:
    """Return whether a file is a JPEG or PNG file in opaque RGB with 8 bits per channel."""
    if picture.mode != "RGB" or "transparency" in picture.info:
        return False
    return picture.format == "JPEG" or (picture.format == "PNG" and file[_PNG_BIT_DEPTH] == 8)


def _scaled(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Return the largest size [width, height] of about the same shape with at most `max_pixels` pixels."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    scale = (max_pixels / (width * height)) ** 0.5
    width = min(max(int(width * scale), 1), max_pixels)
    return width, min(max(int(height * scale), 1), max_pixels // width)


def _to_rgb(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Convert to RGB. Pillow's conversion would clip 16-bit values and drop transparency."""
    import PIL.Image

    is_16_bit = picture.mode.startswith("I;16")
    if picture.mode in ("I", "F") or (is_16_bit and "transparency" in picture.info):
        raise DataError(
            f"image: expected 8 bits per channel, or 16 without transparency, found Pillow's mode {picture.mode}; "
            "convert it"
        )
    if is_16_bit:
        return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if {"A", "a"} & {*picture.getbands()} or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        white = PIL.Image.new("RGBA", rgba.size, "white")
        return PIL.Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")
