"""Reading a Hugging Face model directory, and refusing early what cannot be trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import other_layers
from rl_contracts.models.config_files import quiet_transformers, read_config
from rl_contracts.runtime.logging import get_logger
from rl_engines_fsdp.model import attention

log = get_logger("engines.fsdp")

SCALAR_HEAD = "score.weight"
"""What transformers calls the head of its sequence classifiers."""


def read_model(path: str, head: str = "lm", new_head: bool = True) -> nn.Module:
    """The model with its weights on the CPU, in float32 (the master weights).

    Args:
        head: one of `rl_contracts.data.HEADS`.
        new_head: whether a scalar head that the directory, a language model's, does not have is made, of zeros; else
            it is refused.

    Raises:
        ModelError: the weights cannot be read, or do not fill the model.
    """
    from safetensors import SafetensorError

    attention.register()
    config = read_config(path, head)
    _check_attention(path, config, head)
    try:
        with quiet_transformers():
            model, report = _factory(head).from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation=attention.NAME, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if attention.NAME in error.args:  # a table of attentions that ours is not in
            raise ModelError(_no_attention(path, config.model_type)) from error
        raise ModelError(f"model {path}: its weights cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if head != "lm" and new_head and missing == [SCALAR_HEAD]:  # a language model's directory
        nn.init.zeros_(model.get_parameter(SCALAR_HEAD))
        log.info("model %s has no scalar head; it starts at zero.", path)
    elif missing:
        raise ModelError(
            f"model {path}: {len(missing)} parameters have no weights there, {missing[:3]} first; they would start at "
            "random. Is this the model that config.json describes?"
        )
    return model


def _check_attention(path: str, config: Any, head: str) -> None:
    """See that the model's layers are such as packed rows can be run through, before it is made.

    Raises:
        ModelError: they are not.
    """
    kind: Any = _factory(head)._model_mapping.get(type(config), None)
    name = config.model_type if kind is None else kind.__name__
    other = other_layers(config)
    if other:
        raise ModelError(
            f"model {path}: {name} has layers of type {other}; packed rows can be run through full and sliding "
            "attention only, so it cannot be trained here."
        )
    if kind is not None and not kind._can_set_attn_implementation():
        raise ModelError(_no_attention(path, name))


def _no_attention(path: str, name: str) -> str:
    return (
        f"model {path}: {name} does not let its attention be replaced by one of packed rows, so it cannot be trained "
        "here."
    )


def empty_model(config: Any, head: str = "lm") -> nn.Module:
    """The same model on the meta device: shapes and modules without memory."""
    attention.register()
    with torch.device("meta"):
        return _factory(head).from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)


def _factory(head: str) -> Any:
    """The class of transformers that makes models with this head."""
    import transformers

    return transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification


def check_same_weights(path: str, found: Iterable[tuple[str, Tensor]], expected: Iterable[tuple[str, Tensor]]) -> None:
    """See that two models have parameters and buffers of the same names and shapes.

    Raises:
        ModelError: names the first that differs.
    """
    ours, theirs = ({name: tuple(value.shape) for name, value in tensors} for tensors in (expected, found))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        name = different[0]
        raise ModelError(
            f"model {path}: {len(different)} weights differ from the engine's model: {name!r} has shape "
            f"{theirs.get(name, 'none')} there and {ours.get(name, 'none')} here. Load a checkpoint of the same model."
        )
