"""The model that a run starts from: a directory, a hub id, or one made on the spot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rl_apps.settings.data import GENERATED, GENERATED_PAIRS, DataConfig, load_rows
from rl_contracts.config import require
from rl_contracts.errors import ConfigError, ModelError
from rl_contracts.models.directory import check_model_directory

if TYPE_CHECKING:
    from rl_apps.embedded.prepare import ModelShape

EMBEDDED = "embedded"
"""The path of a model that is made on the spot, and the recipe that goes with it."""

MADE = {EMBEDDED: 0, "embedded-moe": 4}
"""Paths of all models that are made on the spot, and the experts in each of their layers."""

PRETRAINED = "pretrained"
"""The recipe of any other."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_NOT_OF_THE_MODEL = ("*/*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Files of a hub's repository that nobody here reads."""


@dataclass
class ModelConfig:
    """The policy before the first step."""

    path: str = EMBEDDED
    """Hugging Face directory or hub id, or `embedded`: a tiny model made on the spot and cached; `embedded-moe`: one
    with four experts in each layer, of which two take each token."""
    chat_template: str = ""
    """File with a Jinja chat template, or `plain` (`User: ...`, `Assistant: ...`, after the tokenizer's
    beginning-of-text token), for models that have none; empty: the model's own."""
    directories: dict[str, str] = field(default_factory=dict)
    """Directories of the run's models by what their `path` says. The command fills it in."""

    def directory(self, path: str = "") -> str:
        """Where the model lies that a `path` of the config names (empty: the policy before the first step); `path`
        itself before the command has looked."""
        return self.directories.get(path or self.path, path or self.path)


@contextmanager
def as_planned(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """A block in which the directory of the policy has a `config.json`, also while it has yet to be made."""
    if model.path not in MADE:
        yield model.directory()
        return
    with TemporaryDirectory(prefix="rl-plan-") as scratch:
        directory = str(_shape_of(model, data).sketch(Path(scratch) / model.path))
        try:
            yield directory
        except ConfigError as error:
            raise ConfigError(str(error).replace(directory, model.path)) from error


def _shape_of(model: ModelConfig, data: DataConfig) -> ModelShape:
    """Sizes of a model that is made on the spot."""
    from rl_apps.embedded.prepare import ModelShape, ScratchRecipe

    shape = ModelShape() if data.name in (GENERATED, GENERATED_PAIRS) else ScratchRecipe().shape
    return shape.with_experts(MADE[model.path])


def find_models(paths: Mapping[str, str], fetch: bool = True) -> dict[str, str]:
    """The directories of models, downloaded from the hub where they are neither here nor in its cache.

    Args:
        paths: setting to what it says; one that is made on the spot (`embedded`) is left out.
        fetch: whether to download; without, a hub id that is not in the cache is left out.

    Raises:
        ModelError: there is neither a directory nor a model of that id, or it lacks `config.json`, weights or a
            tokenizer.
    """
    found = {}
    for setting, path in paths.items():
        if path in MADE:
            continue
        require(bool(path), setting, "a Hugging Face directory or hub id, or embedded", path)
        directory = Path(path).expanduser()
        if not directory.exists() and _HUB_ID.fullmatch(path):
            snapshot = _snapshot(path, setting, fetch)
            if snapshot is None:
                continue
            directory = snapshot
        found[path] = str(directory.absolute())
        check_model_directory(found[path], setting, tokenizer=True)
    return found


def check_generates(path: str, directory: str | Path) -> None:
    """Refuse a model that has a scalar head, or fills gaps, or reads all of a text before it writes, where one is to
    write text on from a prompt.

    Raises:
        ModelError: names its kind.
    """
    settings = json.loads((Path(directory) / "config.json").read_text())
    kinds = settings.get("architectures") or []
    if settings.get("is_encoder_decoder") or any("MaskedLM" in kind for kind in kinds):
        raise ModelError(
            f"model {path}: expected a model that goes on from a prompt, token by token, found "
            f"{', '.join(kinds) or settings.get('model_type')}: it reads in both directions. Give a causal language "
            "model (...ForCausalLM)."
        )
    if kinds and all(kind.endswith("Model") and "LMHead" not in kind for kind in kinds):
        raise ModelError(
            f"model {path}: expected a model that generates text, found {', '.join(kinds)}: it has no head that says "
            "which token is next. Give one that was saved whole (...ForCausalLM)."
        )
    if any("Classification" in kind or "Reward" in kind for kind in kinds):
        raise ModelError(
            f"model {path}: expected a model that generates text, found {', '.join(kinds)}: a reward model scores "
            "answers. Give the checkpoint of a policy."
        )


def check_architecture(path: str, directory: str) -> None:
    """Refuse a model of a kind that transformers does not have.

    Raises:
        ModelError: names the kind, and what may help.
    """
    settings = json.loads((Path(directory) / "config.json").read_text())
    if not (kind := settings.get("model_type")):
        return
    from transformers import CONFIG_MAPPING, __version__

    if kind not in CONFIG_MAPPING:
        nearest = get_close_matches(str(kind), CONFIG_MAPPING.keys(), 1)
        own = "its own code (auto_map) is never run; " if "auto_map" in settings else ""
        meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ModelError(
            f"model {path}: expected a model_type (config.json) that transformers {__version__} has, found "
            f"{kind!r}{meant}; {own}a newer transformers may have it."
        )


def _snapshot(hub_id: str, setting: str, fetch: bool) -> Path | None:
    """The directory of a hub's model in the local cache."""
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(hub_id, ignore_patterns=list(_NOT_OF_THE_MODEL), local_files_only=not fetch))
    except Exception as error:  # whichever HTTP library the hub's client has: told in one sentence
        if not fetch:
            return None
        raise ModelError(
            f"{setting}={hub_id}: expected a directory, or the id of a model that the hub or its cache "
            f"({constants.HF_HUB_CACHE}) has. There is no such directory, and the hub's client says: "
            f"{str(error).splitlines()[0].rstrip('. ')}. Give a directory, or fetch the model where there is a network "
            f"(`hf download {hub_id}`)."
        ) from error


def make_model(
    model: ModelConfig, data: DataConfig, seed: int, form: str, lessons: str, warm_up: bool, say: Callable[[str], None]
) -> Path:
    """The directory of the model, made on the spot and cached if its path is one of `MADE`.

    The generated problems come with a model of their own, warmed up or not; for other data it is a tiny random one
    whose tokenizer is trained on the training texts.

    Args:
        form: in which the data is read for its texts, see `load_rows`.
        lessons: what the warm-up shows, see `rl_apps.embedded.curriculum`.
        warm_up: whether there is one.
        say: told what is going on.
    """
    if model.path not in MADE:
        return Path(model.directory())
    from rl_apps.embedded.prepare import (
        EmbeddedRecipe,
        ScratchRecipe,
        prepare_embedded,
        prepare_from_scratch,
    )
    from rl_apps.embedded.warmup import STEPS_WITH_EXPERTS, WarmUp

    shape = _shape_of(model, data)
    if data.name in (GENERATED, GENERATED_PAIRS):
        training = WarmUp(steps=STEPS_WITH_EXPERTS) if shape.experts else WarmUp()
        recipe = EmbeddedRecipe(lessons=lessons, shape=shape, warm_up=training if warm_up else None)

        def progress(step: int, steps: int, loss: float) -> None:
            if step % 100 == 0 or step == steps:
                say(f"warm-up {step}/{steps}, loss {loss:.3f}")

        return prepare_embedded(seed, recipe, progress, say=say)
    scratch = ScratchRecipe(shape=shape)
    rows = load_rows(data, "train", "pairs" if form == "pairs" else "rl", seed)
    if form == "pairs":
        return prepare_from_scratch((m["content"] for row in rows for m in row["chosen"]), seed, scratch, say=say)
    return prepare_from_scratch((row["messages"][-1]["content"] for row in rows), seed, scratch, say=say)
