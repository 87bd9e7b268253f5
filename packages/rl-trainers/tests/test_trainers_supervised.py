"""Trajectories from the examples of data sets."""

from typing import Any

import pytest

from rl_contracts.batch.image_entries import images_of
from rl_contracts.batch.trajectory import stack
from rl_contracts.chat.image_messages import image_part, images_in
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import DataError
from rl_contracts.images import read_image
from rl_contracts.testing.chat_formats import make_chat_tokenizer
from rl_contracts.testing.vision_families import make_vision_model
from rl_trainers.learners.preference import preference_sequences
from rl_trainers.learners.supervised import supervised_sequences

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def talk(completion: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": completion}]


def test_sequences_of_rows_with_tools_have_them_in_prompt() -> None:
    tokenizer = make_chat_tokenizer("gemma3")
    renderer = ChatRenderer(tokenizer)

    rows = supervised_sequences([{"messages": talk("Rain."), "tools": TOOLS}], renderer, 2048)
    rows += preference_sequences([{"chosen": talk("Rain."), "rejected": talk("Sun."), "tools": TOOLS}], renderer, 2048)

    for row in rows:
        prompt = row.input_ids[: row.loss_mask.argmax()].tolist()
        assert prompt == renderer.render(talk("")[:1], TOOLS)


def test_sequences_of_row_with_unrendered_content_are_rejected() -> None:
    renderer = ChatRenderer(make_chat_tokenizer("gemma3"))
    hidden = [
        {"role": "user", "content": "Weather?"},
        {"role": "developer", "content": "Be brief."},
        *talk("Rain.")[1:],
    ]

    for rows, render in (
        ([{"prompt_id": 7, "messages": hidden}], supervised_sequences),
        ([{"prompt_id": 7, "chosen": hidden, "rejected": talk("Sun.")}], preference_sequences),
    ):
        with pytest.raises(DataError, match=r"example 7: .*Be brief"):
            render(rows, renderer, 2048)


@pytest.fixture(scope="module")
def vision_renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor

    return ChatRenderer(AutoProcessor.from_pretrained(make_vision_model("qwen2_vl", tmp_path_factory.mktemp("vision"))))


def picture_talk(color: str) -> list[dict[str, Any]]:
    import PIL.Image

    image = read_image(PIL.Image.new("RGB", (16, 16), color))
    question = {"role": "user", "content": [image_part(image), {"type": "text", "text": "Color?"}]}
    return [question, {"role": "assistant", "content": color}]


@pytest.mark.slow
def test_sequences_of_rows_with_images_have_the_images(vision_renderer: ChatRenderer) -> None:
    rows = [{"messages": picture_talk("red")}, {"messages": talk("Rain.")}, {"messages": picture_talk("blue")}]

    sequences = supervised_sequences(rows, vision_renderer, 2048)

    assert [row.images for row in sequences] == [images_in(row["messages"]) for row in rows]
    for row, sequence in zip(rows, sequences, strict=True):
        prompt = vision_renderer.render(row["messages"][:1])
        assert sequence.input_ids[: len(prompt)].tolist() == prompt
        assert sequence.loss_mask.argmax() == len(prompt)
        completion = vision_renderer.decode_completion(sequence.input_ids[sequence.loss_mask])
        assert completion == row["messages"][1]["content"]
    assert images_of(stack(sequences)) == [row.images for row in sequences]


@pytest.mark.slow
def test_sequence_with_image_is_never_truncated(vision_renderer: ChatRenderer) -> None:
    size = len(supervised_sequences([{"messages": picture_talk("red")}], vision_renderer, 2048)[0].input_ids)

    with pytest.raises(DataError, match=f"example 3 has {size} tokens"):
        supervised_sequences(
            [{"prompt_id": 3, "messages": picture_talk("red")}], vision_renderer, size - 1, truncate=True
        )
