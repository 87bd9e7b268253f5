"""Sliding windows of transformers models whose attention is replaced: by trainers and servers alike.

Most layers hand their window on to the attention; some have it in the mask alone, which is not built for an attention
that knows by itself which tokens belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rl_contracts.errors import ModelError

NAMES = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Lengths, in tokens, from which on attention computes otherwise."""


KINDS = frozenset({"full_attention", "sliding_attention"})
"""What layers may be, as `layer_types` of a configuration says it."""


def other_layers(config: Any) -> list[str]:
    """The kinds of layers of a model that have another attention, or none: chunks, an index, a state that runs on."""
    return sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - KINDS)


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer by a model's configuration; None: it sees all tokens before."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return [None if kind == "full_attention" else window for kind in kinds]


def layer_window(module: Any, given: int | None) -> int | None:
    """The tokens that a layer's attention sees, the asking one included; None: all before it.

    Args:
        module: the attention, with its `config` and, where layers differ, its `layer_idx`.
        given: what it hands on.

    Raises:
        ModelError: it is of another kind (chunks, compressed), or calls itself sliding and has no window.
    """
    config = module.config
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[index] if kinds and index is not None else None
    if kind is not None and kind not in KINDS:
        raise ModelError(
            f"{type(module).__name__}: expected full or sliding attention, found {kind!r} in layer {index}; this layer "
            "is not supported."
        )
    of_config = None if kind == "full_attention" else getattr(config, "sliding_window", None)
    window: int | None = of_config if given is None else given
    if kind == "sliding_attention" and window is None:
        raise ModelError(
            f"{type(module).__name__}: layer {index} slides over a window that neither it nor `sliding_window` of its "
            "configuration names; this layer is not supported."
        )
    return window


@contextmanager
def short_windows(model: Any, length: int) -> Iterator[bool]:
    """Set a model's windows, and other lengths at which its attention changes, to `length` in this block, so that a few
    tokens meet them; yields whether it has any."""
    with ExitStack() as undo:
        found = [
            apply_windows(vars(owner), NAMES, length, undo)
            for module in model.modules()
            for owner in (module, getattr(module, "config", None))
            if owner is not None
        ]
        yield any(found)


def apply_windows(settings: MutableMapping[str, Any], names: Iterable[str], length: int, undo: ExitStack) -> bool:
    """Set those of the named settings that are integers to `length`, until `undo` is closed; whether there were any."""
    known = [name for name in names if isinstance(settings.get(name), int)]
    for name in known:
        undo.callback(settings.__setitem__, name, settings[name])
        settings[name] = length
    return bool(known)
