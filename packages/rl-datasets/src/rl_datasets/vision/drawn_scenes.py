"""Generated images of colored shapes with a question: how many there are, or which color or shape the largest has.

The images are small and the shapes are plain, so a tiny vision model can learn the questions on a CPU.

    (an image of two red circles and a blue square)
    How many red circles are there?

    2

A scene is a grid of cells of `CELL` pixels, each empty or with one shape. Level 1 counts all shapes, higher levels
count those of one color and kind.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.chat.image_messages import image_part
from rl_contracts.config import Settings, bounded, require, require_choice
from rl_contracts.images import Image, read_image
from rl_datasets.rows import Rows, read_options, require_form

if TYPE_CHECKING:
    import PIL.ImageDraw

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (30, 70, 220),
    "yellow": (240, 200, 20),
    "purple": (150, 40, 170),
    "black": (20, 20, 20),
}
"""Colors of shapes, as RGB values."""
SHAPES = ("circle", "square", "triangle")
QUESTIONS = ("count", "color", "shape")
"""Kinds of questions: the number of some shapes, or the color or shape of the largest one."""
CELL = 28
"""Width and height of a cell in pixels: two patches of 14 pixels, which vision models often merge into one token."""
CELLS_PER_SIDE = {1: 2, 2: 3, 3: 4}
"""Width and height of a scene in cells, by level."""
MAX_COUNT = 9
"""Maximum answer of a count; a scene never has more shapes that count."""
_SIZES = (10, 12, 14, 16)
"""Widths of all shapes but the largest, in pixels."""
_LARGEST = 24
_MARGIN = 2
"""Pixels between a shape and the border of its cell."""

_DEFAULT_SIZES = {"train": 1024, "test": 512}
_HELD_OUT_DIVISOR = 5
"""One of this many scenes is held out."""
_MAX_FAILED_DRAWS = 20_000
"""Consecutive draws without a new scene after which generation stops."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape in a scene."""

    kind: str
    """One of `SHAPES`."""
    color: str
    """One of `COLORS`."""
    size: int
    """Width and height in pixels."""
    left: int
    """Distance from the left border in pixels."""
    top: int
    """Distance from the upper border in pixels."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes on a white square, with a question and its answer."""

    level: int
    """Key of `CELLS_PER_SIDE`."""
    topic: str
    """Kind of the question, one of `QUESTIONS`."""
    shapes: tuple[Shape, ...]
    """Shapes, which do not overlap. For the topics `color` and `shape`, exactly one is the largest."""
    target: tuple[str, str] = ("", "")
    """Color and kind of the shapes that a count includes; "" means any."""

    @property
    def pixels(self) -> int:
        """Width and height of the image in pixels."""
        return CELLS_PER_SIDE[self.level] * CELL

    @property
    def question(self) -> str:
        """Text of the question."""
        if self.topic == "count":
            color, kind = self.target
            return " ".join(f"How many {color} {kind or 'shape'}s are there?".split())
        return "What color is the largest shape?" if self.topic == "color" else "What is the largest shape?"

    @property
    def answer(self) -> str:
        """Number in digits, color, or kind of shape."""
        if self.topic == "count":
            return str(sum(_counts(shape, self.target) for shape in self.shapes))
        largest = max(self.shapes, key=lambda shape: shape.size)
        return largest.color if self.topic == "color" else largest.kind

    def image(self) -> Image:
        """Draw the scene."""
        import PIL.Image
        import PIL.ImageDraw

        picture = PIL.Image.new("RGB", (self.pixels, self.pixels), "white")
        draw = PIL.ImageDraw.Draw(picture)
        for shape in self.shapes:
            _draw(draw, shape)
        return read_image(picture)


@dataclass
class DrawnScenesOptions(Settings):
    """Options of drawn scenes in addition to split, form and seed."""

    setting: ClassVar[str] = "drawn-scenes data"
    levels: Sequence[int] = bounded(
        (1,), "one or more of 1 to 3", lambda levels: levels and {*levels} <= CELLS_PER_SIDE.keys()
    )
    """Levels to generate in equal parts: images of 56, 84 and 112 pixels with up to 4, 9 and 16 shapes. Level 1 counts
    all shapes, levels 2 and 3 those of one color and kind. A single level may be an integer."""
    questions: Sequence[str] = bounded(
        ("count",), f"one or more of {', '.join(QUESTIONS)}", lambda kinds: kinds and {*kinds} <= {*QUESTIONS}
    )
    """Kinds of questions to generate in equal parts; a single kind may be a text. Answers of `color` and `shape` are
    words, which a reward for numbers rejects."""
    system: str = ""
    """System message of each example in RL form, for example the required form of the answer."""
    size: int | None = bounded(None, "at least 1, or none", lambda size: size is None or size >= 1)
    """Number of distinct scenes; by default 1024 for training and 512 held out."""

    def __post_init__(self) -> None:
        if isinstance(self.levels, int):
            self.levels = (self.levels,)
        if isinstance(self.questions, str):
            self.questions = (self.questions,)
        super().__post_init__()


class DrawnScenes(Rows[Scene]):
    """Distinct generated scenes of one split. The image of an example is drawn on access.

    RL form: `{"prompt_id": index, "messages": [the image and the question], "answer": number or word, "level": level,
    "topic": kind of the question}`. SFT form: `{"prompt_id": index, "messages": [the image and the question, the answer
    in square brackets]}`, the form that the reward of `clevr_count_70k` reads.

    A hash of the seed and the shapes of a scene determines its split, so no image is in both splits.
    """

    has_images = True

    def __init__(
        self,
        path: str | None = None,
        split: str = "train",
        form: str = "rl",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Generate all scenes.

        Args:
            path: must be empty, because nothing is read; every data set accepts it.
            split: `train` or `test` (held out).
            form: `rl` or `sft`.
            seed: seed of the scenes and of the split into train and test.
            **options: fields of `DrawnScenesOptions`.

        Raises:
            ConfigError: `path` is not empty, the split, form or an option is unknown, or there are fewer distinct
                scenes than requested.
        """
        expected = "no path, because the scenes are generated (data.name=vision-chat reads files)"
        require(not path, "data.path with data.name=drawn-scenes", expected, path)
        require_choice("split", split, tuple(_DEFAULT_SIZES))
        require_form("drawn-scenes", form, ("rl", "sft"))
        self.form = form
        scene_options = read_options(DrawnScenesOptions, "drawn-scenes", options)
        self._system = scene_options.system
        size = _DEFAULT_SIZES[split] if scene_options.size is None else scene_options.size
        kinds = tuple((level, topic) for topic in scene_options.questions for level in scene_options.levels)
        self.scenes: list[Scene] = list(_generate(split, seed, kinds, size))
        """Scenes of the examples, in the same order."""
        super().__init__(self.scenes)

    def _row(self, index: int, scene: Scene) -> dict[str, Any]:
        parts = [image_part(scene.image()), {"type": "text", "text": scene.question}]
        question = {"role": "user", "content": parts}
        row = {"prompt_id": index, "messages": [question], "answer": scene.answer}
        if self.form == "sft":
            answer = {"role": "assistant", "content": self.gold_completion(row)}
            return {"prompt_id": index, "messages": [question, answer]}
        if self._system:
            row["messages"] = [{"role": "system", "content": self._system}, question]
        return {**row, "level": scene.level, "topic": scene.topic}

    def gold_completion(self, row: dict[str, Any]) -> str:
        """Return the gold answer of an example in square brackets."""
        return f"[{row['answer']}]"


def split_of(scene: Scene, seed: int) -> str:
    """Return the split of a scene for a seed: `train` or `test`."""
    core = seed, scene.level, [(s.kind, s.color, s.size, s.left, s.top) for s in scene.shapes]
    digest = hashlib.blake2b(repr(core).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _HELD_OUT_DIVISOR == 0 else "train"


def draw_scene(rng: random.Random, level: int, topic: str) -> Scene:
    """Return a random scene, of either split. All answers are equally likely."""
    cells = [(column, row) for row in range(CELLS_PER_SIDE[level]) for column in range(CELLS_PER_SIDE[level])]
    target = (rng.choice([*COLORS]), rng.choice(SHAPES)) if level > 1 else ("", "")
    if topic == "count":
        # at least one shape, so that no image is empty
        count = rng.randint(0 if target[1] else 1, min(len(cells), MAX_COUNT))
        others = rng.randint(0 if count else 1, len(cells) - count) if target[1] else 0
        looks = [target if target[1] else _draw_look(rng) for _ in range(count)]
        looks += [_draw_look(rng, excluded=target) for _ in range(others)]
    else:
        looks = [_draw_look(rng) for _ in range(rng.randint(2, len(cells)))]
    sizes = [rng.choice(_SIZES) for _ in looks]
    if topic != "count":
        sizes[0] = _LARGEST
    places = rng.sample(cells, len(looks))
    shapes = [
        _place(rng, color, kind, size, cell) for (color, kind), size, cell in zip(looks, sizes, places, strict=True)
    ]
    shapes.sort(key=lambda shape: (shape.top, shape.left))
    return Scene(level, topic, tuple(shapes), target if topic == "count" else ("", ""))


def _draw_look(rng: random.Random, excluded: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """Return a random color and kind that a count of `excluded` does not include."""
    return rng.choice([look for look in product(COLORS, SHAPES) if look != excluded])


def _place(rng: random.Random, color: str, kind: str, size: int, cell: tuple[int, int]) -> Shape:
    """Return a shape at a random position within a cell [column, row]."""
    left, top = (CELL * index + rng.randint(_MARGIN, CELL - _MARGIN - size) for index in cell)
    return Shape(kind, color, size, left, top)


def _counts(shape: Shape, target: tuple[str, str]) -> bool:
    color, kind = target
    return color in ("", shape.color) and kind in ("", shape.kind)


def _draw(draw: PIL.ImageDraw.ImageDraw, shape: Shape) -> None:
    left, top, right, bottom = shape.left, shape.top, shape.left + shape.size - 1, shape.top + shape.size - 1
    color = COLORS[shape.color]
    if shape.kind == "circle":
        draw.ellipse((left, top, right, bottom), fill=color)
    elif shape.kind == "square":
        draw.rectangle((left, top, right, bottom), fill=color)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=color)


@lru_cache(maxsize=4)  # a command reads its examples several times: to count, to measure, to train
def _generate(split: str, seed: int, kinds: tuple[tuple[int, str], ...], size: int) -> tuple[Scene, ...]:
    """Return `size` distinct scenes of a split, with pairs of a level and a topic in turn.

    Raises:
        ConfigError: there are fewer than `size` distinct scenes.
    """
    rng = random.Random(f"{seed} {split}")
    scenes: dict[Scene, None] = {}  # an ordered set
    failed_draws = 0
    while len(scenes) < size and failed_draws < _MAX_FAILED_DRAWS:
        scene = draw_scene(rng, *kinds[len(scenes) % len(kinds)])
        is_new = scene not in scenes and split_of(scene, seed) == split
        failed_draws = 0 if is_new else failed_draws + 1
        if is_new:
            scenes[scene] = None
    require(
        len(scenes) == size,
        "drawn-scenes data: size",
        f"at most about {len(scenes)} for {list(kinds)} of the {split} split",
        size,
    )
    return tuple(scenes)
