"""Image features that a processor keeps in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from rl_contracts.images import features, read_image
from rl_contracts.images.features import ImageProcessor
from rl_contracts.testing.vision_families import make_vision_model


@pytest.mark.slow
def test_features_above_the_cache_limit_drop_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = ImageProcessor(str(make_vision_model("gemma3", tmp_path)))
    red, blue, green = ((read_image(Image.new("RGB", (16, 16), color)),) for color in ("red", "blue", "green"))
    first = processor.features(red)
    monkeypatch.setattr(features, "CACHE_BYTES", 2 * first.nbytes)

    second = processor.features(blue)
    assert processor.features(red) is first
    processor.features(green)

    assert processor.features(red) is first
    assert processor.features(blue) is not second
