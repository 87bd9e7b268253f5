"""The initial model of a run: a directory, a hub id, or a small model that the command builds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from rl_apps.settings.data import GENERATED, GENERATED_PAIRS, DataConfig, has_images, load_rows
from rl_contracts.config import Settings, choice, require
from rl_contracts.data import DTYPES
from rl_contracts.errors import ConfigError, ModelError
from rl_contracts.models.directory import check_model_directory
from rl_contracts.runtime.run_files import steps_in

if TYPE_CHECKING:
    from rl_apps.embedded.prepare import ModelShape
    from rl_apps.embedded.vision import VisionShape

EMBEDDED = "embedded"
"""Path of a model that the command builds, and the recipe for it."""

MADE = {EMBEDDED: 0, "embedded-moe": 4}
"""Paths of all models that the command builds, with the number of experts per layer."""

PRETRAINED = "pretrained"
"""Recipe of all other models."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_UNREAD_FILES = ("*/*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Glob patterns of hub files that are not downloaded: subdirectories, and weights in formats other than safetensors."""


@dataclass
class ModelConfig(Settings):
    """The initial policy."""

    setting: ClassVar[str] = "model"
    path: str = EMBEDDED
    """Hugging Face directory, hub id, `embedded` or `embedded-moe`. `embedded` is a tiny model that the command builds
    and caches, a vision-language model if the data has images; `embedded-moe` has four experts per layer, two of which
    process each token."""
    dtype: str = choice("auto", ("auto", *DTYPES))
    """Dtype in which trainer and servers compute: `bfloat16`, `float32`, or `auto` (bfloat16 on GPUs that have it;
    float32 on a CPU and with `deterministic=true`). `actor.dtype` and `rollout.server.dtype` override it. A resumed run
    keeps its dtypes."""
    chat_template: str = ""
    """File with a Jinja chat template, or `plain` for models without one (`User: ...`, `Assistant: ...`, after the
    tokenizer's beginning-of-text token). Empty: the template of the model."""
    directories: dict[str, str] = field(default_factory=dict)
    """Directories of the run's models by their `path`. The command fills this in."""

    def directory(self, path: str = "") -> str:
        """Return the directory of the model with this `path` (empty: the initial policy), or `path` itself before the
        command has filled in `directories`."""
        return self.directories.get(path or self.path, path or self.path)


@contextmanager
def as_planned(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Provide a directory with the `config.json` of the policy, even before the command builds the model."""
    if model.path not in MADE:
        yield model.directory()
        return
    with TemporaryDirectory(prefix="rl-plan-") as scratch:
        directory = str(_shape_of(model, data).sketch(Path(scratch) / model.path))
        try:
            yield directory
        except ConfigError as error:
            raise ConfigError(str(error).replace(directory, model.path)) from error


def _shape_of(model: ModelConfig, data: DataConfig) -> ModelShape | VisionShape:
    """Return the sizes of a model that the command builds."""
    from rl_apps.embedded.prepare import ModelShape, ScratchRecipe
    from rl_apps.embedded.vision import VisionShape

    if has_images(data):
        expected = f"{EMBEDDED}, because data.name={data.name} has images and vision-language models have no experts"
        require(model.path == EMBEDDED, "model.path", expected, model.path)
        return VisionShape()
    shape = ModelShape() if data.name in (GENERATED, GENERATED_PAIRS) else ScratchRecipe().shape
    return shape.with_experts(MADE[model.path])


def find_models(paths: Mapping[str, str], fetch: bool = True) -> dict[str, str]:
    """Return the directories of models; download the ones that are neither local nor in the cache of the hub.

    Args:
        paths: value of each setting that names a model, by name of the setting. Models that the command builds
            (`embedded`) are left out.
        fetch: whether to download. If false, hub ids that are not in the cache are left out.

    Raises:
        ModelError: there is no such directory or hub id, or `config.json`, weights or the tokenizer are missing.
    """
    directories = {}
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
        directories[path] = str(directory.absolute())
        check_model_directory(directories[path], setting, tokenizer=True)
    return directories


def check_generates(path: str, directory: str | Path) -> None:
    """Reject a model that cannot continue a prompt: a scalar head, masked language modeling, or an encoder-decoder.

    Raises:
        ModelError: with the kind of the model.
    """
    config = json.loads((Path(directory) / "config.json").read_text())
    kinds = config.get("architectures") or []
    if config.get("is_encoder_decoder") or any("MaskedLM" in kind for kind in kinds):
        raise ModelError(
            f"model {path}: expected a model that continues a prompt token by token, found "
            f"{', '.join(kinds) or config.get('model_type')}, a masked or encoder-decoder model. Use a causal "
            "language model (...ForCausalLM)."
        )
    if kinds and all(kind.endswith("Model") and "LMHead" not in kind for kind in kinds):
        raise ModelError(
            f"model {path}: expected a model that generates text, found {', '.join(kinds)}, which has no language "
            "modeling head. Use a complete checkpoint (...ForCausalLM)."
        )
    if any("Classification" in kind or "Reward" in kind for kind in kinds):
        raise ModelError(
            f"model {path}: expected a model that generates text, found {', '.join(kinds)}: a reward model scores "
            "completions. Use the checkpoint of a policy."
        )


def check_architecture(path: str, directory: str) -> None:
    """Reject a model of a type that transformers does not have.

    Raises:
        ModelError: with the type and a suggestion.
    """
    config = json.loads((Path(directory) / "config.json").read_text())
    if not (kind := config.get("model_type")):
        return
    from transformers import CONFIG_MAPPING, __version__

    if kind not in CONFIG_MAPPING:
        nearest = get_close_matches(str(kind), CONFIG_MAPPING.keys(), 1)
        custom_code = " The model's own code (auto_map) is never run." if "auto_map" in config else ""
        suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ModelError(
            f"model {path}: expected a model_type (config.json) that transformers {__version__} has, found "
            f"{kind!r}{suggestion}.{custom_code} Upgrade transformers if a newer version has this type."
        )


def _snapshot(hub_id: str, setting: str, fetch: bool) -> Path | None:
    """Return the directory of a hub model in the local cache, or None if it is not there and `fetch` is false."""
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(hub_id, ignore_patterns=list(_UNREAD_FILES), local_files_only=not fetch))
    except Exception as error:  # the type depends on the HTTP library of the hub client
        if not fetch:
            return None
        raise ModelError(
            f"{setting}={hub_id}: expected a directory, or a model of the hub or its cache ({constants.HF_HUB_CACHE}); "
            f"the hub client reports: {str(error).splitlines()[0].rstrip('. ')}. Give a directory, or run "
            f"`hf download {hub_id}` on a machine with network access."
        ) from error


def newest_checkpoint(app: str) -> Path:
    """Return the newest model checkpoint of the runs of an app in their default directories, `runs/APP/TRIAL`.

    Raises:
        ModelError: there is none.
    """
    root = Path("runs") / app
    checkpoints = [
        directory / f"step_{step}" for directory in root.glob("*/checkpoints") for step in steps_in(directory)
    ]
    if not checkpoints:
        raise ModelError(
            f"model.path={EMBEDDED}: expected a checkpoint of {app} in {root}/*/checkpoints, found none. Run {app} "
            "first, or set model.path (and recipe=embedded for a checkpoint of the embedded model)."
        )
    return max(checkpoints, key=lambda path: path.stat().st_mtime).absolute()


def make_model(
    model: ModelConfig, data: DataConfig, seed: int, form: str, lessons: str, warm_up: bool, say: Callable[[str], None]
) -> Path:
    """Return the directory of the model; build and cache it first if its path is in `MADE`.

    The generated problems have their own model, optionally warmed up. For other data, it is a tiny random model whose
    tokenizer is trained on the training texts.

    Args:
        form: form of the training data, see `load_rows`.
        lessons: what the warm-up teaches, see `rl_apps.embedded.curriculum`.
        warm_up: whether to warm up the model.
        say: called with messages on the progress.
    """
    if model.path not in MADE:
        return Path(model.directory())
    from rl_apps.embedded.prepare import (
        EmbeddedRecipe,
        ScratchRecipe,
        prepare_embedded,
        prepare_from_scratch,
    )
    from rl_apps.embedded.vision import VisionShape, prepare_vision
    from rl_apps.embedded.warmup import STEPS_WITH_EXPERTS, WarmUp

    shape = _shape_of(model, data)
    if isinstance(shape, VisionShape):
        rows = load_rows(data, "train", "rl", seed)
        return prepare_vision((_text_of(row["messages"][-1]) for row in rows), seed, shape, say=say)
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


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, without its images."""
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
