"""Convert chat messages to token ids and back, with one implementation for SFT data and for rollouts.

Sampled ids are never decoded and tokenized again. That could yield different ids, and log-probs and masks would then
silently describe tokens that the model did not generate. A new turn appends its ids to the existing ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from rl_contracts.chat.image_messages import has_images, images_in, is_image_part, without_images
from rl_contracts.chat.template_check import require_rendered
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.images import Image, open_images
from rl_contracts.models.directory import end_ids

__all__ = ["ChatRenderer", "Message", "tokenizer_of"]

SURROGATE = re.compile("[\ud800-\udfff]")
"""Pattern of a lone surrogate, which comes from a JSON escape such as `\\ud83d` or from a byte that is not UTF-8."""
Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and other keys that the template reads (`tool_calls`, `reasoning_content`)."""

_CACHED_TEXTS = 1024
"""Maximum number of texts with images whose token ids are kept."""
_COMPLETION = "sample-answer"
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "sample-question"},
    {"role": "assistant", "content": _COMPLETION},
)
"""Conversation whose assistant message can be located in the rendered text."""


class ChatRenderer:
    """Renderer of conversations with the chat template of a tokenizer.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template, or the processor of a vision-language model. If it was
            loaded from a directory, the end tokens in the directory's `generation_config.json` also end a turn.
        template_options: extra variables for the template, for example `{"enable_thinking": False}`.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        self._processor: Any = tokenizer if hasattr(tokenizer, "image_processor") else None
        tokenizer = tokenizer_of(tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "expected a tokenizer with a chat template, found one without; "
                "use the tokenizer of an instruction-tuned model, or set `tokenizer.chat_template` (in commands, set "
                "`model.chat_template=FILE`)"
            )
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._rendered_tools: Sequence[Any] | None = None
        """Tools of the last successful check in `renders_tools`, or None."""
        self._encoded: dict[tuple[str, tuple[tuple[int, int], ...]], list[int]] = {}
        """Token ids of texts with images, by text and sizes of the images: a processor needs milliseconds per image,
        and the number of its placeholders depends only on the size."""
        self._needs_content_parts = False
        """True if the template renders text only from a list of content parts, as some multi-modal models require.

        Such a template rejects a plain string, or renders the message without its text.
        """
        try:
            self._needs_content_parts = _COMPLETION not in self._apply(_PROBE, None, False, tokenize=False)
        except DataError:
            self._needs_content_parts = True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation. The processor replaces each image by its placeholders.

        Args:
            messages: the conversation, at least one message. See `rl_contracts.chat.image_messages` for images.
            tools: JSON schemas (or annotated functions) of the tools to list in the prompt.
            add_generation_prompt: whether to end with the opening of an assistant turn, for the model to continue.

        Raises:
            DataError: the template rejects the conversation, an image cannot be read, or a text has a placeholder.
        """
        images = images_in(messages)
        if images:
            return self.encode(self.text(messages, tools, add_generation_prompt), images=images)
        rendered = self._apply(messages, tools, add_generation_prompt, tokenize=True, return_dict=False)
        # Without return_dict=False, transformers 5 returns a mapping; a wrapped tokenizer may do so regardless.
        ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
        self.reject_placeholders(ids)
        return [int(token) for token in ids]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn.

        These are the end-of-turn token of the template, the end-of-text token of the tokenizer, and the end tokens in
        `generation_config.json`.

        Raises:
            ConfigError: there is no such token, so a completion could never end.
        """
        directory = getattr(self._tokenizer, "name_or_path", "")
        config_ids = [token for token in end_ids(directory) if token < len(self._tokenizer)] if directory else []
        candidates = (self._end_of_turn, self._tokenizer.eos_token_id, *config_ids)
        stop_ids = tuple(dict.fromkeys(token for token in candidates if token is not None))
        if not stop_ids:
            raise ConfigError(
                "a completion could never end: the chat template ends the assistant's turn without a special token, "
                "and the tokenizer has no end-of-text token. Set `eos_token` in the model's tokenizer_config.json."
            )
        return stop_ids

    @cached_property
    def _end_of_turn(self) -> int | None:
        """First special token that the template writes after the last assistant message, or None."""
        suffix_ids = self.encode(self._text_after_probe(_PROBE, None, False))
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if getattr(token, "special", False)}
        return next(
            (token for token in suffix_ids if token in special or token in self._tokenizer.all_special_ids), None
        )

    def render_sft(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a finished conversation, and the mask of the tokens that the model must generate.

        In each assistant turn, the mask is True from the first token after the generation prompt through the
        end-of-turn token. The line break that many templates write after the end-of-turn token is not included. A turn
        with `weight` 0 is not trained on.

        Returns:
            (ids, loss_mask), both with the length of the conversation.

        Raises:
            DataError: there is no assistant message to train on, a message contains an end-of-turn token, or the
                tokenizer merges the first characters of a message with the generation prompt.
            ConfigError: the template rewrites earlier turns, or does not close the assistant's turn.
        """
        ids = self.render(messages, tools, add_generation_prompt=False)
        mask = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            self._reject_stop_tokens(message, index)
            start = len(self._prompt_ids(messages, index, tools, ids))
            stop = self._end_position(messages, index, tools, ids, start)
            mask[start : stop + 1] = [True] * (stop + 1 - start)
        if not any(mask):
            roles = [message["role"] for message in messages]
            raise DataError(
                f"expected an assistant message to train on (with a weight other than 0), found the roles {roles}"
            )
        return ids, mask

    def append_turn(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Append messages and the opening of the next assistant turn to `ids`, which stay unchanged.

        Args:
            ids: prompt and the completion sampled for it. If the completion was truncated, the end-of-turn token is
                appended; like all tokens after `ids`, it does not count as generated.
            messages: user or tool messages that follow the completion.
            tools: tools as in `render`; only some templates repeat them in later turns.

        Raises:
            ConfigError: the template does not close an assistant turn that another message follows.
            DataError: `messages` is empty, or the template rejects it.
        """
        if not messages:
            raise DataError("expected at least one message to append after the completion, found none")
        suffix = self._text_after_probe([*_PROBE, *messages], tools, True)
        suffix_ids = self.text_after_completion(ids, suffix, images_in(messages))
        # If the suffix does not begin with a stop token, the first stop token in it closes a later turn.
        if suffix_ids is None:
            stop_tokens = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids))
            raise ConfigError(
                f"chat template: expected one of {stop_tokens} after an assistant message that another message "
                f"follows, found {suffix[:40]!r}; use a template that closes every assistant turn"
            )
        if not has_images(messages):
            self.reject_placeholders(suffix_ids)
        return [*ids, *suffix_ids]

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Return the rendered conversation as text; `render` returns its token ids."""
        text: str = self._apply(messages, tools, add_generation_prompt, tokenize=False)
        return text

    @property
    def reads_images(self) -> bool:
        """True if messages may have images."""
        return self._processor is not None

    def encode(self, text: str, begins: bool = False, images: Sequence[Image] = ()) -> list[int]:
        """Return the token ids of a text. Names of special tokens in it become special tokens.

        Args:
            text: text to encode.
            begins: whether the text begins a prompt, so that the tokenizer's beginning-of-text token is added.
            images: images of a rendered conversation. The processor replaces each by its placeholders.

        Raises:
            DataError: the text is not UTF-8, or the images do not fit the text.
        """
        if images:
            return self._encode_with_images(text, images)
        require_utf8(text)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        bos = [self._tokenizer.bos_token_id] if begins and adds_bos(self._tokenizer) else []
        return ids if ids[:1] == bos else [*bos, *ids]

    def _encode_with_images(self, text: str, images: Sequence[Image]) -> list[int]:
        """Return the token ids of a text with one placeholder per image, each replaced by those of its features.

        Raises:
            DataError: there is no processor, it rejects an image, or the number of placeholders in the text differs
                from that of images.
        """
        if self._processor is None:
            raise DataError(
                f"expected messages of text only, found {len(images)} images; use a vision-language model, whose "
                "directory has a processor"
            )
        require_utf8(text)
        marks = sum(map(text.count, {self._image_mark, *self._tokenizer.convert_ids_to_tokens([*self._placeholders])}))
        if marks != len(images):
            raise DataError(
                f"expected {len(images)} marks {self._image_mark!r} in the rendered conversation, one per image, "
                f"found {marks}; remove the placeholder from the texts of the messages"
            )
        key = text, tuple((image.width, image.height) for image in images)
        ids = self._encoded.get(key)
        if ids is None:
            ids = self._run_processor(text, images)
            if len(self._encoded) >= _CACHED_TEXTS:
                self._encoded.clear()
            self._encoded[key] = ids
        return [*ids]

    def _run_processor(self, text: str, images: Sequence[Image]) -> list[int]:
        pictures = open_images(images)
        try:
            # nested, because some processors read a flat list as one image for each of several texts
            output = self._processor(text=[text], images=[pictures], add_special_tokens=False)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise DataError(f"images of {sizes} pixels: the processor of the model rejects them: {error}") from error
        return [int(token) for token in output["input_ids"][0]]

    @cached_property
    def _placeholders(self) -> frozenset[int]:
        """Token that a vision-language model replaces by image features; empty without a processor."""
        # the processor lists it before the tokens around an image, which texts may contain
        return frozenset() if self._processor is None else frozenset(self._processor.image_token_ids[:1])

    def reject_placeholders(self, ids: Sequence[int]) -> None:
        """Reject a completion or text with a placeholder of an image, because it has no image.

        Raises:
            DataError: a token is such a placeholder.
        """
        if self.count_placeholders(ids):
            raise DataError(
                "a completion or text contains a placeholder of an image, which has no image; remove it from the text"
            )

    def count_placeholders(self, ids: Sequence[int]) -> int:
        """Return the number of placeholders of images in token ids."""
        return sum(token in self._placeholders for token in ids) if self._placeholders else 0

    @cached_property
    def _image_mark(self) -> str:
        """Text that the template writes for one image."""
        without, with_image = (
            self.text([{"role": "user", "content": [*image, {"type": "text", "text": _COMPLETION}]}])
            for image in ((), ({"type": "image"},))
        )
        mark: str = self._processor.image_token
        if mark in without or mark not in with_image:
            raise ConfigError(
                "chat template: expected the processor's placeholder for an image in the rendered conversation, found "
                "none; use a template that renders images (in commands, set `model.chat_template=FILE`)"
            )
        return mark

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids for display, with the repeated placeholders of an image written once."""
        ids = list(ids)
        if self._placeholders:
            repeated = (token in self._placeholders and token == last for last, token in pairwise([None, *ids]))
            ids = [token for token, is_repeated in zip(ids, repeated, strict=True) if not is_repeated]
        text: str = self._tokenizer.decode(ids)
        return text

    def decode_completion(self, ids: Sequence[int]) -> str:
        """Return the text of a completion without its stop token."""
        return completion_text(self._tokenizer, ids, self.stop_ids)

    def text_after_completion(
        self, ids: Sequence[int], following: str, images: Sequence[Image] = ()
    ) -> list[int] | None:
        """Return the ids to append after a completion: the end of the turn if it is missing, then the following text.

        Args:
            ids: the completion, or a sequence that ends with it. It has no end of turn if it was truncated.
            following: text of the conversation after the completion.
            images: images of this text.

        Returns:
            the ids, or None if `following` does not begin with the end of a turn.
        """
        stop_tokens = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids))
        if not following.lstrip().startswith(tuple(stop_tokens)):
            return None
        suffix_ids = self.encode(following, images=images)
        stop_position = next(i for i, token in enumerate(suffix_ids) if token in self.stop_ids)
        last = ids[-1] if len(ids) > 0 else None
        # In templates without an end-of-turn token, the stop token opens the next turn. It is then omitted only if the
        # completion already ends with this same token.
        is_closed = last in self.stop_ids and (self._end_of_turn is not None or last == suffix_ids[stop_position])
        return suffix_ids[stop_position + 1 if is_closed else stop_position :]

    @cached_property
    def generation_prompt(self) -> str:
        """Text of the generation prompt; empty if the template does not render it as a suffix of the conversation."""
        without_prompt, with_prompt = (self.text(_PROBE[:1], None, generate) for generate in (False, True))
        return with_prompt.removeprefix(without_prompt) if with_prompt.startswith(without_prompt) else ""

    @cached_property
    def end_of_turn(self) -> str:
        """Text that the template writes after the last assistant message."""
        return self._text_after_probe(_PROBE, None, False)

    def renders_tools(self, tools: Sequence[Any]) -> bool:
        """Return whether the template renders tools."""
        if (
            tools == self._rendered_tools
        ):  # the check costs as much as rendering a prompt, and callers make it for each prompt
            return True
        is_rendered = self.text(_PROBE[:1], tools) != self.text(_PROBE[:1])
        self._rendered_tools = tools if is_rendered else self._rendered_tools
        return is_rendered

    def require_rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> None:
        """Reject a conversation that the template renders incompletely; see `rl_contracts.chat.template_check`.

        Raises:
            DataError: the template renders no tools, or omits a tool or a text of a message.
        """
        if tools and not self.renders_tools(tools):
            raise DataError(
                "the conversation has tools, but the chat template renders none; remove the tools, or use another "
                "template (in commands, set `model.chat_template=FILE`)"
            )
        require_rendered(messages, tools, self.text(messages, tools, add_generation_prompt))

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool, **options: Any) -> Any:
        from jinja2 import TemplateError, TemplateSyntaxError

        roles = [message.get("role") for message in messages]
        template_messages = [self._to_template_message(message) for message in messages]
        options |= {"tools": None if tools is None else list(tools), "add_generation_prompt": generate, **self._options}
        try:
            try:
                return self._tokenizer.apply_chat_template(template_messages, **options)
            except TypeError:  # DeepSeek's template concatenates the arguments of calls as text
                if not any(message.get("tool_calls") for message in messages):
                    raise
                return self._tokenizer.apply_chat_template([*map(_with_text_arguments, template_messages)], **options)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not a valid Jinja template (line {error.lineno}): "
                f"{str(error.message).rstrip('.')}. Fix it, or use another template (in commands, set "
                "`model.chat_template=FILE`)."
            ) from error
        except (TemplateError, TypeError, ValueError) as error:
            require_utf8(json.dumps([messages, tools], ensure_ascii=False, default=str))
            raise DataError(
                f"the chat template rejects messages with the roles {roles}: {str(error).rstrip('.')}. Change the "
                "messages, or use another template (in commands, set `model.chat_template=FILE`)."
            ) from error

    def _to_template_message(self, message: Message) -> dict[str, Any]:
        message = without_images(message)
        content = message.get("content")
        if self._needs_content_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        if not self._needs_content_parts and isinstance(content, list) and not any(map(is_image_part, content)):
            texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if all(isinstance(text, str) for text in texts):
                return {**message, "content": "".join(texts)}
        return dict(message)

    def _text_after_probe(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool) -> str:
        """Return the rendered text after the assistant message of `_PROBE`, with which `messages` begin."""
        _, separator, after = self.text(messages, tools, generate).partition(_COMPLETION)
        if not separator:
            raise ConfigError(
                "chat template: expected the text of an assistant message in the rendered conversation, found none; "
                "use another template (in commands, set `model.chat_template=FILE`)"
            )
        return after

    def _reject_stop_tokens(self, message: Message, index: int) -> None:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or ()]
        for token in self._tokenizer.convert_ids_to_tokens(list(self.stop_ids)):
            if any(token in part for part in parts):
                raise DataError(
                    f"message {index} (assistant) contains the end token {token!r} in its text; the model would "
                    f"stop there and never generate the rest. Remove it from the data: the template adds it."
                )

    def _prompt_ids(
        self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None, conversation_ids: Sequence[int]
    ) -> list[int]:
        """Return the prompt ids of a rollout for the assistant message `index`, a prefix of `conversation_ids`."""
        if index == 0:
            raise DataError("expected a message before the first assistant message, found none")
        prompt = self.render(messages[:index], tools)
        if list(conversation_ids[: len(prompt)]) == prompt:
            return prompt
        text = self.text(messages, tools, False)
        if text.startswith(self.text(messages[:index], tools)):
            if images_in(messages[:index]) != images_in(messages):
                raise DataError(
                    f"message {index} (assistant): the processor encodes the images before it differently if other "
                    "images follow; use one example per completion"
                )
            raise DataError(
                f"message {index} (assistant): the tokenizer merges the start of its text with the end of the "
                f"generation prompt, so no rollout has these ids. Strip whitespace from the start of the text or the "
                f"end of the generation prompt."
            )
        if text.startswith(self.text(messages[:index], tools, False)):
            raise ConfigError(
                f"chat template: message {index} (assistant) does not begin with the generation prompt, so a rollout "
                f"would start from different tokens. Add the missing text to the message (often an opened reasoning "
                f"block), or change template_options."
            )
        raise ConfigError(_rewritten_message(index))

    def _end_position(
        self,
        messages: Sequence[Message],
        index: int,
        tools: Sequence[Any] | None,
        conversation_ids: Sequence[int],
        start: int,
    ) -> int:
        """Return the position of the token that ends the assistant message `index`, whose text begins at `start`."""
        ids = self.render(messages[: index + 1], tools, add_generation_prompt=False)
        stop = next((i for i in range(start, len(ids)) if ids[i] in self.stop_ids), None)
        if stop is None:
            raise ConfigError(
                f"chat template: message {index} (assistant) does not end with one of the stop ids "
                f"{self.stop_ids}; a model trained on it would never stop. Use a template that closes the "
                f"assistant's turn."
            )
        # Tokens after the end of the turn may differ: some templates write another end token after the last message.
        if list(conversation_ids[: stop + 1]) != ids[: stop + 1]:
            raise ConfigError(_rewritten_message(index + 1))
        return stop


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor, with the processor's chat template if it has none, or a tokenizer itself."""
    if not hasattr(processor, "image_processor"):
        return processor
    tokenizer = processor.tokenizer
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    return tokenizer


def require_utf8(text: str) -> None:
    """Reject a text with a lone surrogate, which tokenizers cannot encode.

    Raises:
        DataError: the text has a lone surrogate. The message quotes the characters before it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"expected valid UTF-8 text, found a lone surrogate after "
            f"{text[max(error.start - 20, 0) : error.start]!r}; remove it, or replace it "
            "(in commands, set `rollout.invalid_text=replace`)"
        ) from None


def replace_invalid_text(value: Any) -> Any:
    """Return a JSON value with each lone surrogate in its texts replaced by U+FFFD."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {replace_invalid_text(key): replace_invalid_text(inner) for key, inner in value.items()}
    return [replace_invalid_text(inner) for inner in value] if isinstance(value, list) else value


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer adds its beginning-of-text token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def completion_text(tokenizer: Any, ids: Sequence[int], stop_ids: Collection[int]) -> str:
    """Return the text of a completion, with special tokens written as their names, without its final stop token."""
    has_stop_token = len(ids) > 0 and ids[-1] in stop_ids
    text: str = tokenizer.decode(
        list(ids[:-1] if has_stop_token else ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON text."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls") or ()
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _rewritten_message(count: int) -> str:
    return (
        f"chat template: the first {count} messages, rendered alone, are not a prefix of the whole conversation: the "
        f"template rewrites earlier turns, often by dropping reasoning. Use one example per completion, or a template "
        f"that keeps earlier turns unchanged."
    )
