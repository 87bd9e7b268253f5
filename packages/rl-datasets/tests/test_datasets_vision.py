"""Data sets with images: marks and parts, sources of images, options of each data set, and errors that name the row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import datasets

from rl_contracts import registry
from rl_contracts.chat.image_messages import image_part
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.images import Image, read_image
from rl_datasets import Chat, ClevrCount70K, DrawnScenes, Geometry3K, PromptLoader, VisionChat
from rl_datasets.validate import validate
from rl_datasets.vision import chat as chat_module
from rl_datasets.vision.parquet import write_parquet

SCENES = DrawnScenes(size=8, questions=["count", "color"])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def picture(width: int = 8, height: int = 6, color: str = "red") -> Any:
    import PIL.Image

    return PIL.Image.new("RGB", (width, height), color)


RED, BLUE, GREEN = (read_image(picture(color=color)) for color in ("red", "blue", "green"))


def column(*images: Image) -> list[dict[str, Any]]:
    return [{"bytes": image.data, "path": None} for image in images]


def record(problem: str = "<image>How many?", answer: Any = "3", **other: Any) -> dict[str, Any]:
    return {"images": column(RED), "problem": problem, "answer": answer, **other}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(row: dict[str, Any]) -> list[Any]:
    """Return the contents of all messages, with the image or text itself instead of each part."""
    return [
        [
            part["text"] if part["type"] == "text" else read_image(part["image_url"]["url"])
            for part in message["content"]
        ]
        if isinstance(message["content"], list)
        else message["content"]
        for message in row["messages"]
    ]


def test_clevr_rl_example_has_system_image_question_and_answer(tmp_path: Path) -> None:
    rows = ClevrCount70K(
        parquet(tmp_path / "train.parquet", [record("<image>How many Different items are there?", 3, level=2)])
    )

    row = rows[-1]

    assert [message["role"] for message in row["messages"]] == ["system", "user"]
    assert row["messages"][1]["content"] == [
        image_part(RED),
        {"type": "text", "text": "How many items are there?"},
    ]
    assert {name: row[name] for name in ("prompt_id", "answer", "level")} == {"prompt_id": 0, "answer": "3", "level": 2}
    assert row.keys() == {"prompt_id", "messages", "answer", "level"}
    assert "[4]" in row["messages"][0]["content"]
    assert rows.gold_completion(row) == "[3]"


def test_geometry3k_rl_example_keeps_choices_for_the_reward(tmp_path: Path) -> None:
    choices = {"choices": ["2", "4"], "ground_truth": "B", "id": 7}
    rows = Geometry3K(parquet(tmp_path / "train.parquet", [record("<image>Find x.", "4", **choices)]))

    row = rows[0]

    assert {name: row[name] for name in choices} == choices
    assert "\\boxed{}" in row["messages"][0]["content"]
    assert "<think>" in row["messages"][0]["content"]
    assert contents(row)[1] == [RED, "Find x."]
    assert rows.gold_completion(row) == "\\boxed{4}"


@pytest.mark.parametrize("loader", [ClevrCount70K, Geometry3K])
def test_vision_sft_example_ends_with_the_plain_answer(tmp_path: Path, loader: Callable[..., VisionChat]) -> None:
    file = parquet(tmp_path / "train.parquet", [record()])

    assert contents(loader(file, form="sft")[0]) == [[RED, "How many?"], "3"]
    assert contents(loader(file, form="sft", system="Be brief.")[0])[0] == "Be brief."
    assert contents(loader(file, system="")[0]) == [[RED, "How many?"]]


@pytest.mark.parametrize(
    ("loader", "form", "side"),
    [(ClevrCount70K, "rl", 336), (ClevrCount70K, "sft", 336), (Geometry3K, "rl", 448), (Geometry3K, "sft", 512)],
)
def test_large_image_is_scaled_down_to_the_default_of_the_data_set(
    tmp_path: Path, loader: Callable[..., VisionChat], form: str, side: int
) -> None:
    large, fitting = read_image(picture(2 * side, side)), read_image(picture(side, side))
    rows = [record("<image><image>Sum?", images=column(large, fitting))]
    file = parquet(tmp_path / "train.parquet", rows)

    scaled, unchanged, _ = contents(loader(file, form=form, system="")[0])[0]

    assert 0.98 * side**2 < scaled.width * scaled.height <= side**2
    assert abs(scaled.width / scaled.height - 2) < 0.02
    assert unchanged == fitting
    assert contents(loader(file, form=form, system="", max_pixels=10**6)[0])[0][0] == large


def test_vision_chat_marks_become_parts_in_order(tmp_path: Path) -> None:
    texts = ["Compare <image> and <image>", "<image>\n<image>", "No image"]
    images = [column(RED, BLUE), column(BLUE, GREEN), []]
    rows = [record(text, images=column) for text, column in zip(texts, images, strict=True)]

    examples = VisionChat(parquet(tmp_path / "train.parquet", rows))

    assert [contents(row)[0] for row in examples] == [
        ["Compare ", RED, " and ", BLUE],
        [BLUE, "\n", GREEN],
        "No image",
    ]


@pytest.mark.parametrize("loader", [VisionChat, ClevrCount70K, Geometry3K])
@pytest.mark.parametrize("problem", ["How many?", "<image><image>How many?"])
def test_vision_example_with_other_number_of_marks_names_the_row(
    tmp_path: Path, problem: str, loader: Callable[..., VisionChat]
) -> None:
    file = parquet(tmp_path / "train.parquet", [record(), record(problem)])

    with pytest.raises(DataError, match=r"train\.parquet row 1: .* and 1 images"):
        loader(file)


def test_vision_shards_in_the_folder_data_are_read_in_order(tmp_path: Path) -> None:
    for shard in range(2):
        rows = [record(answer=f"{shard}{row}") for row in range(2)]
        parquet(tmp_path / f"data/train-0000{shard}-of-00002.parquet", rows)

    examples = VisionChat(tmp_path)

    assert [row["answer"] for row in examples] == ["00", "01", "10", "11"]
    parquet(tmp_path / "data/train-00001-of-00002.parquet", [record(), record("Without")])
    with pytest.raises(DataError, match=r"train-00001-of-00002\.parquet row 1: "):
        VisionChat(tmp_path)


def test_vision_images_are_read_on_access_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    monkeypatch.setattr(chat_module, "read_image", lambda *arguments: reads.append(arguments) or RED)

    rows = VisionChat(parquet(tmp_path / "train.parquet", [record()] * 5))

    assert (len(rows), reads) == (5, [])
    assert rows[2]["messages"] == rows[2]["messages"]
    assert len(reads) == 2


def test_vision_broken_image_is_found_on_access_and_by_validate(tmp_path: Path) -> None:
    broken = [{"bytes": RED.data[:50], "path": None}]
    two = record("<image><image>?", images=[*column(RED), *broken])
    rows = ClevrCount70K(parquet(tmp_path / "train.parquet", [record(), two, record(images=[None]), record()]))

    assert contents(rows[3])[1] == [RED, "How many?"]
    with pytest.raises(DataError, match=r"train\.parquet row 1 image 2: cannot be decoded"):
        rows[1]
    report = validate(rows, lambda prompt, completion, *_, answer: float(completion == f"[{answer}]" != prompt))
    assert [failure.index for failure in report.failures] == [1, 2]
    assert "row 2 image 1: " in report.failures[1].reason


USER = {"role": "user", "content": "?"}
PARTS = [
    [{"type": "image"}, {"type": "text", "text": "And "}, {"type": "image", "image": "images/blue.png"}],
    [{"type": "image_url", "image_url": {"url": GREEN.data_url, "detail": "low"}}, {"type": "text", "text": "?"}],
]


@pytest.mark.parametrize("form", ["rl", "sft"])
def test_vision_chat_reads_content_lists_with_relative_paths(tmp_path: Path, form: str) -> None:
    for name, image in (("red", RED), ("blue", BLUE)):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / f"images/{name}.png").write_bytes(image.data)
    turns = ["user", PARTS[0]], ["assistant", "Two."], ["user", PARTS[1]], ["assistant", "Three."]
    messages = [{"role": role, "content": content} for role, content in turns]
    file = lines(tmp_path / "train.jsonl", [{"messages": messages, "images": ["images/red.png"]}])

    row = VisionChat(file, form=form, instruction="Be brief.")[0]

    expected = [[RED, "And ", BLUE], "Two.", [GREEN, "?\n\nBe brief."]]
    assert contents(row) == expected + (["Three."] if form == "sft" else [])
    assert row.get("answer") == ("Three." if form == "rl" else None)


def test_vision_chat_reads_content_lists_of_parquet(tmp_path: Path) -> None:
    content = [{"type": "image", "text": None, "image": column(RED)[0]}, {"type": "text", "text": "?", "image": None}]
    rows = [{"messages": [{"role": "user", "content": content}], "answer": "1"}]

    assert contents(VisionChat(parquet(tmp_path / "train.parquet", rows))[0]) == [[RED, "?"]]


def test_vision_chat_columns_map_one_image_per_record(tmp_path: Path) -> None:
    file = parquet(tmp_path / "train.parquet", [{"image": column(BLUE)[0], "q": "<image>?", "label": 2}])

    row = VisionChat(file, columns={"images": "image", "problem": "q", "answer": "label"})[0]

    assert (contents(row), row["answer"]) == ([[BLUE, "?"]], 2)


def test_vision_chat_sharegpt_messages_with_marks_use_the_images_column(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED.data)
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}]
    file = lines(tmp_path / "train.jsonl", [{"messages": turns, "images": ["red.png"]}])

    assert contents(VisionChat(file, form="sft")[0]) == [[RED, "What?"], "Red."]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "expected a column 'problem'"),
        ({"problem": "<image>?", "image": "a.png"}, r"data\.columns\.images=image"),
        ({"problem": "?", "video": "a.mp4"}, "'video'"),
        ({"problem": "<image>?", "images": ["a.png"], "choices": ["1"]}, "'choices'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "base64": "AA"}]}]}, "'base64'"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, "video"),
        (
            {
                "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}],
                "images": "a",
            },
            "of the assistant|images in the prompt",
        ),
    ],
)
@pytest.mark.parametrize("form", ["rl", "sft"])
def test_vision_chat_unread_part_of_a_record_is_rejected(
    tmp_path: Path, row: dict[str, Any], message: str, form: str
) -> None:
    with pytest.raises(DataError, match=message):
        VisionChat(lines(tmp_path / "train.jsonl", [{"answer": "1", **row}]), form=form)


@pytest.mark.parametrize("loader", [ClevrCount70K, Geometry3K])
@pytest.mark.parametrize("missing", ["answer", "problem", "images"])
def test_vision_missing_column_error_names_it(tmp_path: Path, missing: str, loader: Callable[..., VisionChat]) -> None:
    row = {name: value for name, value in record().items() if name != missing}

    with pytest.raises(DataError, match=f"row 0: expected a column {missing!r}"):
        loader(parquet(tmp_path / "train.parquet", [row]))


@pytest.mark.parametrize(
    "source", ["https://example.org/a.png", "missing.png", "data:image/png;base64,AA", "~nouser/a"]
)
def test_vision_chat_unusable_source_error_names_the_line(tmp_path: Path, source: str) -> None:
    rows = VisionChat(lines(tmp_path / "train.jsonl", [record(images=[source])]))

    with pytest.raises(DataError, match=r"train\.jsonl:1 image 1: "):
        rows[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 0}, "max_pixels"),
        ({"max_pixels": "9*9"}, "max_pixels"),
        ({"form": "pairs"}, "form"),
        ({"crop": 1}, "crop"),
    ],
)
def test_vision_invalid_options_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Geometry3K(parquet(tmp_path / "train.parquet", [record()]), **options)


def test_vision_chat_without_path_or_examples_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path of vision-chat data"):
        VisionChat()
    with pytest.raises(DataError, match="found none"):
        VisionChat(lines(tmp_path / "train.jsonl", []))


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [("clevr_count_70k", "BUAADreamer/clevr_count_70k"), ("geometry3k", "hiyouga/geometry3k")],
)
def test_vision_registered_name_reads_its_hub_id(monkeypatch: pytest.MonkeyPatch, name: str, hub_id: str) -> None:
    requests: list[tuple[str, str]] = []

    def load(path: str, split: str, subset: str | None) -> datasets.Dataset:
        requests.append((path, split))
        return datasets.Dataset.from_list([record(images=[picture()])]).cast_column(
            "images", datasets.List(datasets.Image())
        )

    monkeypatch.setattr("rl_datasets.vision.table.load_hub", load)

    row = registry.load("rl.datasets", name)(split="test")[0]

    assert requests == [(hub_id, "test")]
    assert contents(row)[1][0].open().size == (8, 6)


def test_write_parquet_of_scenes_is_read_by_vision_data_sets(tmp_path: Path) -> None:
    write_parquet(SCENES, tmp_path / "data" / "train.parquet")

    rows = VisionChat(tmp_path)

    for scene, row in zip(SCENES, rows, strict=True):
        assert row["messages"] == scene["messages"]
        assert row["answer"] == scene["answer"]
    features = datasets.load_dataset("parquet", data_files=str(tmp_path / "data/train.parquet"), split="train").features
    assert [*features] == ["images", "problem", "answer"]
    assert features["images"] == datasets.List(datasets.Image())


def test_prompt_loader_of_vision_data_rejects_state_of_other_images(tmp_path: Path) -> None:
    files = [parquet(tmp_path / f"{image.key}.parquet", [record(images=column(image))] * 3) for image in (RED, BLUE)]
    red, blue = (PromptLoader(VisionChat(file)) for file in files)
    next(red)

    with pytest.raises(ConfigError):
        blue.load_state_dict(red.state_dict())


def test_text_data_set_with_images_is_still_rejected(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]

    for row in ({"messages": messages}, {"messages": "<image>?", "images": ["a.png"]}):
        with pytest.raises(DataError):
            Chat(lines(tmp_path / "train.jsonl", [row]))
