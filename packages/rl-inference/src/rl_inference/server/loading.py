"""From a model directory to a model that can be served, or to the reason why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rl_contracts.data import ServeSpec
from rl_contracts.errors import ModelError
from rl_contracts.linear import speed_up
from rl_contracts.logging import get_logger
from rl_inference.config import EmbeddedEngineConfig
from rl_inference.server.attention import Segment, TokenPass
from rl_inference.server.cache import KernelLayer, SlotLayer, TorchLayer
from rl_inference.server.model import IMPLEMENTATION, SlotModel, uncompiled

logger = get_logger("inference.server.loading")

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_DEFAULT_CONTEXT = 32768
_PARTS = (7, 5, 1, 1, 3)
"""Tokens of each pass over the slots: the start of a prompt, a further part of it, single tokens."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Mean absolute difference of the log-probs that rounding may make; what is wrong differs by whole nats in some."""


def load_model(config: EmbeddedEngineConfig, spec: ServeSpec) -> SlotModel:
    """Load a Hugging Face directory.

    Raises:
        ModelError: no weights, weights that do not fit the config, or an architecture that cannot be served.
    """
    path = Path(spec.model_path)
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
    tokenizer = _load_tokenizer(path)
    context, layer = config.context_length or longest, _layer_type(model, device)
    result = SlotModel(model, tokenizer, config.slots, context, _end_ids(model, tokenizer), layer)
    check_numbers(result)
    result.warm_up()
    return result


def _layer_type(model: Any, device: str) -> type[SlotLayer]:
    """The fastest cache that fits the model."""
    config = model.config.get_text_config()
    try:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except RuntimeError:  # transformers refuses to name one where layers differ
        return TorchLayer
    return KernelLayer if device == "cpu" and model.dtype == torch.float32 and dim % 4 == 0 else TorchLayer


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


def compile_pass(model: Any) -> None:
    """Compile the layers of a transformers model in place; its first passes do the work.

    Raises:
        ModelError: there is no C++ compiler, on a CPU.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        if model.device.type == "cpu":
            get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ModelError(
            "compile=true: torch finds no C++ compiler, which it needs on a CPU. Install g++ (or name one in CXX), or "
            "set compile=false."
        ) from error
    model.base_model.compile(dynamic=True)


@torch.inference_mode()
def check_numbers(model: SlotModel) -> None:
    """Compare log-probs of a sequence that was read in parts into a slot with the model's own attention.

    Raises:
        ModelError: they differ, or the model cannot be run over slots at all.
    """
    count = sum(_PARTS)
    ids = (torch.arange(count, device=model.device) * 7919 + 3) % model.vocab_size
    name = type(model.model).__name__
    try:
        found = _over_slots(model, ids)
        expected = _by_itself(model, ids)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{name} cannot be run over the slots of the embedded server ({type(error).__name__}: {error}). Use "
            "another engine for this model."
        ) from error
    allowed = _TOLERANCES[model.model.dtype]
    difference = (found - expected).abs().mean().item()
    if not difference <= allowed:
        raise ModelError(
            f"{name} computes other numbers over the slots of the embedded server than by itself: log-probs differ by "
            f"{difference:.2g} on average, at most {allowed:g} is rounding. Use another engine for this model."
        )


def _over_slots(model: SlotModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [tokens, vocab], read in parts into slot 0."""
    parts, start = [], 0
    for count in _PARTS:
        places = torch.arange(start, start + count, device=ids.device)
        one = count == 1
        span = TokenPass(
            slots=torch.zeros_like(places),
            positions=places,
            longest=start + count,
            singles=1 if one else 0,
            segments=() if one else (Segment(0, start, 0, count),),
            in_place=one,
        )
        parts.append(model.run(ids[start : start + count], span))
        start += count
    return torch.log_softmax(torch.cat(parts).float(), -1)


def _by_itself(model: SlotModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [tokens, vocab] with the model's own attention and no cache."""
    model.model.set_attn_implementation("eager")
    try:
        with uncompiled():
            logits = model.model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.model.set_attn_implementation(IMPLEMENTATION)
    return torch.log_softmax(logits.float(), -1)
