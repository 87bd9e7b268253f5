"""Reading a Hugging Face model directory, and refusing early what cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_contracts.errors import ModelError
from rl_engines_fsdp.model import attention, heads

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def check_directory(path: str) -> None:
    """See that a local path is a model directory; hub ids pass.

    Raises:
        ModelError: it is a local path without `config.json` or without weights.
    """
    directory = Path(path)
    if not directory.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ModelError(f"model {path}: expected a Hugging Face model directory, found nothing there. {_ADVICE}")
        return
    found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else ["a file"]
    listing = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "an empty directory"
    if "config.json" not in found:
        raise ModelError(f"model {path}: expected config.json, found {listing}. {_ADVICE}")
    if not any(next(directory.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        raise ModelError(f"model {path}: expected weights ({' or '.join(WEIGHT_PATTERNS)}), found {listing}. {_ADVICE}")


_ADVICE = (
    "Give a directory written by `save_pretrained` or downloaded whole from a hub, or a run's checkpoints/step_<n>."
)


def read_config(path: str, head: str = "lm") -> Any:
    """The model's configuration, fit for a head of `rl_contracts.data.HEADS`.

    Raises:
        ModelError: it is missing, of an architecture that this transformers does not know, or of another head.
    """
    from transformers import AutoConfig

    check_directory(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: its configuration cannot be read: {error}") from error
    heads.fit_config(path, config, head)
    return config


def read_model(path: str, head: str = "lm", new_head: bool = True) -> nn.Module:
    """The model with its weights on the CPU, in float32 (the master weights).

    Args:
        head: one of `rl_contracts.data.HEADS`.
        new_head: whether a scalar head that the directory does not have may be made; else it is refused.

    Raises:
        ModelError: the weights cannot be read, or do not fill the model.
    """
    from safetensors import SafetensorError

    attention.register()
    config = read_config(path, head)
    try:
        with quiet():
            loaded: Any = heads.factory(head).from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation=attention.NAME, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {path}: its weights cannot be loaded: {error}") from error
    model, report = loaded
    missing = heads.without_settled(path, model, sorted(report["missing_keys"]), head, new_head)
    if missing:
        raise ModelError(
            f"model {path}: {len(missing)} parameters have no weights there, {missing[:3]} first; they would start at "
            "random. Is this the model that config.json describes?"
        )
    return without_dropout(model)


def empty_model(config: Any, head: str = "lm") -> nn.Module:
    """The same model on the meta device: shapes and modules without memory."""
    attention.register()
    with torch.device("meta"):
        model = heads.factory(head).from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    return without_dropout(model)


def check_same_parameters(path: str, found: nn.Module, expected: nn.Module) -> None:
    """See that two models have parameters of the same names and shapes.

    Raises:
        ModelError: names the first that differs.
    """
    ours, theirs = ({n: tuple(p.shape) for n, p in model.named_parameters()} for model in (expected, found))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        name = different[0]
        raise ModelError(
            f"model {path}: {len(different)} parameters differ from the engine's model: {name!r} has shape "
            f"{theirs.get(name, 'none')} there and {ours.get(name, 'none')} here. Load a checkpoint of the same model."
        )


@contextmanager
def quiet() -> Iterator[None]:
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


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch dropout off: with it the policy that is trained is not the one that was sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
