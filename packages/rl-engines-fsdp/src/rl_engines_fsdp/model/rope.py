"""Rotary embeddings with length-dependent frequencies, for packed sequences.

For longrope and dynamic NTK, transformers selects frequencies by the largest position in its input. For packed
sequences this is the length of the longest sequence, so log-probs of a sequence would depend on its neighbors. Here
each sequence gets the frequencies that it would have alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEPT = 1024
"""Maximum number of cached frequency sets; dynamic NTK has one per length."""


class RowFrequencies:
    """Frequencies per sequence, for rotary embeddings that depend on the sequence length.

    The constructor replaces the forward of these modules in place. The object is false if the model has none. Call
    `rows` before each forward. Without sequence lengths, transformers selects the frequencies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lengths: Sequence[int] = ()
        self._row_of_token: Tensor | None = None
        self._cache: dict[tuple[Any, ...], Tensor] = {}
        self._modules = [module for module in model.modules() if chooses(getattr(module, "rope_type", None))]
        for module in self._modules:
            module.forward = functools.partial(self._forward, module)  # type: ignore[method-assign]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def rows(self, lengths: Sequence[int] = (), row_of_token: Tensor | None = None) -> None:
        """Set the sequences of the next forward; without arguments, transformers selects the frequencies.

        Args:
            lengths: tokens of each sequence on all context ranks.
            row_of_token: sequence index of each token of this rank, int64 [N].
        """
        self._lengths, self._row_of_token = lengths, row_of_token

    @torch.no_grad()
    def _forward(self, module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cosines and sines [1, N, D], like the forward of the module."""
        layer_options = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not (self._lengths and chooses(kind)):
            return type(module).forward(module, x, position_ids, **layer_options)
        compute = inspect.unwrap(type(module).forward)  # without the selection by transformers
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        original, tables = getattr(module, name), {}
        deciding_lengths = [_deciding_length(module, kind, layer_type, length) for length in self._lengths]
        for length in dict.fromkeys(deciding_lengths):
            setattr(module, name, self._frequencies(module, kind, length, x.device, layer_options))
            tables[length] = compute(module, x, position_ids, **layer_options)
        setattr(module, name, original)
        if len(tables) == 1:
            return tables[deciding_lengths[0]]
        table_indices = {length: index for index, length in enumerate(tables)}
        table_of_sequence = torch.tensor([table_indices[length] for length in deciding_lengths], device=x.device)
        entry = table_of_sequence[self._row_of_token], 0, torch.arange(x.shape[1], device=x.device)
        return tuple(torch.stack(parts)[entry][None] for parts in zip(*tables.values(), strict=True))

    def _frequencies(
        self, module: Any, kind: str, length: int, device: torch.device, layer_options: dict[str, str]
    ) -> Tensor:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        key = (module, *layer_options.values(), module.config.max_position_embeddings, length)
        if key not in self._cache:
            if len(self._cache) >= KEPT:
                self._cache.clear()
            # transformers passes a tensor for dynamic NTK; a tensor here gives the same rounding
            seq_len = length if kind == "longrope" else torch.tensor(length, device=device)
            self._cache[key] = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=seq_len, **layer_options)[0]
        return self._cache[key]


def chooses(rope_type: Any) -> bool:
    """Return whether rotary embeddings of this type, in any layer, depend on lengths."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _deciding_length(module: Any, kind: str, layer_type: str | None, length: int) -> int:
    """Return a length that is equal for all sequences with the same frequencies.

    longrope has two sets of frequencies; dynamic NTK has one for each length above the original one.
    """
    if kind != "longrope":
        return max(length, module.original_max_seq_len)
    settings = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    original: int = settings["original_max_position_embeddings"]
    return original + (length > original)
