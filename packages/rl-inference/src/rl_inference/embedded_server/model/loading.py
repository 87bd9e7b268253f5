"""Load a model directory and check that the embedded server can serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rl_contracts.data import ServeSpec
from rl_contracts.errors import ModelError
from rl_contracts.images import read_image
from rl_contracts.images.features import ImageProcessor, auto_class, has_vision, text_attention
from rl_contracts.models.attention_windows import other_layers, short_windows
from rl_contracts.models.cpu_matmul import use_faster_matmul
from rl_contracts.runtime.logging import get_logger
from rl_inference.backends.embedded.config import EmbeddedEngineConfig
from rl_inference.embedded_server.model.attention import Segment, TokenPass
from rl_inference.embedded_server.model.cache import KernelLayer, TorchLayer
from rl_inference.embedded_server.model.memory import fit_cache
from rl_inference.embedded_server.model.slot_model import IMPLEMENTATION, SlotModel, uncompiled
from rl_inference.embedded_server.model.vision import PromptImages, VisionModel

logger = get_logger("inference.server.loading")

_DEFAULT_CONTEXT = 32768
_CHECK_CHUNKS = (7, 5, 1, 1, 3)
"""Number of tokens of each check pass: the start of a prompt, a further chunk of it, single tokens, another chunk."""
_CHECK_WINDOW = 8
"""Attention window during the check: shorter than the checked sequence."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Mean absolute difference of log-probs that rounding may cause.

It scales with the range of the log-probs if that is below one nat. A wrong computation differs by whole nats.
"""


def load_model(config: EmbeddedEngineConfig, spec: ServeSpec, sharing: int = 1) -> SlotModel:
    """Load a Hugging Face directory; for `sharing` see `fit_cache`.

    Raises:
        ModelError: the directory has no weights, its weights do not fit the config, or its architecture is
            unsupported.
    """
    path = Path(spec.model_path)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = spec.device if spec.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_class(hf_config)
        if has_vision(hf_config) and spec.deterministic:
            raise ModelError(
                f"{path}: deterministic runs support only text models, found a vision-language model; set "
                "deterministic=false"
            )
        loaded: Any = auto_class(hf_config).from_pretrained(
            path,
            config=hf_config,
            dtype=getattr(torch, config.served_dtype),
            attn_implementation=slot_implementation(hf_config),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, info = loaded
        model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if IMPLEMENTATION in error.args:  # the model has a fixed table of attention classes
            raise ModelError(_no_attention(str(hf_config.model_type))) from error
        raise ModelError(f"{path}: the model cannot be loaded on {device} in {config.served_dtype}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{path}: the weights lack {len(missing)} parameters of {type(model).__name__}, first "
            f"{missing[:3]}. Save the model with `save_pretrained` (full weights, not an adapter)."
        )
    _check_architecture(path, model)
    longest = _usable_positions(path, hf_config.get_text_config(), config.context_length)
    model.eval().requires_grad_(False)
    if not spec.deterministic:  # in deterministic runs, the trainer uses torch's default matrix product
        use_faster_matmul(model)
    if config.compile:
        compile_pass(model)
    tokenizer = _load_tokenizer(path)
    context = config.context_length or longest
    vision = VisionModel(model, ImageProcessor(str(path))) if has_vision(hf_config) else None
    layer = KernelLayer if device == "cpu" and model.dtype == torch.float32 else TorchLayer
    result = SlotModel(model, tokenizer, config.max_sequences, context, _end_ids(model, tokenizer), layer, vision)
    check_numbers(result)
    if vision is not None:
        check_images(result, vision)
    result.warm_up()
    fit_cache(result, config.cache_gib, config.context_length, staged=bool(spec.weights_dir), sharing=sharing)
    return result


def slot_implementation(config: Any) -> str | dict[str, str]:
    """Return the value of `attn_implementation` for decode slots. A vision encoder keeps its own attention."""
    return text_attention(config, IMPLEMENTATION)


def _usable_positions(path: Path, config: Any, requested: int) -> int:
    """Return the maximum sequence length.

    transformers changes all rotary frequencies of a sequence (longrope) once it is longer than the original length. A
    server cannot do this: earlier tokens would then differ from a forward pass over the whole sequence.

    Raises:
        ModelError: `requested` is longer.
    """
    longest: int = getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    usable = min([longest, *(kind["original_max_position_embeddings"] for kind in kinds)])
    reason = "" if usable == longest else f" before its rotary embeddings (longrope) change, out of {longest}"
    if requested > usable:
        raise ModelError(f"context_length={requested} is too long: {path} has {usable} positions{reason}; lower it.")
    if reason and not requested:
        logger.warning(
            "%s: the context length is limited to %d tokens, the number of positions%s", path, usable, reason
        )
    return usable


def _check_class(config: Any) -> None:
    """Check that the model class lets its attention be replaced, before a model is created."""
    kind: Any = auto_class(config)._model_mapping.get(type(config), None)
    if kind is not None and not kind._can_set_attn_implementation():
        raise ModelError(_no_attention(kind.__name__))


def _no_attention(name: str) -> str:
    return (
        f"{name} does not let its attention be replaced, so the embedded server cannot serve it. Use another "
        "engine for this model."
    )


def _check_architecture(path: Path, model: Any) -> None:
    name = type(model).__name__
    other = other_layers(model.config)
    if other:
        raise ModelError(
            f"{path}: {name} has layers of type {other}; the embedded server supports only full and "
            "sliding attention. Use another engine for this model."
        )
    if model.get_output_embeddings() is None:
        raise ModelError(f"{path}: {name} has no `lm_head`, so it cannot generate. Use another engine for this model.")


def _load_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of the directory, or None if it has none.

    Without a tokenizer, replies carry no text, and requests with stop strings are rejected.
    """
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        logger.warning("%s has no tokenizer: replies carry no text, and requests with stop strings are rejected", path)
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _end_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    token_ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        token_ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(token) for token in token_ids)


def compile_pass(model: Any) -> None:
    """Compile the layers of a transformers model in place; compilation happens in its first passes.

    Raises:
        ModelError: the device is a CPU, and there is no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        if model.device.type == "cpu":
            get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ModelError(
            "compile=true: torch finds no C++ compiler, which it needs on a CPU. Install g++ (or set CXX), or "
            "set compile=false."
        ) from error
    model.base_model.compile(dynamic=True)


@torch.inference_mode()
def check_numbers(model: SlotModel) -> None:
    """Compare log-probs that the model computes in a decode slot, in chunks, with its original attention.

    Raises:
        ModelError: the log-probs differ, or the model cannot run over decode slots.
    """
    count = min(sum(_CHECK_CHUNKS), model.context_length)
    ids = (torch.arange(count, device=model.device) * 7919 + 3) % model.vocab_size
    name = type(model.model).__name__
    with short_windows(model.model, _CHECK_WINDOW) as windowed:
        if windowed:
            with uncompiled():
                _compare_logprobs(model, name, ids)
    _compare_logprobs(model, name, ids)
    if not all(layer.used for layer in model.cache.layers):
        raise ModelError(_no_attention(name))


def _compare_logprobs(model: SlotModel, name: str, ids: torch.Tensor) -> None:
    try:
        actual = _slot_logprobs(model, ids)
        expected = _reference_logprobs(model, ids)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{name} cannot run in the decode slots of the embedded server ({type(error).__name__}: {error}). Use "
            "another engine for this model."
        ) from error
    allowed = _TOLERANCES[model.model.dtype] * min(1.0, (expected.max() - expected.min()).item())
    difference = (actual - expected).abs().mean().item()
    if not difference <= allowed:
        raise ModelError(
            f"{name} computes other log-probs in the decode slots of the embedded server than with its own attention: "
            f"the mean difference is {difference:.2g}, rounding allows {allowed:.2g}. "
            "Use another engine for this model."
        )


@torch.inference_mode()
def check_images(model: SlotModel, vision: VisionModel) -> None:
    """Compare log-probs of a prompt with an image, read into a decode slot in chunks, with the model's own forward.

    Raises:
        ModelError: the log-probs differ, or the model cannot read images in decode slots.
    """
    from PIL import Image

    name = type(model.model).__name__
    noise = Image.effect_noise((48, 32), 64).convert("RGB")
    images = (read_image(noise),)
    try:
        ids = [3, *vision.image_ids(images), 5, 7]
        prompt = vision.prepare(ids, images)
        model.cache.grow(0, len(ids))
        parts = [_image_chunk(model, vision, prompt, ids, *chunk) for chunk in ((0, 3), (3, len(ids)))]
        model.cache.pages.assign(0, [])
        actual = torch.log_softmax(torch.cat(parts).float(), -1)
        model.model.set_attn_implementation("eager")
        try:
            logits = model.model(**vision.inputs(prompt, ids), use_cache=False).logits[0]
        finally:
            model.model.set_attn_implementation(slot_implementation(model.model.config))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{name} cannot read images in the decode slots of the embedded server ({type(error).__name__}: {error}). "
            "Use another engine for this model."
        ) from error
    vision.forget()
    expected = torch.log_softmax(logits.float(), -1)
    allowed = _TOLERANCES[model.model.dtype] * min(1.0, (expected.max() - expected.min()).item())
    difference = (actual - expected).abs().mean().item()
    if not difference <= allowed:
        raise ModelError(
            f"{name} computes other log-probs of images in the decode slots of the embedded server than with its own "
            f"attention: the mean difference is {difference:.2g}, rounding allows {allowed:.2g}. Use another engine "
            "for this model."
        )


def _image_chunk(
    model: SlotModel, vision: VisionModel, prompt: PromptImages, ids: list[int], start: int, stop: int
) -> torch.Tensor:
    """Return the logits of tokens `start` to `stop` of a prompt in slot 0."""
    positions = torch.arange(start, stop, device=model.device)
    span = TokenPass(
        slots=torch.zeros_like(positions),
        positions=positions,
        longest=stop,
        singles=0,
        segments=(Segment(0, start, 0, stop - start),),
        images=vision.chunk(prompt, start, stop - start),
    )
    return model.run(torch.tensor(ids[start:stop], device=model.device), span)


def _slot_logprobs(model: SlotModel, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probs [tokens, vocab] of tokens that the model reads in chunks into slot 0."""
    logits, start = [], 0
    for count in _CHECK_CHUNKS:
        count = min(count, len(ids) - start)
        if not count:
            break
        positions = torch.arange(start, start + count, device=ids.device)
        is_single = count == 1
        span = TokenPass(
            slots=torch.zeros_like(positions),
            positions=positions,
            longest=start + count,
            singles=1 if is_single else 0,
            segments=() if is_single else (Segment(0, start, 0, count),),
        )
        logits.append(model.run(ids[start : start + count], span))
        start += count
    return torch.log_softmax(torch.cat(logits).float(), -1)


def _reference_logprobs(model: SlotModel, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probs [tokens, vocab] of the model's own attention without a cache."""
    model.model.set_attn_implementation("eager")
    try:
        with uncompiled():
            logits = model.model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.model.set_attn_implementation(slot_implementation(model.model.config))
    return torch.log_softmax(logits.float(), -1)
