"""Image of a message: an encoded file with its size and hash."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import PIL.Image


@dataclass(frozen=True, slots=True)
class Image:
    """Encoded RGB image: upright, one frame, 8 bits per channel, opaque. Images with the same `data` are equal.

    `rl_contracts.images.read_image` builds it from other sources.
    """

    data: bytes = field(repr=False, compare=False)
    """PNG or JPEG file."""
    width: int = field(compare=False)
    """Width in pixels."""
    height: int = field(compare=False)
    """Height in pixels."""
    key: str = field(init=False)
    """SHA-256 of `data`, in hexadecimal."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", hashlib.sha256(self.data).hexdigest())

    def open(self) -> PIL.Image.Image:
        """Return the decoded image of Pillow, in mode RGB."""
        import PIL.Image

        return PIL.Image.open(io.BytesIO(self.data)).convert("RGB")

    @property
    def media_type(self) -> str:
        """Media type of `data`: `image/png` or `image/jpeg`."""
        return "image/png" if self.data.startswith(b"\x89PNG") else "image/jpeg"

    @property
    def data_url(self) -> str:
        """Data URL of the image, for `image_url` parts of OpenAI's API."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"
