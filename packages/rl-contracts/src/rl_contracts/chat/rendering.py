"""From chat messages to token ids and back to turns: one implementation for SFT data and for rollouts.

Ids that a model sampled are never decoded and tokenised again: that can give other ids than were sampled, and then
log-probs and masks silently speak of tokens that nobody generated. A further turn appends ids to the ids before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from rl_contracts.chat.template_check import require_rendered
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.models.directory import end_ids

__all__ = ["ChatRenderer", "Message"]

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: from a JSON escape such as `\\ud83d`, or a byte that is not UTF-8."""
Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and what the template knows besides (`tool_calls`, `reasoning_content`)."""

_ANSWER = "sample-answer"
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "sample-question"},
    {"role": "assistant", "content": _ANSWER},
)
"""A conversation whose answer can be found again in what a template makes of it."""


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template. If it was loaded from a directory, the end tokens of
            the `generation_config.json` there end a turn too.
        template_options: further variables of the template, for example `{"enable_thinking": False}`.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "expected a tokenizer with a chat template, found one without; "
                "take an instruction-tuned model's tokenizer or set `tokenizer.chat_template` (commands: "
                "`model.chat_template=FILE`)"
            )
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._shown: Sequence[Any] | None = None
        """Tools of which it is known that the template shows them."""
        self._parts = False
        """Whether the template shows text only as a list of parts, as those of multi-modal models may. Given plain text
        it refuses it, or renders the conversation without what was said in it."""
        try:
            self._parts = _ANSWER not in self._apply(_PROBE, None, False, tokenize=False)
        except DataError:
            self._parts = True

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
        """Ids that end an assistant turn: the template's end-of-turn token, the end-of-text token, and those of the
        model's `generation_config.json`.

        Raises:
            ConfigError: there is none, so that a model could never end its answer.
        """
        directory = getattr(self._tokenizer, "name_or_path", "")
        known = [token for token in end_ids(directory) if token < len(self._tokenizer)] if directory else []
        found = (self._end_of_turn, self._tokenizer.eos_token_id, *known)
        stops = tuple(dict.fromkeys(token for token in found if token is not None))
        if not stops:
            raise ConfigError(
                "expected a chat template that closes the assistant's turn with a special token, or a tokenizer "
                "with an end-of-text token; found neither, so no answer could ever end. Set `tokenizer.eos_token`."
            )
        return stops

    @cached_property
    def _end_of_turn(self) -> int | None:
        """First special token that the template puts after the last answer; None if it puts none there."""
        closing = self.encode(self._after_answer(_PROBE, None, False))
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if getattr(token, "special", False)}
        return next((token for token in closing if token in special or token in self._tokenizer.all_special_ids), None)

    def render_sft(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a finished conversation, and which of them the model has to generate.

        The mask is True on each assistant turn from the first token after the generation prompt up to and including
        the end-of-turn token; the line break that many templates put after it is theirs, not the model's. A turn with
        `weight` 0 is not learned.

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
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            self._refuse_stop_tokens(message, index)
            start = len(self._prompt_of(messages, index, tools, ids))
            stop = self._end_of(messages, index, tools, ids, start)
            mask[start : stop + 1] = [True] * (stop + 1 - start)
        if not any(mask):
            roles = [message["role"] for message in messages]
            raise DataError(f"expected an assistant message to learn from (weight 1), found the roles {roles}")
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
        following = self._after_answer([*_PROBE, *messages], tools, True)
        added = self.text_after_completion(ids, following)
        # Anything but the end of the turn here means that the first stop token closes some later turn.
        if added is None:
            ends = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids))
            raise ConfigError(
                f"chat template: expected one of {ends} right after an answer that another message follows, found "
                f"{following[:40]!r}; conversations of several turns need a template that closes each turn alike"
            )
        return [*ids, *added]

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """What `render` encodes."""
        text: str = self._apply(messages, tools, add_generation_prompt, tokenize=False)
        return text

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """Return the token ids of a text, special tokens by their names in it.

        Args:
            begins: whether the text begins a prompt. Then it gets the beginning-of-text token that the tokenizer adds.

        Raises:
            DataError: the text is not UTF-8.
        """
        require_utf8(text)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        bos = [self._tokenizer.bos_token_id] if begins and adds_bos(self._tokenizer) else []
        return ids if ids[:1] == bos else [*bos, *ids]

    def decode_completion(self, ids: Sequence[int]) -> str:
        """Text of an answer, without the token that ended it."""
        return completion_text(self._tokenizer, ids, self.stop_ids)

    def text_after_completion(self, ids: Sequence[int], following: str) -> list[int] | None:
        """Ids of what a template puts after an answer, the end of the turn first.

        Args:
            ids: the answer, or what ends with it; where it was cut off, the end of the turn is added.
            following: text of the conversation after the answer.

        Returns:
            None where the text does not begin with the end of a turn.
        """
        ends = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids))
        if not following.lstrip().startswith(tuple(ends)):
            return None
        added = self.encode(following)
        stop = next(i for i, token in enumerate(added) if token in self.stop_ids)
        last = ids[-1] if len(ids) > 0 else None
        # Where no token closes a turn, the stop token here opens the next one, and only its double is left out.
        closed = last in self.stop_ids and (self._end_of_turn is not None or last == added[stop])
        return added[stop + 1 if closed else stop :]

    @cached_property
    def generation_prompt(self) -> str:
        """Text of the generation prompt; empty where a template opens the assistant's turn with what is before it."""
        asked, opened = (self.text(_PROBE[:1], None, generate) for generate in (False, True))
        return opened.removeprefix(asked) if opened.startswith(asked) else ""

    @cached_property
    def end_of_turn(self) -> str:
        """Text that ends a conversation after the text of its last answer."""
        return self._after_answer(_PROBE, None, False)

    def renders_tools(self, tools: Sequence[Any]) -> bool:
        """Whether the template shows tools to the model."""
        if tools == self._shown:  # the question costs as much as a prompt, and is asked for each
            return True
        shown = self.text(_PROBE[:1], tools) != self.text(_PROBE[:1])
        self._shown = tools if shown else self._shown
        return shown

    def require_rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> None:
        """Reject a conversation of which the template does not show everything; see `rl_contracts.chat.template_check`.

        Raises:
            DataError: names the message or the tool, and what is missing.
        """
        if tools and not self.renders_tools(tools):
            raise DataError(
                "expected a chat template that shows tools, because the conversation has some, found one that shows "
                "none; leave the tools out, or give another template (commands: `model.chat_template=FILE`)"
            )
        require_rendered(messages, tools, self.text(messages, tools, add_generation_prompt))

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool, **options: Any) -> Any:
        from jinja2 import TemplateError, TemplateSyntaxError

        roles = [message.get("role") for message in messages]
        given = [self._message(message) for message in messages]
        options |= {"tools": None if tools is None else list(tools), "add_generation_prompt": generate, **self._options}
        try:
            try:
                return self._tokenizer.apply_chat_template(given, **options)
            except TypeError:  # DeepSeek's template joins the arguments of calls to its text
                if not any(message.get("tool_calls") for message in messages):
                    raise
                return self._tokenizer.apply_chat_template([*map(_with_text_arguments, given)], **options)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is no Jinja template (line {error.lineno}): {str(error.message).rstrip('.')}. Mend "
                "it, or give another template (commands: `model.chat_template=FILE`)."
            ) from error
        except (TemplateError, TypeError, ValueError) as error:
            require_utf8(json.dumps([messages, tools], ensure_ascii=False, default=str))
            raise DataError(
                f"the chat template refuses messages with the roles {roles}: {str(error).rstrip('.')}. Change the "
                "messages, or give another template (commands: `model.chat_template=FILE`)."
            ) from error

    def _message(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if self._parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        if not self._parts and isinstance(content, list):
            texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if all(isinstance(text, str) for text in texts):
                return {**message, "content": "".join(texts)}
        return dict(message)

    def _after_answer(self, messages: Sequence[Message], tools: Sequence[Any] | None, generate: bool) -> str:
        """What the template puts after the answer of the probe, with which `messages` begin."""
        _, found, after = self.text(messages, tools, generate).partition(_ANSWER)
        if not found:
            raise ConfigError("chat template: expected it to show the text of an assistant message, found none")
        return after

    def _refuse_stop_tokens(self, message: Message, index: int) -> None:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or ()]
        for token in self._tokenizer.convert_ids_to_tokens(list(self.stop_ids)):
            if any(token in part for part in parts):
                raise DataError(
                    f"message {index} (assistant) contains the end token {token!r} in its text; the model would "
                    f"stop there and never generate the rest. Remove it from the data: the template adds it."
                )

    def _prompt_of(
        self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None, whole: Sequence[int]
    ) -> list[int]:
        """Ids of what a rollout sees before the assistant message `index`; the whole does begin with them."""
        if index == 0:
            raise DataError("expected a message before the first assistant message, found none")
        prompt = self.render(messages[:index], tools)
        if list(whole[: len(prompt)]) == prompt:
            return prompt
        text = self.text(messages, tools, False)
        if text.startswith(self.text(messages[:index], tools)):
            raise DataError(
                f"message {index} (assistant): the tokenizer merges the first characters of its text with the end "
                f"of the generation prompt, so a rollout would never see these ids. Strip the text's leading blanks, "
                f"or let the template's prompt end without any."
            )
        if text.startswith(self.text(messages[:index], tools, False)):
            raise ConfigError(
                f"chat template: message {index} (assistant) does not begin with the generation prompt, so a rollout "
                f"would start from other tokens than this row teaches. Give the message what the prompt opens "
                f"(reasoning, say), or set template_options so that both agree."
            )
        raise ConfigError(_rewritten(index))

    def _end_of(
        self,
        messages: Sequence[Message],
        index: int,
        tools: Sequence[Any] | None,
        whole: Sequence[int],
        start: int,
    ) -> int:
        """Position of the token that ends the assistant message `index`, whose answer begins at `start`."""
        ids = self.render(messages[: index + 1], tools, add_generation_prompt=False)
        stop = next((i for i in range(start, len(ids)) if ids[i] in self.stop_ids), None)
        if stop is None:
            raise ConfigError(
                f"chat template: message {index} (assistant) does not end with one of the stop ids "
                f"{self.stop_ids}; a model trained on it would never end its answer. Use a template that "
                f"closes the assistant's turn."
            )
        # What follows the end of the turn may differ: some templates close a whole conversation once more.
        if list(whole[: stop + 1]) != ids[: stop + 1]:
            raise ConfigError(_rewritten(index + 1))
        return stop


def require_utf8(text: str) -> None:
    """Reject a text with half a character (a lone surrogate), which no tokenizer reads.

    Raises:
        DataError: names the characters before it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"expected text that is UTF-8, found half a character (a lone surrogate) after "
            f"{text[max(error.start - 20, 0) : error.start]!r}; remove it, or replace it "
            "(commands: `rollout.invalid_text=replace`)"
        ) from None


def replace_invalid_text(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of each half character (lone surrogate) of its texts."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {replace_invalid_text(key): replace_invalid_text(inner) for key, inner in value.items()}
    return [replace_invalid_text(inner) for inner in value] if isinstance(value, list) else value


def adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer puts its beginning-of-text token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def completion_text(tokenizer: Any, ids: Sequence[int], stop_ids: Collection[int]) -> str:
    """Text of an answer, special tokens by their names, without the token of `stop_ids` that ended it."""
    ended = len(ids) > 0 and ids[-1] in stop_ids
    text: str = tokenizer.decode(
        list(ids[:-1] if ended else ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls") or ()
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _rewritten(count: int) -> str:
    return (
        f"chat template: the first {count} messages, rendered alone, do not begin the whole conversation, so no mask "
        f"can be right: the template rewrites earlier turns, for example by dropping their reasoning. Make one row of "
        f"each answer, or use a template that keeps turns as they were."
    )
