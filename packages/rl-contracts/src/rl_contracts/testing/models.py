"""Tiny random models with a tokenizer, built on the spot, so that tests need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_contracts.config import require_choice

CONFIGS = {"qwen3": "Qwen3Config", "llama": "LlamaConfig", "qwen3_moe": "Qwen3MoeConfig"}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MARGIN = 4.0
"""Factor of the router weights, large enough that rounding does not change the choice of experts."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_tokenizer() -> Any:
    """Build a byte tokenizer (any text is decoded unchanged) with pad id 0, end token id 2 and a chat template.

    Returns:
        A `transformers.PreTrainedTokenizerFast` of 259 tokens.
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
    **settings: Any,
) -> Path:
    """Write a Hugging Face model directory with random float32 weights and `make_tiny_tokenizer`'s files.

    Args:
        directory: directory to write; created if missing.
        architecture: `qwen3`, `llama` or `qwen3_moe` (four experts per layer, two per token).
        seed: seed of the weights. They are larger than usual, so that different contexts give clearly different
            distributions.
        layers: number of hidden layers.
        hidden: hidden size, a multiple of 32. Attention heads are 32 wide, and pairs of them share keys and values.
        tied: whether the LM head shares the weights of the embedding.
        settings: further settings of the configuration.

    Returns:
        The directory.
    """
    import torch
    import transformers

    require_choice("architecture", architecture, tuple(CONFIGS))
    tokenizer = make_tiny_tokenizer()
    heads = max(hidden // 32, 1)
    if architecture == "qwen3_moe":
        settings = MIXTURE | {"moe_intermediate_size": hidden} | settings
    config = getattr(transformers, CONFIGS[architecture])(
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
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data *= MARGIN
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)
