"""Loading a model directory and running it over slots."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rl_contracts.data import ServeSpec
from rl_contracts.errors import ModelError
from rl_contracts.linear import speed_up
from rl_contracts.logging import get_logger
from rl_contracts.token_logprobs import chosen_logprobs
from rl_inference.config import EmbeddedEngineConfig
from rl_inference.server.attention import IMPLEMENTATION, TokenPass, running
from rl_inference.server.cache import KernelLayer, SlotCache, SlotLayer, TorchLayer
from rl_inference.server.compiled import compile_pass, stance
from rl_inference.server.directory import check_directory
from rl_inference.server.selfcheck import check_numbers

logger = get_logger("inference.server.model")

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_DEFAULT_CONTEXT = 32768
_SCORED_AT_ONCE = 1024
"""Positions whose logits are held in float32 at once when a sequence is scored."""


class SlotModel:
    """A causal language model of transformers and the cache that it generates into."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        slots: int,
        context_length: int,
        layer: type[SlotLayer] = TorchLayer,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = model.device
        text_config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length = context_length
        self.cache = SlotCache(text_config.num_hidden_layers, slots, context_length, layer)
        self.end_ids = _end_ids(model, tokenizer)
        self._span: TokenPass | None = None
        # The head runs on the wanted tokens alone: [tokens, vocab] logits of a prefill would dwarf everything else.
        model.get_output_embeddings().register_forward_pre_hook(self._pick_wanted)

    @classmethod
    def load(cls, config: EmbeddedEngineConfig, spec: ServeSpec) -> SlotModel:
        """Load a Hugging Face directory.

        Raises:
            ModelError: no directory, no weights, weights that do not fit the config, or an architecture that
        cannot be served."""
        path = Path(spec.model_path)
        check_directory(path)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = spec.device if spec.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
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
        if not spec.deterministic:  # a trainer that makes the same bits multiplies with torch's choice
            speed_up(model)
        if config.compile:
            compile_pass(model)
        result = cls(
            model, _load_tokenizer(path), config.slots, config.context_length or longest, _layer_type(model, device)
        )
        check_numbers(result)
        result.warm_up()
        return result

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one token, so that nothing is compiled or imported under the first request."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.run(nothing, TokenPass(nothing, nothing, longest=1, singles=1, in_place=True))

    def run(self, tokens: torch.Tensor, span: TokenPass) -> torch.Tensor:
        """One forward pass over tokens of many sequences.

        Args:
            tokens: int64 [tokens].

        Returns:
            logits of the wanted tokens, [wanted, vocab].
        """
        self.cache.use(span)
        self._span = span
        with running(span), stance(len(tokens)):
            output = self.model(input_ids=tokens[None], position_ids=span.positions[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    def score(self, input_ids: list[int], temperature: float) -> list[float]:
        """Log-probs of given tokens at the current weights; entry 0 is 0.

        The head runs on the positions that predict a token, and the rest is the trainers' own expression: a trainer
        that runs this sequence alone, with the same kernels, gets the same bits.
        """
        length = len(input_ids)
        if length < 2:
            return [0.0] * length
        ids = torch.tensor(input_ids, device=self.device)
        places = torch.arange(length, device=self.device)
        span = TokenPass(torch.zeros_like(places), places, length, singles=0, cached=False, wanted=places[:-1])
        logits, targets = self.run(ids, span), ids[1:]
        sharpness = torch.full((length - 1,), temperature or 1.0, device=self.device).reciprocal()
        parts = [slice(start, start + _SCORED_AT_ONCE) for start in range(0, length - 1, _SCORED_AT_ONCE)]
        chosen = [chosen_logprobs(logits[part].float(), targets[part], sharpness[part])[0] for part in parts]
        return [0.0, *torch.cat(chosen).tolist()]

    def _pick_wanted(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._span is None or self._span.wanted is None:
            return None
        return (inputs[0][:, self._span.wanted], *inputs[1:])


def _layer_type(model: Any, device: str) -> type[SlotLayer]:
    """The fastest cache that fits the model."""
    config = model.config.get_text_config()
    try:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except RuntimeError:  # transformers refuses to name one where layers differ
        return TorchLayer
    if device != "cpu" or model.dtype != torch.float32 or dim % 4:
        return TorchLayer
    if importlib.util.find_spec("numba") is None:
        logger.warning("numba is not installed: attention on this CPU takes the slower path of torch")
        return TorchLayer
    return KernelLayer


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
