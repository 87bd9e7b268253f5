"""What engines ask of a Hugging Face model directory beside its weights: its configuration and tokenizer files."""

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
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def read_config(path: str, head: str = "lm") -> Any:
    """The model's configuration, fit for a head of `rl_contracts.data.HEADS`. Whether head and embedding are tied is as
    its files have it.

    Raises:
        ModelError: it is missing, of an architecture that this transformers does not know, or of another head.
    """
    from transformers import AutoConfig

    check_model_directory(path, weights=WEIGHT_PATTERNS)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: its configuration cannot be read: {' '.join(str(error).split())}") from error
    _fit_config(path, config, head)
    if getattr(config, "tie_word_embeddings", False) and _has_another_head(Path(path)):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    return config


def _has_another_head(directory: Path) -> bool:
    """Whether the files of a model hold a head that differs from its embedding, whatever `config.json` says of them."""
    import torch
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with ExitStack() as opened:
        for path in sorted(directory.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, "pt"))
            found |= {name: file.get_slice(name) for name in file.keys() if name.endswith((HEAD, *EMBEDDINGS))}  # noqa: SIM118
        for path in () if found else sorted(directory.glob("pytorch_model*.bin")):
            found |= torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
        heads, tables = ([name for name in found if name.endswith(ends)] for ends in (HEAD, EMBEDDINGS))
        if len(heads) != 1 or len(tables) != 1:
            return False
        head, table = found[heads[0]], found[tables[0]]
        rows, *_ = shape = [*_shape(head)]
        if shape != [*_shape(table)]:
            return True
        return any(not (head[i : i + 4096] == table[i : i + 4096]).all() for i in range(0, rows, 4096))


def _shape(table: Any) -> Sequence[int]:
    return table.get_shape() if hasattr(table, "get_shape") else table.shape


def _fit_config(path: str, config: Any, head: str) -> None:
    """See that what a directory holds has the head, or one that may be replaced, and set the number of labels.

    Raises:
        ModelError: a language model is asked for and the directory holds a classifier; or a scalar head, and the
            directory holds a classifier of several labels.
    """
    classifier = str((config.architectures or [""])[0]).endswith("ForSequenceClassification")
    if head == "lm" and classifier:
        raise ModelError(
            f"model {path}: expected a causal language model, found a {config.architectures[0]}, which has a scalar "
            "head instead of a vocabulary. Set head=value or head=score, or give the language model's directory."
        )
    if head != "lm":
        if classifier and config.num_labels != 1:
            raise ModelError(
                f"model {path}: expected a classifier of 1 label for head={head}, found {config.num_labels} labels."
            )
        config.num_labels = 1


def pad_token_id(config: Any, generation: Any, tokenizer_path: str | None) -> int | None:
    """The id with which rows will be padded, which transformers' classifiers take to find a row's last token.

    The tokenizer that is saved with the model decides; without one the model's own settings do. A token with which
    conversations end is none: the last token of a row would be taken for padding. Another special token then is one.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    if tokenizer_path is not None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"tokenizer {tokenizer_path}: expected one with a pad token: {error}") from error
        found = _padding(tokenizer)
        if found is not None:
            return found
    for settings in (config.get_text_config(), generation):
        if getattr(settings, "pad_token_id", None) is not None:
            return int(settings.pad_token_id)
    log.warning(
        "saving a scalar head: the model has no pad token id, so transformers will score one row at a time only. "
        "Save it with a tokenizer that has a pad token (tokenizer_path)."
    )
    return None


def _padding(tokenizer: Any) -> int | None:
    end = tokenizer.eos_token_id
    if tokenizer.chat_template:
        renderer = ChatRenderer(tokenizer)
        end = next(reversed(renderer.encode(renderer.end_of_turn)), end)
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    others = sorted(special, key=lambda index: ("pad" not in special[index], index))
    return next((index for index in (tokenizer.pad_token_id, *others) if index not in (None, end)), None)


def copy_tokenizer(source: Path, target: Path, pad_id: int | None = None) -> None:
    """Copy the files of a tokenizer from one directory to another.

    Args:
        pad_id: with which the copy pads, where that is not what the original does.

    Raises:
        ModelError: the source is no directory.
    """
    if not source.is_dir():
        raise ModelError(f"tokenizer {source}: expected a directory with tokenizer files, found none.")
    for pattern in TOKENIZER_PATTERNS:
        for entry in source.glob(pattern):
            if entry.is_file():
                shutil.copy2(entry, target / entry.name)
            else:
                shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)
    if pad_id is None:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token_id not in (None, pad_id):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        tokenizer.save_pretrained(target)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars, and its warnings of what this module checks itself."""
    from transformers.utils import logging

    speech: Any = logging
    shown, level = speech.is_progress_bar_enabled(), speech.get_verbosity()
    speech.disable_progress_bar()
    speech.set_verbosity_error()
    try:
        yield
    finally:
        speech.set_verbosity(level)
        if shown:
            speech.enable_progress_bar()
