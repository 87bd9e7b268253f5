"""Rotary embeddings whose frequencies depend on a row's length, for packed rows.

transformers chooses them, for longrope and for dynamic NTK, by the largest position that it is shown. Among packed rows
that is the longest row's, so a row's log-probs would depend on its neighbours. Here each row gets those that it has
alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEPT = 1024
"""Sets of frequencies that are kept, at most: dynamic NTK has one for each length."""


class RowFrequencies:
    """Wraps the rotary embeddings of a model that choose by length, in place; false where it has none.

    `rows` is called before each forward; without rows transformers chooses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lengths: Sequence[int] = ()
        self._row_of_token: Tensor | None = None
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self._modules = [module for module in model.modules() if chooses(getattr(module, "rope_type", None))]
        for module in self._modules:
            module.forward = functools.partial(self._forward, module)  # type: ignore[method-assign]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def rows(self, lengths: Sequence[int] = (), row_of_token: Tensor | None = None) -> None:
        """Say which rows the next forward holds; none: one that transformers runs by itself.

        Args:
            lengths: tokens of each row, also of those that lie on other ranks.
            row_of_token: int64 [N] of the tokens of this rank.
        """
        self._lengths, self._row_of_token = lengths, row_of_token

    @torch.no_grad()
    def _forward(self, module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Cosines and sines [1, N, D], as the module makes them."""
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not (self._lengths and chooses(kind)):
            return type(module).forward(module, x, position_ids, **of_layer)
        make = inspect.unwrap(type(module).forward)  # without transformers' choice
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        before, tables = getattr(module, name), {}
        chosen = [_deciding_length(module, kind, layer_type, length) for length in self._lengths]
        for length in dict.fromkeys(chosen):
            setattr(module, name, self._frequencies(module, kind, length, x.device, of_layer))
            tables[length] = make(module, x, position_ids, **of_layer)
        setattr(module, name, before)
        if len(tables) == 1:
            return tables[chosen[0]]
        order = {length: index for index, length in enumerate(tables)}
        of_row = torch.tensor([order[length] for length in chosen], device=x.device)
        place = of_row[self._row_of_token], 0, torch.arange(x.shape[1], device=x.device)
        return tuple(torch.stack(parts)[place][None] for parts in zip(*tables.values(), strict=True))

    def _frequencies(
        self, module: Any, kind: str, length: int, device: torch.device, of_layer: dict[str, str]
    ) -> Tensor:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        key = (module, *of_layer.values(), module.config.max_position_embeddings, length)
        if key not in self._made:
            if len(self._made) >= KEPT:
                self._made.clear()
            # a tensor for dynamic NTK, as transformers gives it: the rounding is the same
            told = length if kind == "longrope" else torch.tensor(length, device=device)
            self._made[key] = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=told, **of_layer)[0]
        return self._made[key]


def chooses(rope_type: Any) -> bool:
    """Whether a rotary embedding of this type, or with this type for some layers, looks at lengths."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _deciding_length(module: Any, kind: str, layer_type: str | None, length: int) -> int:
    """The same number for all rows with the same frequencies: longrope has two sets, dynamic NTK one for each length
    beyond the original."""
    if kind != "longrope":
        return max(length, module.original_max_seq_len)
    settings = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    original: int = settings["original_max_position_embeddings"]
    return original + (length > original)
