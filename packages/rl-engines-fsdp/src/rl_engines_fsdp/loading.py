"""Reading a Hugging Face model directory, and refusing early what cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_contracts.errors import ModelError
from rl_engines_fsdp import attention
from rl_engines_fsdp.attention import Segments
from rl_engines_fsdp.causal_lm import PackedCausalLM

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
VERIFY_TOLERANCE = 5e-4
"""Largest difference of log-probs between the packed and the plain forward, in float32."""


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


def read_config(path: str) -> Any:
    """The model's configuration.

    Raises:
        ModelError: it is missing or of an architecture that this transformers does not know.
    """
    from transformers import AutoConfig

    check_directory(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: its configuration cannot be read: {error}") from error


def read_model(path: str) -> nn.Module:
    """The model with its weights on the CPU, in float32 (the master weights).

    Raises:
        ModelError: the weights cannot be read, or do not fill the model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    attention.register()
    check_directory(path)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation=attention.NAME, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {path}: its weights cannot be loaded: {error}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model {path}: {len(missing)} parameters have no weights there, {missing[:3]} first; they would start at "
            "random. Is this the model that config.json describes?"
        )
    return without_dropout(model)


def empty_model(config: Any) -> nn.Module:
    """The same model on the meta device: shapes and modules without memory."""
    from transformers import AutoModelForCausalLM

    attention.register()
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
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
    """Without transformers' progress bars."""
    from transformers.utils import logging

    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch dropout off: with it the policy that is trained is not the one that was sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@torch.no_grad()
def verify(wrapped: PackedCausalLM) -> None:
    """Compare two packed sequences with transformers' own forward of each alone.

    Raises:
        ModelError: they differ, or the packed forward fails.
    """
    model: Any = wrapped.model
    lengths = (5, 9)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = (torch.arange(sum(lengths)) * 7 + 3) % vocabulary
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = Segments(lengths, torch.tensor([0, 5, 14], dtype=torch.int32))
    try:
        found, _ = wrapped(ids, positions, torch.ones(len(ids)), segments)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ModelError(f"{type(model).__name__}: the packed forward fails: {error}") from error
    model.set_attn_implementation("eager")
    try:
        plain = [model(row[None], use_cache=False).logits[0].float() for row in ids.split(lengths)]
    finally:
        model.set_attn_implementation(attention.NAME)
    expected = torch.cat([_next_token_logprobs(z, row) for z, row in zip(plain, ids.split(lengths), strict=True)])
    difference = (found - expected).abs().max().item()
    if not difference <= VERIFY_TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: log-probs of packed sequences differ by {difference:.3g} from those of each "
            f"alone (allowed {VERIFY_TOLERANCE:g}): its layers mix packed sequences, or its logits are made in a way "
            "this engine does not know. The model cannot be trained here."
        )


def _next_token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([logprobs.new_zeros(1), logprobs])
