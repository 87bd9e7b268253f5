"""Tiny random models with a tokenizer, made on the spot, so that no test needs a network or a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_contracts.config import require_choice

ARCHITECTURES = ("qwen3", "llama")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_tokenizer() -> Any:
    """A tokenizer of single bytes (any text comes back as it was) with pad id 0, end token id 2 and a chat template.

    Returns:
        a `transformers.PreTrainedTokenizerFast` of 259 tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([PAD, START, END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    directory: str | Path,
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    tied: bool = True,
) -> Path:
    """Write a Hugging Face model directory with random float32 weights and `make_tiny_tokenizer`'s files.

    Args:
        directory: where; made if missing.
        architecture: `qwen3` or `llama`.
        seed: of the weights. They are larger than usual, so that different contexts give clearly different
            distributions.
        layers: hidden layers.
        hidden: width, a multiple of 32; heads are 32 wide and pairs of them share keys and values.
        tied: whether the output head is the embedding.

    Returns:
        the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    require_choice("architecture", architecture, ARCHITECTURES)
    tokenizer = make_tiny_tokenizer()
    heads = max(hidden // 32, 1)
    config = (Qwen3Config if architecture == "qwen3" else LlamaConfig)(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)
