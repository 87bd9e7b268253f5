"""The model that a run starts from: a directory, a hub id, or one made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_apps.data import GENERATED, GENERATED_PAIRS, DataConfig, load_rows

EMBEDDED = "embedded"


@dataclass
class ModelConfig:
    """The policy before the first step."""

    path: str = EMBEDDED
    """Hugging Face directory or hub id, or `embedded`: a tiny model made on the spot and cached."""


def make_model(
    model: ModelConfig, data: DataConfig, seed: int, form: str, warm_up: bool, say: Callable[[str], None]
) -> Path:
    """The directory (or hub id) of the model, made on the spot and cached if it is `embedded`.

    The generated problems come with a model of their own, warmed up or not; for other data it is a tiny random one
    whose tokenizer is trained on the training texts.

    Args:
        form: in which the data is read for its texts, see `load_rows`.
        say: told what is going on.
    """
    if model.path != EMBEDDED:
        return Path(model.path)
    from rl_apps.embedded.prepare import EmbeddedRecipe, prepare_embedded, prepare_from_scratch

    if data.name in (GENERATED, GENERATED_PAIRS):
        recipe = EmbeddedRecipe() if warm_up else EmbeddedRecipe(warm_up=None)
        say("making the embedded model" + (" and warming it up" if warm_up else ""))

        def progress(step: int, steps: int, loss: float) -> None:
            if step % 100 == 0 or step == steps:
                say(f"warm-up {step}/{steps}, loss {loss:.3f}")

        return prepare_embedded(seed, recipe, progress)
    say("making a small model from scratch, with a tokenizer trained on the data")
    rows = load_rows(data, "train", "pairs" if form == "pairs" else "rl", seed)
    if form == "pairs":
        return prepare_from_scratch((m["content"] for row in rows for m in row["chosen"]), seed)
    return prepare_from_scratch((row["messages"][-1]["content"] for row in rows), seed)
