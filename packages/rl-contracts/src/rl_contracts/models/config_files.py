"""Configuration and tokenizer files of Hugging Face model directories, as engines read and write them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import ModelError
from rl_contracts.models.directory import check_model_directory
from rl_contracts.runtime.logging import get_logger

log = get_logger("engines")

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
MAX_FILE_BYTES = 5 * 10**9
"""Maximum size of a weight file in a saved directory. Published models have files of this size, which loaders read in
parallel."""
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
PROCESSOR_PATTERNS = ("*processor_config.json",)
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    *PROCESSOR_PATTERNS,
)


def read_config(path: str, head: str = "lm") -> Any:
    """Return the model's configuration, adapted to a head of `rl_contracts.data.HEADS`.

    `tie_word_embeddings` is set to False if the weight files hold an `lm_head` that differs from the embedding.

    Raises:
        ModelError: the configuration is missing, its architecture is unknown to this version of transformers, or the
            model has another head.
    """
    from transformers import AutoConfig

    check_model_directory(path, weights=WEIGHT_PATTERNS)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: its configuration cannot be read: {' '.join(str(error).split())}") from error
    _fit_config(path, config, head)
    if getattr(config, "tie_word_embeddings", False) and _has_another_head(Path(path)):
        for each in (config, config.get_text_config()):
            each.tie_word_embeddings = False
    return config


def _has_another_head(directory: Path) -> bool:
    """Return whether the weight files hold an `lm_head` unlike the embedding, regardless of `config.json`."""
    import torch
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    with ExitStack() as opened:
        for path in sorted(directory.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, "pt"))
            tensors |= {name: file.get_slice(name) for name in file.keys() if name.endswith((HEAD, *EMBEDDINGS))}  # noqa: SIM118
        for path in () if tensors else sorted(directory.glob("pytorch_model*.bin")):
            tensors |= torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
        heads, tables = ([name for name in tensors if name.endswith(ends)] for ends in (HEAD, EMBEDDINGS))
        if len(heads) != 1 or len(tables) != 1:
            return False
        head, table = tensors[heads[0]], tensors[tables[0]]
        rows, *_ = shape = [*_shape(head)]
        if shape != [*_shape(table)]:
            return True
        return any(not (head[i : i + 4096] == table[i : i + 4096]).all() for i in range(0, rows, 4096))


def _shape(table: Any) -> Sequence[int]:
    return table.get_shape() if hasattr(table, "get_shape") else table.shape


def _fit_config(path: str, config: Any, head: str) -> None:
    """Check that a model has the requested head, or one that can be replaced, and set the number of labels.

    Raises:
        ModelError: a language model was requested and the directory holds a classifier; or a scalar head was requested
            and the directory holds a classifier with several labels.
    """
    classifier = str((config.architectures or [""])[0]).endswith("ForSequenceClassification")
    if head == "lm" and classifier:
        raise ModelError(
            f"model {path}: expected a causal language model, found a {config.architectures[0]}, which has a scalar "
            "head instead of an `lm_head`. Set head=value or head=score, or use a language model's directory."
        )
    if head != "lm":
        if classifier and config.num_labels != 1:
            raise ModelError(
                f"model {path}: expected a classifier with 1 label for head={head}, found {config.num_labels} labels."
            )
        config.num_labels = 1


def pad_token_id(config: Any, generation: Any, tokenizer_path: str | None) -> int | None:
    """Return the pad token id to save with a scalar head, or None if there is none.

    transformers' classifiers use this id to find the last token of a sequence. The tokenizer that is saved with the
    model determines it. Without a tokenizer, or if it has no suitable token, the model's own settings determine the
    id. The token that ends a conversation turn is not suitable: the last token of a sequence would be mistaken for
    padding. Another special token is used instead.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    if tokenizer_path is not None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"tokenizer {tokenizer_path} cannot be read: {error}") from error
        pad_id = _select_pad_id(tokenizer)
        if pad_id is not None:
            return pad_id
    for settings in (config.get_text_config(), generation):
        if getattr(settings, "pad_token_id", None) is not None:
            return int(settings.pad_token_id)
    log.warning(
        "saving a scalar head: the model has no pad token id, so transformers will score only one sequence at a time. "
        "Save it with a tokenizer that has a pad token (tokenizer_path)."
    )
    return None


def _select_pad_id(tokenizer: Any) -> int | None:
    end_id = tokenizer.eos_token_id
    if tokenizer.chat_template:
        renderer = ChatRenderer(tokenizer)
        end_id = next(reversed(renderer.encode(renderer.end_of_turn)), end_id)
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    candidates = sorted(special, key=lambda index: ("pad" not in special[index], index))
    return next((index for index in (tokenizer.pad_token_id, *candidates) if index not in (None, end_id)), None)


def copy_tokenizer(source: Path, target: Path, pad_id: int | None = None) -> None:
    """Copy the files of a tokenizer from one directory to another.

    Args:
        pad_id: pad token id to set in the copy if the original has a different one; None keeps the original.

    Raises:
        ModelError: the source is not a directory.
    """
    if not source.is_dir():
        raise ModelError(f"tokenizer {source}: expected a directory with tokenizer files, found none.")
    copy_files(source, target, TOKENIZER_PATTERNS)
    if pad_id is None:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token_id not in (None, pad_id):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        tokenizer.save_pretrained(target)


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files and folders that match a pattern from one directory to another."""
    for pattern in patterns:
        for entry in source.glob(pattern):
            if entry.is_file():
                shutil.copy2(entry, target / entry.name)
            else:
                shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars, and its warnings about conditions that this module checks itself."""
    from transformers.utils import logging

    hf_logging: Any = logging
    had_progress_bar, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if had_progress_bar:
            hf_logging.enable_progress_bar()
