"""Sliding windows of transformers models whose attention function is replaced, for trainers and servers.

Most layers pass their window to the attention function. Other layers apply it only through the attention mask. For an
attention function that tracks sequence boundaries itself, transformers builds no mask. This module then reads the
window of such a layer from the model configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rl_contracts.errors import ModelError

NAMES = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Settings that hold a length in tokens above which the attention computation changes."""

KINDS = frozenset({"full_attention", "sliding_attention"})
"""Supported values of `layer_types` in a model configuration."""


def other_layers(config: Any) -> list[str]:
    """Return the sorted layer types of a model that are not in `KINDS`.

    Examples are chunked attention, indexed attention, and recurrent state without attention.
    """
    return sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - KINDS)


def layer_windows(config: Any) -> list[int | None]:
    """Return the window of each layer from a model configuration, in tokens.

    None means that the layer attends to all previous tokens.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return [None if kind == "full_attention" else window for kind in kinds]


def layer_window(module: Any, passed_window: int | None) -> int | None:
    """Return how many tokens a layer attends to, the current one included, or None for all previous tokens.

    Args:
        module: attention module, with its `config` and, where layers differ, its `layer_idx`.
        passed_window: window that the module passes to its attention function; None if it passes none.

    Raises:
        ModelError: the layer type is not supported (chunked, compressed), or the layer is sliding and has no window.
    """
    config = module.config
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[index] if kinds and index is not None else None
    if kind is not None and kind not in KINDS:
        raise ModelError(
            f"{type(module).__name__}: expected full or sliding attention, found {kind!r} in layer {index}; this layer "
            "is not supported."
        )
    config_window = None if kind == "full_attention" else getattr(config, "sliding_window", None)
    window: int | None = config_window if passed_window is None else passed_window
    if kind == "sliding_attention" and window is None:
        raise ModelError(
            f"{type(module).__name__}: sliding attention layer {index} has no window; set `sliding_window` in the "
            "model's configuration."
        )
    return window


@contextmanager
def short_windows(model: Any, length: int) -> Iterator[bool]:
    """Set all integer settings in `NAMES` of a model to `length` inside the block, and yield whether it has any.

    Short inputs then already exceed the windows.
    """
    with ExitStack() as undo:
        changed = [
            apply_windows(vars(owner), NAMES, length, undo)
            for module in model.modules()
            for owner in (module, getattr(module, "config", None))
            if owner is not None
        ]
        yield any(changed)


def apply_windows(settings: MutableMapping[str, Any], names: Iterable[str], length: int, undo: ExitStack) -> bool:
    """Set the named integer settings to `length` until `undo` is closed, and return whether there were any."""
    integers = [name for name in names if isinstance(settings.get(name), int)]
    for name in integers:
        undo.callback(settings.__setitem__, name, settings[name])
        settings[name] = length
    return bool(integers)
