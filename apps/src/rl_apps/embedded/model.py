"""A tiny random model of the Qwen3 architecture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_apps.embedded.recipe import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


def random_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A float32 model with fresh weights for the tokenizer's vocabulary; torch's global generator is left alone."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).float()  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write weights, configs, tokenizer and chat template in Hugging Face format."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    # A bar for one small file would break the caller's own progress line.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    finally:
        if shows_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
