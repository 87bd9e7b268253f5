"""Chat template of a run: the template of the model, a file, or a plain template for base models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rl_apps.run.app import Run
from rl_apps.settings.compose import CONF
from rl_apps.settings.model import ModelConfig
from rl_contracts.chat.rendering import adds_bos, tokenizer_of
from rl_contracts.config import require
from rl_contracts.errors import ConfigError, ModelError

PLAIN = "plain"
"""Value of `model.chat_template` for the built-in template: `User: ...` and `Assistant: ...`. The end-of-text token
closes each completion, and the text begins with the beginning-of-text token if the tokenizer adds one."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a processor of images. A directory has at least one of them."""


def check_chat_template(run: Run[Any]) -> None:
    """Reject a model without a chat template if `model.chat_template` is empty.

    Raises:
        ConfigError: the model has no chat template; the message names the ways to set one.
    """
    model, directory = run.config.model, Path(run.config.model.directory())
    if model.chat_template or not directory.is_dir():
        _read_template(model)
        return
    settings = directory / "tokenizer_config.json"
    own = settings.exists() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    require(
        own or any([*directory.glob("chat_template*"), *directory.glob("additional_chat_templates")]),
        f"model.path={model.path}",
        "a tokenizer with a chat template, which base models lack; give model.chat_template=FILE.jinja, or "
        f"model.chat_template={PLAIN} (User: ... Assistant: ...)",
        sorted(entry.name for entry in directory.glob("*token*")),
    )


def read_tokenizer(directory: str | Path) -> Any:
    """Load the Hugging Face tokenizer in a directory, or the processor of a vision-language model.

    `rl_contracts.chat.rendering.tokenizer_of` returns the tokenizer of either.

    Raises:
        ModelError: the tokenizer or the processor cannot be read.
    """
    from transformers import AutoProcessor, AutoTokenizer

    processes_images = any((Path(directory) / name).is_file() for name in _PROCESSOR_FILES)
    try:
        loaded: Any = (AutoProcessor if processes_images else AutoTokenizer).from_pretrained(directory)
    except Exception as error:  # the type depends on the library that reads the files
        kind, files = ("processor", _PROCESSOR_FILES) if processes_images else ("tokenizer", _TOKENIZER_FILES)
        raise ModelError(
            f"the {kind} in {directory} ({', '.join(files)}) cannot be read: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}. Copy or download it again."
        ) from error
    return loaded if hasattr(loaded, "image_processor") else tokenizer_of(getattr(loaded, "tokenizer", loaded))


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer or processor of a model, with the configured chat template.

    Raises:
        ModelError: the tokenizer or the processor cannot be read.
        ConfigError: the template cannot be read.
    """
    loaded = read_tokenizer(model.directory())
    if model.chat_template:
        tokenizer = tokenizer_of(loaded)
        bos = "{{- bos_token -}}" if model.chat_template == PLAIN and adds_bos(tokenizer) else ""
        loaded.chat_template = tokenizer.chat_template = bos + _read_template(model)
    return loaded


def save_tokenizer(model: ModelConfig, directory: str | Path) -> None:
    """Save a model's tokenizer with the configured template, and the end tokens of its `generation_config.json`.

    Raises:
        ModelError, ConfigError: see `load_tokenizer`.
    """
    load_tokenizer(model).save_pretrained(directory)
    generation = Path(model.directory()) / "generation_config.json"
    if generation.is_file():
        shutil.copy2(generation, directory)


def _read_template(model: ModelConfig) -> str:
    """Return the text of the configured template."""
    plain = model.chat_template in ("", PLAIN)
    file = CONF / "plain.jinja" if plain else Path(model.chat_template).expanduser()
    require(file.is_file(), "model.chat_template", f"{PLAIN}, or a file with a Jinja template", str(file))
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ConfigError(
            f"model.chat_template={file}: expected text in UTF-8, found {error}. Save the file as UTF-8."
        ) from error
