"""Loading a model directory and running it over slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rl_contracts.errors import ModelError
from rl_contracts.logging import get_logger
from rl_contracts.token_logprobs import chosen_logprobs
from rl_inference.server.attention import IMPLEMENTATION, SlotSpan
from rl_inference.server.cache import SlotCache, padded_length
from rl_inference.server.config import ServerConfig
from rl_inference.server.directory import check_directory

logger = get_logger("inference.server.model")

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_DEFAULT_CONTEXT = 32768
_SCORED_AT_ONCE = 1024
"""Positions whose logits are held in float32 at once when a sequence is scored."""


class SlotModel:
    """A causal language model of transformers and the cache that it generates into."""

    def __init__(self, model: Any, tokenizer: Any | None, slots: int, context_length: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = model.device
        text_config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length = context_length
        self.cache = SlotCache(text_config.num_hidden_layers, slots, context_length)
        self.end_ids = _end_ids(model, tokenizer)
        self._span: SlotSpan | None = None
        # The head runs on the wanted positions alone: [rows, tokens, vocab] logits of a prefill would dwarf
        # everything else.
        model.get_output_embeddings().register_forward_pre_hook(self._pick_last)

    @classmethod
    def load(cls, config: ServerConfig) -> SlotModel:
        """Load a Hugging Face directory.

        Raises:
            ModelError: no directory, no weights, weights that do not fit the config, or an architecture that
        cannot be served."""
        path = Path(config.model)
        check_directory(path)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=hf_config,
                dtype=getattr(torch, config.dtype),
                attn_implementation=IMPLEMENTATION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            model, info = loaded
            model.to(device)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelError(f"{path}: the model cannot be loaded on {device} in {config.dtype}: {error}") from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise ModelError(
                f"{path}: the weights lack {len(missing)} parameters of {type(model).__name__}, the first "
                f"{missing[:3]}. Save the model with `save_pretrained` (full weights, not an adapter)."
            )
        _check_architecture(path, model)
        longest = getattr(hf_config.get_text_config(), "max_position_embeddings", None) or _DEFAULT_CONTEXT
        if config.context_length > longest:
            raise ModelError(f"context_length {config.context_length}: {path} has {longest} positions; lower it.")
        model.eval().requires_grad_(False)
        return cls(model, _load_tokenizer(path), config.slots, config.context_length or longest)

    def prefill(self, rows: list[list[int]], first: int) -> torch.Tensor:
        """Run sequences from their start into empty slots.

        Args:
            rows: token ids of each sequence; row i goes into slot `first + i`.

        Returns:
            logits after each sequence's last token, [rows, vocab].
        """
        longest = max(len(row) for row in rows)
        input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        span = SlotSpan(
            first=first,
            positions=torch.arange(longest, device=self.device).expand(len(rows), -1),
            length=longest,
            fresh=True,
            last=torch.tensor([len(row) - 1 for row in rows], device=self.device),
        )
        return self._forward(input_ids, span)[:, 0]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Run one token of each of the first slots.

        Args:
            tokens, positions: int64 [rows]; row i is slot i.
            longest: the largest position, known without asking the device.

        Returns:
            logits, [rows, vocab].
        """
        span = SlotSpan(first=0, positions=positions[:, None], length=padded_length(longest + 1))
        return self._forward(tokens[:, None], span)[:, 0]

    def score(self, input_ids: list[int], temperature: float) -> list[float]:
        """Log-probs of given tokens at the current weights; entry 0 is 0.

        The head runs on the positions that predict a token, and the rest is the trainers' own expression: a trainer
        that runs this sequence alone, with the same kernels, gets the same bits.
        """
        length = len(input_ids)
        if length < 2:
            return [0.0] * length
        ids = torch.tensor([input_ids], device=self.device)
        positions = torch.arange(length, device=self.device)[None]
        span = SlotSpan(0, positions, length, fresh=True, cached=False, scored=True)
        logits, targets = self._forward(ids, span)[0], ids[0, 1:]
        sharpness = torch.full((length - 1,), temperature or 1.0, device=self.device).reciprocal()
        parts = [slice(start, start + _SCORED_AT_ONCE) for start in range(0, length - 1, _SCORED_AT_ONCE)]
        chosen = [chosen_logprobs(logits[part].float(), targets[part], sharpness[part])[0] for part in parts]
        return [0.0, *torch.cat(chosen).tolist()]

    def _forward(self, input_ids: torch.Tensor, span: SlotSpan) -> torch.Tensor:
        self.cache.use(span)
        self._span = span
        output = self.model(
            input_ids=input_ids,
            position_ids=span.positions,
            past_key_values=self.cache,
            use_cache=True,
            span=span,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _pick_last(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._span is not None and self._span.scored:
            return (inputs[0][:, :-1], *inputs[1:])
        if self._span is None or self._span.last is None:
            return None
        hidden, last = inputs[0], self._span.last
        return (hidden[torch.arange(hidden.shape[0], device=hidden.device), last][:, None], *inputs[1:])


def _check_architecture(path: Path, model: Any) -> None:
    name = type(model).__name__
    other = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise ModelError(
            f"{path}: {name} has layers of type {sorted(other)}; the embedded server knows full and sliding "
            "attention. Use another engine for this model."
        )
    if not getattr(model, "_supports_attention_backend", False) or model.get_output_embeddings() is None:
        raise ModelError(
            f"{path}: {name} does not let its attention be replaced, so the embedded server cannot serve it. "
            "Use another engine for this model."
        )


def _load_tokenizer(path: Path) -> Any | None:
    """The directory's tokenizer; None where it has none (then there is no text, and no stop strings)."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        logger.warning("%s has no tokenizer: answers carry no text, and stop strings are refused", path)
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _end_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(token) for token in found)
