"""Image files that are unusual or broken, for tests of all places that read images."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

__all__ = ["broken_image_files", "unusual_image_files"]


def unusual_image_files() -> dict[str, bytes]:
    """Return image files that can be read, by what is unusual about them."""
    import PIL.Image

    picture = PIL.Image.effect_noise((20, 12), 80)
    rgb = picture.convert("RGB")
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    return {
        "plain": _encoded(rgb, "PNG"),
        "one pixel": _encoded(rgb.crop((0, 0, 1, 1)), "PNG"),
        "one row": _encoded(rgb.resize((300, 1)), "PNG"),
        "CMYK": _encoded(rgb.convert("CMYK"), "JPEG"),
        "16 bits": _encoded(picture.convert("I;16"), "PNG"),
        "palette": _encoded(rgb.convert("P"), "GIF"),
        "transparent": _encoded(rgb.convert("RGBA"), "WEBP"),
        "turned by tag": _encoded(rgb, "JPEG", exif=turned),
        "progressive": _encoded(rgb, "JPEG", progressive=True),
        "bilevel": _encoded(picture.convert("1"), "BMP"),
    }


def broken_image_files() -> dict[str, bytes]:
    """Return files that must be rejected, by the reason."""
    import PIL.Image

    rgb = PIL.Image.effect_noise((64, 48), 80).convert("RGB")
    png, jpeg = _encoded(rgb, "PNG"), _encoded(rgb, "JPEG")
    return {
        "empty": b"",
        "text": b"<html>not found</html>",
        "truncated PNG": png[: len(png) // 2],
        "truncated JPEG": jpeg[: len(jpeg) // 2],
        "header only": png[:33],
        "wrong checksum": png[:40] + bytes([png[40] ^ 1]) + png[41:],
        "no pixels": _png(0, 0),
        "too many pixels": _png(2**31 - 1, 2**31 - 1),
        "too many pixels to decode": _png(9000, 9000, zlib.compress(bytes(9000))),
        "animated": _encoded(rgb, "GIF", save_all=True, append_images=[rgb.rotate(90)]),
        "32-bit float": _encoded(rgb.convert("F"), "TIFF"),
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }


def _encoded(picture: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """Return an RGB file that states its size, with any compressed pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
