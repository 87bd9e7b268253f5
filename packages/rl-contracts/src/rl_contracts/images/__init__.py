"""Images of messages: read from any usual source, checked, and identified by a hash of their content."""

from __future__ import annotations

from rl_contracts.images.image import Image
from rl_contracts.images.reading import MAX_BYTES, MAX_PIXELS, decode_data_url, open_images, read_image

__all__ = ["MAX_BYTES", "MAX_PIXELS", "Image", "decode_data_url", "open_images", "read_image"]
