"""Tokenizers of the embedded models, with one chat template.

<|user|>question<|assistant|>answer<|end|>
<|system|>calculator<|user|>question<|assistant|><tool_call>...</tool_call><|end|><|tool|>10<|assistant|>answer<|end|>

The template lists the names of the tools. Tool calls have the Hermes format. A processor replaces the mark of an image
by its placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_contracts.errors import DataError
from rl_datasets.word_problems import ITEMS, MAX_AMOUNT, MAX_LEVEL, NAMES, OPERATION_OF, Problem, Step

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Further special tokens of a vision-language model, as Qwen2.5-VL names them."""
SPECIAL_TOKENS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]

CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|system|>' + (tools | map(attribute='function.name') | join(', ')) }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] or [] -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    """{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}"""
    "{{ '}</tool_call>' }}"
    "{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# A space belongs to the following word, but a space before a number belongs to the preceding word. So a number is one
# token, the same in questions and answers, and the joined pieces are the text. A line break belongs to the marker that
# follows it.
_PIECES = (
    r"\n?#### |\n<<|<<|>>|</?tool_call>|\{\"name\": \"|\", \"arguments\": \{\"expression\": \"|\"\}\}"
    r"|\d+| ?[A-Za-z]+(?: (?=\d))?|[\s\S]"
)

_SINGLE_TOKEN_NUMBERS = 100


def word_problem_tokenizer(max_length: int, more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build the tokenizer for the generated word problems, with one token per word and per number up to 99.

    Other words become the unknown token. Every generated problem and answer round-trips through its token ids.

    Args:
        max_length: maximum sequence length in tokens.
        more: further texts whose words the vocabulary includes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    pieces = {piece for text in (*_texts_with_every_word(), *more) for piece, _ in split.pre_tokenize_str(text)}
    numbers = [str(n) for n in range(_SINGLE_TOKEN_NUMBERS)]
    words = [*SPECIAL_TOKENS, UNKNOWN, *numbers, *sorted(pieces - set(numbers))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return _with_chat_template(tokenizer, max_length, unk_token=UNKNOWN)


def trained_tokenizer(
    texts: Sequence[str], vocab_size: int, max_length: int, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`. Any text round-trips through its token ids.

    Args:
        texts: training texts.
        vocab_size: maximum vocabulary size.
        max_length: maximum sequence length in tokens.
        special: further special tokens.

    Raises:
        DataError: all texts are empty, or there are none.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if not any(texts):
        raise DataError("cannot train a tokenizer: expected non-empty texts, found none. Check the training split.")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_chat_template(tokenizer, max_length, special)


def _with_chat_template(
    tokenizer: Tokenizer, max_length: int, more: Sequence[str] = (), **special: str
) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[*SPECIAL_TOKENS[2:], *more],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        **special,
    )


def _texts_with_every_word() -> list[str]:
    """Return questions and answers that contain every name, item and verb in every position where it can occur."""
    texts = []
    for level in range(1, MAX_LEVEL + 1):
        for verb in OPERATION_OF:
            for name, item in zip(NAMES, ITEMS, strict=True):
                problem = Problem(name, item, MAX_AMOUNT * level, (Step(verb, 1),) * level)
                texts += [problem.question, problem.worked_answer()]
    return texts
