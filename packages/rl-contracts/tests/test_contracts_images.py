"""Images: every source and mode becomes upright, opaque RGB; files that already are stay byte for byte."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import DataError
from rl_contracts.images import MAX_BYTES, MAX_PIXELS, Image, decode_data_url, open_images, read_image
from rl_contracts.images import reading as reading_module
from rl_contracts.testing.image_files import broken_image_files, unusual_image_files

pillow = pytest.importorskip("PIL.Image")

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def encoded(picture: Any, format_name: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format_name, **options)
    return buffer.getvalue()


def drawing(mode: str = "RGB", width: int = 6, height: int = 4) -> Any:
    """Return a red image with a green top left pixel."""
    picture = pillow.new("RGB", (width, height), RED)
    picture.putpixel((0, 0), GREEN)
    return picture.convert(mode)


def orientation(value: int) -> Any:
    exif = pillow.Exif()
    exif[0x0112] = value
    return exif


PNG = encoded(drawing(), "PNG")
JPEG = encoded(drawing(width=32, height=16), "JPEG", exif=orientation(1))


def test_read_image_every_source_gives_the_same_image(tmp_path: Path) -> None:
    file = tmp_path / "drawing.png"
    file.write_bytes(PNG)
    image = read_image(PNG)
    column = {"bytes": PNG, "path": "missing.png"}
    sources = [image, bytearray(PNG), file, str(file), image.data_url, column, {"bytes": None, "path": str(file)}]

    assert {read_image(source) for source in sources} == {image}
    assert (image.width, image.height, image.data, image.media_type) == (6, 4, PNG, "image/png")
    assert read_image(drawing()).open().tobytes() == drawing().tobytes()


def test_image_equality_and_hash_depend_on_the_content() -> None:
    image, other = read_image(PNG), read_image(JPEG)

    assert image == read_image(bytes(PNG)) == pickle.loads(pickle.dumps(image))
    assert len({image, read_image(PNG), other}) == 2
    assert image.key != other.key
    assert repr(PNG) not in repr(image)


@pytest.mark.parametrize("max_pixels", [None, 32 * 16])
def test_read_image_upright_jpeg_is_kept_byte_for_byte(max_pixels: int | None) -> None:
    image = read_image(JPEG, max_pixels)

    assert (image.data, image.media_type) == (JPEG, "image/jpeg")
    assert decode_data_url(image.data_url) == JPEG


@pytest.mark.parametrize(("value", "size", "green"), [(6, (4, 6), (3, 0)), (3, (6, 4), (5, 3)), (2, (6, 4), (5, 0))])
def test_read_image_rotated_by_exif_is_upright(value: int, size: tuple[int, int], green: tuple[int, int]) -> None:
    image = read_image(encoded(drawing(), "PNG", exif=orientation(value)))

    assert image.open().size == (image.width, image.height) == size
    assert image.open().getpixel(green) == GREEN
    assert image.open().getexif().get(0x0112, 1) == 1


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "YCbCr", "1", "HSV"])
def test_read_image_of_other_modes_is_rgb_png(mode: str) -> None:
    picture = drawing(mode)

    image = read_image(picture)

    assert pillow.open(io.BytesIO(image.data)).mode == "RGB"
    assert image.media_type == "image/png"
    assert image.open().tobytes() == picture.convert("RGB").tobytes()


def test_read_image_cmyk_jpeg_keeps_its_colors() -> None:
    image = read_image(encoded(drawing("CMYK", 32, 16), "JPEG", quality=100))

    assert image.media_type == "image/png"
    assert all(abs(a - b) < 20 for a, b in zip(image.open().getpixel((30, 10)), RED, strict=True))


@pytest.mark.parametrize("mode", ["P", "RGB", "RGBA", "LA", "PA", "L"])
def test_read_image_transparent_pixels_become_white(mode: str) -> None:
    picture = pillow.new(mode, (2, 2))  # black, transparent
    transparency: dict[str, Any] = {} if "A" in mode else {"transparency": (0, 0, 0) if mode == "RGB" else 0}

    image = read_image(encoded(picture, "PNG", **transparency) if transparency else picture)

    assert image.open().getpixel((1, 1)) == WHITE


def test_read_image_16_bit_gray_keeps_its_brightness() -> None:
    picture = pillow.frombytes("I;16", (3, 1), b"\x00\x00\x00\x80\xff\xff")

    image = read_image(encoded(picture, "PNG"))

    assert [image.open().getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]


def test_read_image_16_bit_color_becomes_8_bit() -> None:
    deep = png_file(1, 1, depth=16, color=2, pixels=b"\x00\xff\xff\x00\x00\x80\x00")

    image = read_image(deep)

    assert image.data != deep
    assert (image.data[24], image.open().getpixel((0, 0))) == (8, (255, 0, 128))


def png_file(width: int, height: int, depth: int, color: int, pixels: bytes) -> bytes:
    """Return a PNG file of given header and pixels, which Pillow would not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 400))
def test_read_image_above_max_pixels_is_scaled_in_proportion(width: int, height: int, limit: int) -> None:
    image = read_image(pillow.new("RGB", (width, height)), limit)

    assert image.width * image.height <= limit or (image.width, image.height) == (width, height)
    assert (image.width, image.height) == (width, height) or width * height > limit
    scale = min((limit / (width * height)) ** 0.5, 1.0)
    if min(width, height) * scale >= 1:
        assert abs(image.width - width * scale) < 1
        assert abs(image.height - height * scale) < 1


def test_read_image_of_one_pixel_is_kept() -> None:
    image = read_image(encoded(pillow.new("RGB", (1, 1), RED), "PNG"), 1)

    assert (image.width, image.height, image.open().getpixel((0, 0))) == (1, 1, RED)


def test_read_image_camera_jpeg_with_preview_is_read() -> None:
    photo = encoded(drawing(width=32, height=16), "MPO", save_all=True, append_images=[drawing()])
    assert pillow.open(io.BytesIO(photo)).n_frames == 2

    assert (read_image(photo).width, read_image(photo).height) == (32, 16)


BAD: dict[str, Any] = {
    "animated": lambda: encoded(drawing(), "GIF", save_all=True, append_images=[drawing("L")]),
    "truncated": lambda: encoded(pillow.effect_noise((64, 64), 90), "PNG")[:-900],
    "truncated_jpeg": lambda: encoded(pillow.effect_noise((64, 64), 90), "JPEG")[:-900],
    "broken": lambda: PNG[:30] + b"\x00" * 20 + PNG[50:],
    "not_an_image": lambda: b"<html>",
    "empty": lambda: b"",
    "bomb": lambda: png_file(30_000, 30_000, depth=8, color=2, pixels=b""),
    "external_program": lambda: encoded(drawing(), "EPS"),
    "32_bit": lambda: drawing("F"),
    "16_bit_transparent": lambda: encoded(pillow.new("I;16", (2, 2)), "PNG", transparency=0),
    "none": lambda: None,
    "number": lambda: 7,
    "empty_column": lambda: {"bytes": None, "path": None},
    "missing_file": lambda: "no/such/file.png",
    "null_character": lambda: "a\0b",
    "folder": lambda: "/",
    "unknown_user": lambda: "~nosuchuser/image.png",
    "http": lambda: "https://example.org/image.png",
    "data_url_of_text": lambda: "data:text/plain;base64,AAAA",
    "data_url_without_base64": lambda: "data:image/png,AAAA",
    "data_url_not_base64": lambda: "data:image/png;base64,%%%",
    "data_url_not_ascii": lambda: "data:image/png;base64,\u00e9",
    "too_large": lambda: bytes(MAX_BYTES + 1),
    "too_large_url": lambda: "data:image/png;base64," + "A" * (MAX_BYTES * 4 // 3 + 4),
}


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("name", BAD)
def test_read_image_unusable_source_raises_data_error(name: str) -> None:
    source = BAD[name]()

    with pytest.raises(DataError, match=r"^image: "):
        read_image(source)


def test_read_image_too_large_is_rejected_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "_normalized", lambda *_: pytest.fail("decoded"))

    with pytest.raises(DataError, match=str(MAX_PIXELS)):
        read_image(pillow.new("1", (8193, 8192)))


@given(st.data())
def test_read_image_damaged_file_gives_image_or_data_error(data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from([PNG, JPEG, encoded(drawing(), "WEBP"), encoded(drawing(), "GIF")])))
    for position, byte in data.draw(st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)))):
        damaged[position] = byte

    try:
        image = read_image(bytes(damaged))
    except DataError:
        return
    assert isinstance(image, Image)
    assert image.open().size == (image.width, image.height)


def test_open_images_too_large_together_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "MAX_TOTAL_PIXELS", 48)
    image = read_image(drawing())

    assert [picture.size for picture in open_images([image, image])] == [(6, 4)] * 2
    with pytest.raises(DataError, match="72"):
        open_images([image] * 3)


@pytest.mark.parametrize("name", broken_image_files())
def test_read_image_broken_file_is_rejected(name: str) -> None:
    with pytest.raises(DataError):
        read_image(broken_image_files()[name])


@pytest.mark.parametrize("name", unusual_image_files())
def test_read_image_unusual_file_becomes_rgb(name: str) -> None:
    image = read_image(unusual_image_files()[name])

    assert image.open().size == (image.width, image.height)
