"""Read a Hugging Face model directory, and reject models that cannot be trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_contracts.images.features import auto_class, text_attention
from rl_contracts.models.attention_windows import other_layers
from rl_contracts.models.config_files import quiet_transformers, read_config
from rl_contracts.runtime.logging import get_logger
from rl_engines_fsdp.model import attention

log = get_logger("engines.fsdp")

SCALAR_HEAD = "score.weight"
"""Name of the head weight in sequence classifiers of transformers."""


def read_model(path: str, head: str = "lm", new_head: bool = True) -> nn.Module:
    """Load a model on the CPU in float32 (the master weights).

    Args:
        path: model directory.
        head: one of `rl_contracts.data.HEADS`.
        new_head: whether to create a scalar head of zeros if the directory has none (a language model); otherwise such
            a directory is rejected.

    Raises:
        ModelError: the weights cannot be read, or some are missing.
    """
    from safetensors import SafetensorError

    attention.register()
    config = read_config(path, head)
    _check_attention(path, config, head)
    try:
        with quiet_transformers():
            model, report = _factory(config, head).from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                attn_implementation=packed_implementation(config),
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if attention.NAME in error.args:  # this model class looks its attention up in a table without `rl_packed`
            raise ModelError(_no_attention(path, config.model_type)) from error
        raise ModelError(f"model {path}: cannot load the weights: {error}") from error
    missing = sorted(report["missing_keys"])
    if head != "lm" and new_head and missing == [SCALAR_HEAD]:  # the directory of a language model
        nn.init.zeros_(model.get_parameter(SCALAR_HEAD))
        log.info("model %s has no scalar head; initialized the head to zero", path)
    elif missing:
        raise ModelError(
            f"model {path}: no weights for {len(missing)} parameters, including {missing[:3]}; they would be random. "
            "Check that the weight files match config.json."
        )
    return model


def _check_attention(path: str, config: Any, head: str) -> None:
    """Check that the layers of a model support packed sequences, before the model is loaded.

    Raises:
        ModelError: a layer does not support packed sequences.
    """
    model_class: Any = _factory(config, head)._model_mapping.get(type(config), None)
    name = config.model_type if model_class is None else model_class.__name__
    unsupported = other_layers(config)
    if unsupported:
        raise ModelError(
            f"model {path}: {name} has layers of type {unsupported}, but packed sequences require full or sliding "
            "attention. This engine cannot train the model."
        )
    if model_class is not None and not model_class._can_set_attn_implementation():
        raise ModelError(_no_attention(path, name))


def _no_attention(path: str, name: str) -> str:
    return (
        f"model {path}: {name} does not allow its attention to be replaced by attention over packed sequences. This "
        "engine cannot train the model."
    )


def empty_model(config: Any, head: str = "lm") -> nn.Module:
    """Create the model of a configuration on the meta device: modules and shapes without memory."""
    attention.register()
    with torch.device("meta"):
        return _factory(config, head).from_config(
            config, dtype=torch.float32, attn_implementation=packed_implementation(config)
        )


def packed_implementation(config: Any) -> str | dict[str, str]:
    """Return the value of `attn_implementation` for packed sequences. A vision encoder keeps its own attention."""
    return text_attention(config, attention.NAME)


def _factory(config: Any, head: str) -> Any:
    """Return the auto class of transformers for a configuration and head."""
    import transformers

    return auto_class(config) if head == "lm" else transformers.AutoModelForSequenceClassification


def check_same_weights(path: str, loaded: Iterable[tuple[str, Tensor]], expected: Iterable[tuple[str, Tensor]]) -> None:
    """Check that two models have parameters and buffers of the same names and shapes.

    Raises:
        ModelError: they differ; the message names the first difference.
    """
    engine_shapes, loaded_shapes = (
        {name: tuple(value.shape) for name, value in tensors} for tensors in (expected, loaded)
    )
    different = sorted(
        name
        for name in engine_shapes.keys() | loaded_shapes.keys()
        if engine_shapes.get(name) != loaded_shapes.get(name)
    )
    if different:
        name = different[0]
        raise ModelError(
            f"model {path}: {len(different)} weights differ from the engine's; {name!r} has shape "
            f"{loaded_shapes.get(name, 'none')} in the directory and {engine_shapes.get(name, 'none')} in the engine. "
            "Load a checkpoint of the same model."
        )
