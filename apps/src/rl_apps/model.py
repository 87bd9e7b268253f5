"""The model that a run starts from: a directory, a hub id, or one made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_apps.data import GENERATED, GENERATED_PAIRS, DataConfig, load_rows
from rl_contracts.errors import ModelError

EMBEDDED = "embedded"


@dataclass
class ModelConfig:
    """The policy before the first step."""

    path: str = EMBEDDED
    """Hugging Face directory or hub id, or `embedded`: a tiny model made on the spot and cached."""


def check_model(path: str, setting: str = "model.path") -> None:
    """Refuse a local directory that is no model before any process starts; hub ids are looked up when they are loaded.

    Args:
        setting: what the path is the value of.

    Raises:
        ModelError: the directory has no `config.json`, no weights or no tokenizer.
    """
    directory = Path(path)
    if path == EMBEDDED or not (directory.exists() or path.startswith(("/", ".", "~"))):
        return
    if not directory.is_dir():
        raise ModelError(
            f"{setting}={path}: expected a model directory, a hub id or `embedded`; there is no such directory."
        )
    present = sorted(p.name for p in directory.iterdir())
    listing = ", ".join(present[:8]) or "nothing"
    if "config.json" not in present:
        raise ModelError(
            f"{setting}={path}: expected a Hugging Face model directory; it has no config.json but {listing}."
        )
    if not any(name.endswith(".safetensors") for name in present):
        raise ModelError(
            f"{setting}={path}: expected weights (model.safetensors), found {listing}. "
            "Download the model whole, or name a checkpoint of a run (checkpoints/step_<n>)."
        )
    if not any(name.startswith("tokenizer") for name in present):
        raise ModelError(
            f"{setting}={path}: expected a tokenizer (tokenizer.json) beside the weights, found {listing}."
        )


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
    from rl_apps.embedded.prepare import prepare_embedded, prepare_from_scratch
    from rl_apps.embedded.recipe import EmbeddedRecipe

    if data.name in (GENERATED, GENERATED_PAIRS):
        recipe = EmbeddedRecipe() if warm_up else EmbeddedRecipe(warm_up=None)
        say("making the embedded model" + (" and warming it up" if warm_up else ""))
        return prepare_embedded(seed, recipe, _WarmUpProgress(say))
    say("making a small model from scratch, with a tokenizer trained on the data")
    rows = load_rows(data, "train", "pairs" if form == "pairs" else "rl", seed)
    if form == "pairs":
        return prepare_from_scratch((m["content"] for row in rows for m in row["chosen"]), seed)
    return prepare_from_scratch((row["messages"][-1]["content"] for row in rows), seed)


class _WarmUpProgress:
    """Tells of the warm-up now and then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def __call__(self, step: int, steps: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            self._say(f"warm-up {step}/{steps}, loss {loss:.3f}")
