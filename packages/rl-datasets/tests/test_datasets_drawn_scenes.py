import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("PIL")

from rl_contracts import registry
from rl_contracts.chat.image_messages import image_part
from rl_contracts.errors import ConfigError
from rl_contracts.images import read_image
from rl_datasets import DrawnScenes
from rl_datasets.validate import validate
from rl_datasets.vision.drawn_scenes import CELLS_PER_SIDE, COLORS, QUESTIONS, Scene, Shape, draw_scene, split_of

SEEDS = st.integers(0, 2**32)
SCENE = Scene(
    2,
    "count",
    (Shape("circle", "red", 24, 2, 2), Shape("circle", "blue", 10, 30, 2), Shape("square", "red", 10, 60, 60)),
    ("red", "circle"),
)


def test_scene_answers_its_question() -> None:
    shapes = SCENE.shapes

    assert (SCENE.question, SCENE.answer) == ("How many red circles are there?", "1")
    count = Scene(1, "count", shapes)
    assert (count.question, count.answer) == ("How many shapes are there?", "3")
    assert (Scene(2, "color", shapes).question, Scene(2, "color", shapes).answer) == (
        "What color is the largest shape?",
        "red",
    )
    assert (Scene(2, "shape", shapes).question, Scene(2, "shape", shapes).answer) == (
        "What is the largest shape?",
        "circle",
    )


def test_scene_image_shows_each_shape_at_its_place() -> None:
    picture = SCENE.image().open()

    assert picture.size == (84, 84)
    for shape in SCENE.shapes:
        assert picture.getpixel((shape.left + shape.size // 2, shape.top + shape.size // 2)) == COLORS[shape.color]
    corners = {shape.kind: picture.getpixel((shape.left, shape.top)) for shape in SCENE.shapes}
    assert corners == {"circle": (255, 255, 255), "square": COLORS["red"]}
    assert {color for _, color in picture.getcolors()} == {COLORS["red"], COLORS["blue"], (255, 255, 255)}


@given(SEEDS, st.sampled_from([*CELLS_PER_SIDE]), st.sampled_from(QUESTIONS))
def test_scene_shapes_are_separate_and_have_one_largest(seed: int, level: int, topic: str) -> None:
    scene = draw_scene(random.Random(seed), level, topic)

    boxes = [(shape.left, shape.top, shape.left + shape.size, shape.top + shape.size) for shape in scene.shapes]
    assert all(0 <= left < right <= scene.pixels and 0 <= top < low <= scene.pixels for left, top, right, low in boxes)
    for i, (left, top, right, low) in enumerate(boxes):
        assert all(right <= l2 or r2 <= left or low <= t2 or b2 <= top for l2, t2, r2, b2 in boxes[:i])
    sizes = sorted(shape.size for shape in scene.shapes)
    assert topic == "count" or sizes[-1] > sizes[-2]


def test_scene_counts_are_uniform_for_each_level() -> None:
    rng = random.Random(0)
    for level, answers in ((1, range(1, 5)), (2, range(10)), (3, range(10))):
        counts = Counter(draw_scene(rng, level, "count").answer for _ in range(400 * len(answers)))
        assert {*counts} == {*map(str, answers)}
        assert all(abs(count / 400 - 1) < 0.3 for count in counts.values())


@settings(max_examples=10)
@given(SEEDS)
def test_drawn_scenes_splits_share_no_image(seed: int) -> None:
    options = {"levels": [1, 2], "questions": [*QUESTIONS]}
    train = DrawnScenes(split="train", seed=seed, size=100, **options)
    test = DrawnScenes(split="test", seed=seed, size=30, **options)

    assert not {scene.shapes for scene in train.scenes} & {scene.shapes for scene in test.scenes}
    assert {split_of(scene, seed) for scene in test.scenes} == {"test"}
    assert len({*train.scenes}) == 100


def test_drawn_scenes_depend_on_the_seed() -> None:
    first, again, other = (DrawnScenes(seed=seed, size=10) for seed in (3, 3, 4))

    assert list(first) == list(again)
    assert list(first) != list(other)


def test_drawn_scenes_rl_example_has_image_question_and_answer() -> None:
    rows = registry.load("rl.datasets", "drawn-scenes")(size=6, levels=3, questions="color", system="Be brief.")

    row = rows[4]

    image, text = row["messages"][1]["content"]
    assert row["messages"][0] == {"role": "system", "content": "Be brief."}
    assert image == image_part(rows.scenes[4].image())
    assert text == {"type": "text", "text": rows.scenes[4].question}
    assert (row["prompt_id"], row["answer"], row["level"], row["topic"]) == (4, rows.scenes[4].answer, 3, "color")
    assert rows.scenes[4].pixels == read_image(image["image_url"]["url"]).width == 112


def test_drawn_scenes_sft_example_ends_with_the_answer_in_brackets() -> None:
    rows = DrawnScenes(form="sft", size=6, seed=1, system="Be brief.")

    assert [message["role"] for message in rows[2]["messages"]] == ["user", "assistant"]
    assert rows[2]["messages"][1]["content"] == f"[{rows.scenes[2].answer}]"


def test_drawn_scenes_levels_and_questions_have_equal_counts() -> None:
    rows = DrawnScenes(size=60, levels=[1, 2], questions=["count", "shape"])

    assert {*Counter((row["level"], row["topic"]) for row in rows).values()} == {15}


def test_validate_of_drawn_scenes_scores_the_bracketed_answer() -> None:
    def bracket_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **_):
        return float(prompt.startswith("How many ") and completions == f"[{answer}]")

    assert validate(DrawnScenes(size=5), bracket_reward_fn).ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "validation"}, "split"),
        ({"form": "pairs"}, "form"),
        ({"path": "somewhere"}, "path"),
        ({"level": 2}, "found level"),
        ({"levels": [4]}, "levels"),
        ({"levels": []}, "levels"),
        ({"questions": ["where"]}, "questions"),
        ({"size": 0}, "size"),
    ],
)
def test_drawn_scenes_invalid_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrawnScenes(**options)  # type: ignore[arg-type]
