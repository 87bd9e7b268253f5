"""From chat messages to token ids and back to turns: one implementation for SFT data and for rollouts.

Ids that a model sampled are never decoded and tokenised again: that can give other ids than were sampled, and then
log-probs and masks silently speak of tokens that nobody generated. A further turn appends ids to the ids before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

from rl_contracts.errors import ConfigError, DataError

Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and what the template knows besides (`tool_calls`, `reasoning_content`)."""

_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
)


class ChatTokenizer(Protocol):
    """What rendering needs of a Hugging Face tokenizer."""

    eos_token_id: int | None
    all_special_ids: list[int]
    apply_chat_template: Callable[..., Any]
    encode: Callable[..., list[int]]
    convert_ids_to_tokens: Callable[..., Any]


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        template_options: further variables of the template, for example `{"enable_thinking": False}`.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "expected a tokenizer with a chat template, found one without; "
                "take an instruction-tuned model's tokenizer or set `tokenizer.chat_template`"
            )
        self._tokenizer = cast(ChatTokenizer, tokenizer)
        self._options = dict(template_options or {})

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: the conversation, at least one message.
            tools: JSON schemas (or annotated functions) that the template shows to the model.
            add_generation_prompt: end with the opening of an assistant turn, for the model to continue.

        Raises:
            DataError: the template refuses the conversation.
        """
        rendered = self._apply(messages, tools, add_generation_prompt, tokenize=True, return_dict=False)
        # Without return_dict=False, transformers 5 answers a mapping; a wrapped tokenizer may do so regardless.
        ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
        return [int(token) for token in ids]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the template's end-of-turn token first, then the end-of-text token.

        Raises:
            ConfigError: neither exists, so that a model could never end its answer.
        """
        text = self._apply(_PROBE, None, False, tokenize=False)
        closing = self._tokenizer.encode(text.rpartition("answer")[2], add_special_tokens=False)
        special = self._special_ids()
        end_of_turn = next((token for token in closing if token in special), None)
        found = (end_of_turn, self._tokenizer.eos_token_id)
        stops = tuple(dict.fromkeys(token for token in found if token is not None))
        if not stops:
            raise ConfigError(
                "expected a chat template that closes the assistant's turn with a special token, or a tokenizer "
                "with an end-of-text token; found neither, so no answer could ever end. Set `tokenizer.eos_token`."
            )
        return stops

    def render_sft(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a finished conversation, and which of them the model has to generate.

        The mask is True on each assistant turn from the first token after the generation prompt up to and including
        the end-of-turn token; the line break that many templates put after it is theirs, not the model's.

        Returns:
            (ids, loss_mask), both of the conversation's length.

        Raises:
            DataError: no assistant message, text that contains an end-of-turn token, or a text whose first characters
                the tokenizer merges with the generation prompt.
            ConfigError: the template rewrites earlier turns, or does not close the assistant's turn.
        """
        ids = self.render(messages, tools, add_generation_prompt=False)
        mask = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            self._refuse_stop_tokens(message, index)
            start = len(self._prefix(messages, index, tools, True, ids))
            end = len(self._prefix(messages, index + 1, tools, False, ids))
            stop = self._first_stop(ids, start, end)
            if stop is None:
                raise ConfigError(
                    f"chat template: message {index} (assistant) does not end with one of the stop ids "
                    f"{self.stop_ids}; a model trained on it would never end its answer. Use a template that "
                    f"closes the assistant's turn."
                )
            mask[start : stop + 1] = [True] * (stop + 1 - start)
        if not any(mask):
            roles = [message["role"] for message in messages]
            raise DataError(f"expected an assistant message to learn from, found the roles {roles}")
        return ids, mask

    def append_turn(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """`ids` as they are, then `messages` and the opening of the next assistant turn.

        Args:
            ids: a prompt and the answer that was sampled for it. An answer that was cut off gets the end-of-turn
                token that it lacks; like everything else after `ids`, it is not generated.
            messages: what follows the answer: user or tool messages.
            tools: as in `render`; only some templates repeat them in later turns.

        Raises:
            ConfigError: the template does not close an assistant turn that another message follows.
            DataError: no messages, or the template refuses them.
        """
        if not messages:
            raise DataError("expected at least one message to append after the answer, found none")
        start = len(self.render(_PROBE[:1], tools))
        rendered = self.render([*_PROBE, *messages], tools)
        stop = self._first_stop(rendered, start, len(rendered))
        if stop is None:
            raise ConfigError(
                f"chat template: expected one of the stop ids {self.stop_ids} after an assistant turn that is "
                f"followed by another, found none; conversations of several turns need a template that closes them"
            )
        closed = bool(ids) and ids[-1] in self.stop_ids
        return [*ids, *rendered[stop + 1 if closed else stop :]]

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool, **options: Any) -> Any:
        from jinja2 import TemplateError

        roles = [message.get("role") for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=generate,
                **options,
                **self._options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses messages with the roles {roles}: {error}") from error

    def _special_ids(self) -> set[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        marked = {index for index, token in added.items() if getattr(token, "special", False)}
        return marked | set(self._tokenizer.all_special_ids)

    def _first_stop(self, ids: Sequence[int], start: int, end: int) -> int | None:
        return next((i for i in range(start, end) if ids[i] in self.stop_ids), None)

    def _refuse_stop_tokens(self, message: Message, index: int) -> None:
        content = message.get("content")
        for token in self._tokenizer.convert_ids_to_tokens(list(self.stop_ids)):
            if isinstance(content, str) and token in content:
                raise DataError(
                    f"message {index} (assistant) contains the end token {token!r} in its text; the model would stop "
                    f"there and never generate the rest. Remove it from the data: the template adds it."
                )

    def _prefix(
        self,
        messages: Sequence[Message],
        count: int,
        tools: Sequence[Any] | None,
        generate: bool,
        whole: Sequence[int],
    ) -> list[int]:
        """Ids of the first `count` messages, once it is sure that the ids of the whole begin with them."""
        if count == 0:
            raise DataError("expected a message before the first assistant message, found none")
        prefix = self.render(messages[:count], tools, generate)
        if list(whole[: len(prefix)]) == prefix:
            return prefix
        text = self._apply(messages[:count], tools, generate, tokenize=False)
        if self._apply(messages, tools, False, tokenize=False).startswith(text):
            raise DataError(
                f"message {count} ({messages[count]['role']}): the tokenizer merges the first characters of its "
                f"text with the end of what precedes it, so a rollout would never see these ids. Strip the text's "
                f"leading blanks."
            )
        raise ConfigError(
            f"chat template: the first {count} messages, rendered alone, do not begin the whole conversation, so "
            f"no mask can be right: the template rewrites earlier turns, for example by dropping their reasoning. "
            f"Make one row of each answer, or use a template that keeps turns as they were."
        )
