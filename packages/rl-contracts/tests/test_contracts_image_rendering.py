"""Conversations with images: token ids equal those of the processor, and masks and turns stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from rl_contracts.chat.image_messages import image_part, images_in, with_read_images
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import DataError
from rl_contracts.images import read_image
from rl_contracts.testing.vision_families import VISION_FAMILIES, make_vision_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def processor(directory: Path) -> Any:
    return AutoProcessor.from_pretrained(directory)


@pytest.fixture(scope="module")
def renderer(processor: Any) -> ChatRenderer:
    return ChatRenderer(processor)


def picture(width: int, height: int, color: str) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def question(*parts: Any) -> dict[str, Any]:
    """Return a user message of texts and images, the latter as data URLs."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": read_image(part).data_url}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def test_render_ids_equal_those_of_the_processor(renderer: ChatRenderer, processor: Any) -> None:
    red, blue = picture(20, 30, "red"), picture(30, 12, "blue")
    messages = [question("left", red, "right", blue, "how many?")]

    text = renderer.text(messages)
    expected = processor(text=[text], images=[[red, blue]], add_special_tokens=False)["input_ids"][0]

    assert renderer.render(messages) == list(expected)
    assert len(expected) > len(renderer.encode(text)) - 2


def test_decode_writes_placeholders_of_an_image_once(renderer: ChatRenderer, processor: Any) -> None:
    ids = renderer.render([question("left", picture(20, 30, "red"), "right")])

    text, placeholder = renderer.decode(ids), processor.tokenizer.decode(processor.image_token_ids[:1])

    assert placeholder in text
    assert placeholder * 2 not in text
    assert placeholder * 2 in processor.tokenizer.decode(ids)
    assert renderer.decode(renderer.encode("left right")) == "left right"


def test_render_sft_mask_is_the_turn_after_the_image(renderer: ChatRenderer) -> None:
    messages = [question(picture(20, 30, "red"), "color?"), {"role": "assistant", "content": "red"}]

    ids, mask = renderer.render_sft(messages)

    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert trained == [*renderer.encode("red"), renderer.stop_ids[0]]


def test_render_sft_images_in_two_turns_train_both_turns(renderer: ChatRenderer, directory: Path) -> None:
    colors = {"red": picture(20, 30, "red"), "blue": picture(30, 12, "blue")}
    turns = [
        turn for color, shown in colors.items() for turn in (question(shown), {"role": "assistant", "content": color})
    ]
    if "llava_onevision" in directory.name:  # splits an image into tiles only if the conversation has no other
        with pytest.raises(DataError, match="other images follow"):
            renderer.render_sft(turns)
        return

    ids, mask = renderer.render_sft(turns)

    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert trained == [token for color in colors for token in (*renderer.encode(color), renderer.stop_ids[0])]


def test_append_turn_with_image_equals_the_whole_conversation(renderer: ChatRenderer, directory: Path) -> None:
    if "llava_onevision" in directory.name:
        pytest.skip("splits an image into tiles only if the conversation has no other")
    turns = [question(picture(20, 30, "red"), "color?"), {"role": "assistant", "content": "red"}]
    following = question(picture(30, 12, "blue"), "and this?")
    completion = [*renderer.encode("red"), renderer.stop_ids[0]]

    ids = renderer.append_turn([*renderer.render(turns[:1]), *completion], [following])

    assert ids == renderer.render([*turns, following])


@pytest.mark.parametrize("has_image", [True, False])
def test_append_turn_with_the_token_of_features_is_rejected(
    renderer: ChatRenderer, directory: Path, has_image: bool
) -> None:
    config, tokenizer = (auto.from_pretrained(directory) for auto in (AutoConfig, AutoTokenizer))
    token = tokenizer.convert_ids_to_tokens(getattr(config, "image_token_id", None) or config.image_token_index)
    images = [picture(20, 30, "red")] * has_image

    with pytest.raises(DataError, match="placeholder"):
        renderer.append_turn(renderer.render([question("?")]), [question(*images, token)])


def test_count_placeholders_ignores_tokens_around_an_image(renderer: ChatRenderer, processor: Any) -> None:
    around = processor.image_token_ids[1:]  # for example <img>, which is a tag of HTML, too

    assert renderer.count_placeholders(around) == 0


def test_render_text_with_a_placeholder_of_its_own_is_rejected(renderer: ChatRenderer, processor: Any) -> None:
    mark = getattr(processor, "boi_token", None) or processor.image_token
    with pytest.raises(DataError, match="placeholder"):
        renderer.render([question(picture(20, 30, "red"), f"what is {mark}?")])


def test_render_image_without_a_processor_is_rejected(directory: Path) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(directory))
    with pytest.raises(DataError, match="vision-language model"):
        renderer.render([question(picture(20, 30, "red"))])


def test_render_text_with_placeholder_is_rejected(renderer: ChatRenderer) -> None:
    (placeholder, *_) = renderer._placeholders
    text = renderer._tokenizer.convert_ids_to_tokens(placeholder)

    with pytest.raises(DataError, match="placeholder"):
        renderer.render([{"role": "user", "content": f"what is {text}?"}])


def test_with_read_images_reads_each_form_once(renderer: ChatRenderer) -> None:
    image = read_image(picture(16, 16, "red"))
    _, encoded = image.data_url.split(",")
    forms = [image_part(image), {"type": "image", "base64": encoded}, {"type": "image", "image": image.open()}]

    (message, *_) = with_read_images([{"role": "user", "content": [*forms, {"type": "text", "text": "what?"}]}])

    assert [part.get("image") for part in message["content"]] == [image, image, image, None]
    assert images_in([message]) == (image,) * 3
