"""Conversations as trees of sampled completions, with exact token ids over any number of turns.

An agent sends messages and a server samples tokens. A call may continue an earlier completion. Its prompt then consists
of the tokens of that completion's prompt, the sampled tokens, and the encoded text of the new messages. Sampled tokens
are never encoded again. A call continues a completion under two conditions:

- The call repeats the messages of the earlier call and its completion, and then adds messages. Agents rarely send
  messages back unchanged, so some differences are ignored: omitted reasoning, surrounding whitespace, the order of
  arguments, and ids of tool calls.
- The chat template renders the repeated messages as before. Some templates drop the reasoning of earlier turns, move
  the tools, or omit tool calls. The call then continues an older completion that is rendered as before, or starts a new
  tree. The rewritten text becomes part of the call's prompt and is not trained.

Every call therefore gets exactly the prompt that the template renders. Retries, parallel calls, sub-agents and
rewritten histories are branches. `Conversation.trajectories` builds trajectories from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.image_messages import images_in, is_image_part, without_images
from rl_contracts.errors import DataError
from rl_contracts.reward import components_of

if TYPE_CHECKING:
    import numpy as np

    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.chat.rendering import ChatRenderer, Message
    from rl_contracts.data import ModelResponse
    from rl_contracts.endpoint import Credit, SequencesPer
    from rl_contracts.images import Image

_EMPTY_KEY = b""
_NOT_COMPUTED = (0, b"")


class PromptTooLongError(DataError):
    """Error for a prompt whose text has more characters than its caller allows."""


@dataclass(eq=False, slots=True)
class Turn:
    """One sampled completion with its new prompt tokens. Arrays hold only the tokens of this turn."""

    parent: Turn | None
    """Turn that this one continues, or None."""
    prompt: np.ndarray
    """int64, prompt tokens after the parent's completion, or the whole prompt without a parent."""
    output: np.ndarray
    """int64, the sampled tokens."""
    logprobs: np.ndarray
    """float32, log-probs of the sampled tokens."""
    versions: np.ndarray
    """int32, versions of the sampled tokens."""
    message: Message
    """Message that the agent receives for the completion."""
    temperature: float
    """Sampling temperature."""
    truncated: bool
    """True if a length limit ended the completion."""
    new_messages: Sequence[Message] = ()
    """Messages after the parent's completion."""
    is_trained: bool = True
    """True if the completion was sampled from the unconstrained policy. Otherwise it is context and is not trained."""
    reward: float = 0.0
    """Reward of this turn, in addition to the reward of the episode."""
    children: int = 0
    """Number of turns that continue this one."""
    tools: Sequence[Any] | None = None
    """Tools listed in the prompt, or None."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, those of earlier turns included."""
    prompt_prefix: tuple[int, bytes] | None = None
    """Length and digest of the prompt's text, without the generation prompt. None if no call with messages can continue
    this turn."""
    rendered_prefix: tuple[int, bytes] | None = _NOT_COMPUTED
    """Length and digest of the conversation up to and including this completion, as the template renders it, without
    the end-of-turn token. None if the template cannot render the completion in full."""

    def path(self) -> list[Turn]:
        """Return the turns from the first to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a call, and its position in a conversation."""

    ids: list[int]
    """All tokens of the prompt."""
    added: int
    """Number of tokens after the parent's completion."""
    parent: Turn | None = None
    """Turn that the call continues, or None."""
    text: str = ""
    """Text rendered by the chat template; empty for a prompt without messages."""
    messages: Sequence[Message] = ()
    """Messages of the call, with the original message of each completion instead of the agent's copy."""
    tools: Sequence[Any] | None = None
    """Tools of the call, or None."""
    images: tuple[Image, ...] = ()
    """Images of the messages."""
    key: bytes = _EMPTY_KEY
    """Digest of the messages. For a prompt without messages: its text or tokens as bytes."""

    @property
    def new_messages(self) -> Sequence[Message]:
        """Messages after the parent's completion."""
        earlier = sum(len(turn.new_messages) + 1 for turn in self.parent.path()) if self.parent else 0
        return self.messages[earlier:]


@dataclass(slots=True)
class Conversation:
    """All calls of an episode.

    Args:
        renderer: chat renderer of the sampled model.
    """

    renderer: ChatRenderer
    turns: list[Turn] = field(default_factory=list)
    """Turns in the order of their completion."""
    _by_key: dict[bytes, list[Turn]] = field(default_factory=dict)
    """Turns by the digest of the conversation up to and including their completion."""
    _lengths: set[int] = field(default_factory=set)
    """Lengths in bytes of the indexed conversations without messages."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, max_characters: float = float("inf")
    ) -> Prompt:
        """Return the prompt of a call. The call continues the latest completion that it can, or starts a new tree.

        Args:
            messages: messages of the call, at least one. See `rl_contracts.chat.image_messages` for images.
            tools: tools to list in the prompt.
            max_characters: maximum number of characters of the rendered text. A longer text is not tokenized.

        Raises:
            DataError: there are no messages, the template rejects them, or an image does not fit the text.
            PromptTooLongError: the text has more than `max_characters` characters.
        """
        if not messages:
            raise DataError("expected at least one message, found none")
        originals, candidates, key = [], [], _EMPTY_KEY
        for message in messages:
            key = _extend_key(key, message)
            turn = _matching_turn(self._by_key.get(key, ()), message)
            if turn is not None:
                candidates.append(turn)
            originals.append(message if turn is None else turn.message)
        text = self.renderer.text(originals, tools)
        if len(text) > max_characters:
            raise PromptTooLongError(f"{len(text)} characters; at most {max_characters} are allowed")
        images = images_in(originals)
        for turn in reversed(candidates):
            end = self._completion_end(turn, text)
            if end is None:
                continue
            added = self._added_ids(turn, text, end, images)
            if added is not None:
                return Prompt([*token_ids_until(turn), *added], len(added), turn, text, originals, tools, images, key)
        ids = self._encode(text, images)
        return Prompt(ids, len(ids), None, text, originals, tools, images, key)

    def _encode(self, text: str, images: Sequence[Image]) -> list[int]:
        ids = self.renderer.encode(text, images=images)
        if not images:
            self.renderer.reject_placeholders(ids)
        return ids

    def _added_ids(self, turn: Turn, text: str, end: int, images: tuple[Image, ...]) -> list[int] | None:
        """Return the ids after a turn's completion, which ends at a position of the rendered conversation `text`.

        Return None if the text there does not end the turn, or the processor writes other placeholders for the images
        of earlier turns now that there are more images.
        """
        new_images = images[len(turn.images) :]
        added = self.renderer.text_after_completion(turn.output[-1:].tolist(), text[end:], new_images)
        if added is None or not new_images:
            self.renderer.reject_placeholders(added or ())
            return added
        if turn.images:
            count = self.renderer.count_placeholders
            earlier = sum(count(each.prompt.tolist()) for each in turn.path())
            if earlier + count(added) != count(self._encode(text, images)):
                return None
        return added

    def completion(self, prompt: str | Sequence[int]) -> Prompt:
        """Return the prompt of a call without messages.

        The call continues the turn whose prompt and completion are the longest prefix of `prompt`. A text cannot
        continue a completion that ends with a stop token. If no turn matches, a text prompt begins with the
        beginning-of-text token, if the tokenizer adds one.

        Args:
            prompt: text or tokens of the prompt.

        Raises:
            DataError: the text is not UTF-8, or the prompt has a placeholder of an image.
        """
        import numpy as np

        from rl_contracts.chat.rendering import require_utf8

        if isinstance(prompt, str):
            require_utf8(prompt)
        content = prompt.encode() if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int64).tobytes()
        prefix_hash, hashed_length, parent, length = blake2b(digest_size=16), 0, None, 0
        for end in sorted(self._lengths):
            if end >= len(content):
                break
            prefix_hash.update(content[hashed_length:end])
            hashed_length = end
            if turns := self._by_key.get(prefix_hash.digest()):
                parent, length = turns[-1], end
        rest = content[length:]
        if isinstance(prompt, str):
            added = self.renderer.encode(rest.decode(), begins=parent is None)
        else:
            added = np.frombuffer(rest, np.int64).tolist()
        self.renderer.reject_placeholders(added)
        return Prompt([*(token_ids_until(parent) if parent else ()), *added], len(added), parent, key=content)

    def add(
        self, prompt: Prompt, response: ModelResponse, message: Message, temperature: float, learn: bool = True
    ) -> Turn:
        """Add the completion of a call, and return its turn.

        Args:
            prompt: result of `prompt` or `completion`.
            response: the completion sampled for `prompt.ids`.
            message: message that the agent receives: `role`, `content`, and if present `reasoning_content` and
                `tool_calls`. Arguments of calls are objects, not JSON text.
            temperature: sampling temperature.
            learn: whether the completion was sampled from the policy without constraints such as a schema.

        Raises:
            DataError: the response belongs to another prompt, has no tokens, lacks log-probs or versions, or has a
                placeholder of an image.
        """
        import numpy as np

        count = len(response.output_ids)
        if list(response.input_ids) != prompt.ids or not count == len(response.logprobs) == len(response.versions) > 0:
            raise DataError(
                f"completion of {response.server or 'a server'}: expected tokens with log-probs and versions for the "
                f"prompt of {len(prompt.ids)} tokens; found {count} tokens, {len(response.logprobs)} log-probs and "
                f"{len(response.versions)} versions for a prompt of {len(response.input_ids)} tokens."
            )
        self.renderer.reject_placeholders(response.output_ids)
        turn = Turn(
            prompt.parent,
            np.asarray(prompt.ids[len(prompt.ids) - prompt.added :], dtype=np.int64),
            np.asarray(response.output_ids, dtype=np.int64),
            np.asarray(response.logprobs, dtype=np.float32),
            np.asarray(response.versions, dtype=np.int32),
            message,
            temperature if temperature > 0 else 1.0,
            response.stop_reason == "length",
            prompt.new_messages,
            is_trained=learn,
            tools=prompt.tools,
            images=prompt.images,
        )
        if turn.parent is not None:
            turn.parent.children += 1
        if prompt.messages:
            text, opening = prompt.text, self.renderer.generation_prompt
            if text.endswith(opening):
                length = len(text) - len(opening)
                turn.prompt_prefix = length, _digest(text[:length])
            self._by_key.setdefault(_extend_key(prompt.key, message), []).append(turn)
        else:
            self._index_turn(np.asarray(token_ids_until(turn), dtype=np.int64).tobytes(), turn)
            if response.output_ids[-1] not in self.renderer.stop_ids:
                self._index_turn(prompt.key + message["content"].encode(), turn)
        self.turns.append(turn)
        return turn

    def _index_turn(self, content: bytes, turn: Turn) -> None:
        self._lengths.add(len(content))
        self._by_key.setdefault(blake2b(content, digest_size=16).digest(), []).append(turn)

    def _completion_end(self, turn: Turn, text: str) -> int | None:
        """Return the position in the rendered conversation `text` at which the completion of a turn ends.

        Return None if the text does not begin with the turn's prompt and completion.
        """
        if turn.prompt_prefix is None:
            return None
        length, digest = turn.prompt_prefix
        if _digest(text[:length]) != digest:
            return None
        opening, completion = (
            self.renderer.generation_prompt,
            self.renderer.decode_completion(turn.output.tolist()).strip(),
        )
        rest = text[length + len(opening) :].lstrip()  # the template may add whitespace around a completion
        if text.startswith(opening, length) and rest.startswith(completion):  # the usual case; saves one rendering
            return len(text) - len(rest) + len(completion)
        if turn.rendered_prefix is _NOT_COMPUTED:
            turn.rendered_prefix = self._rendered_prefix(turn, length, digest)
        return (
            turn.rendered_prefix[0]
            if turn.rendered_prefix and _digest(text[: turn.rendered_prefix[0]]) == turn.rendered_prefix[1]
            else None
        )

    def _rendered_prefix(self, turn: Turn, length: int, digest: bytes) -> tuple[int, bytes] | None:
        """Return length and digest of the rendered conversation up to a completion that the template reformats.

        Return None if the template rejects the messages, changes the text before the completion, or omits a part of the
        completion's message.
        """
        renderer, message = self.renderer, turn.message
        messages = [entry for earlier in turn.path() for entry in (*earlier.new_messages, earlier.message)]
        try:
            text = renderer.text(messages, turn.tools, add_generation_prompt=False)
        except DataError:
            return None
        if not renderer.end_of_turn or not text.endswith(renderer.end_of_turn):
            return None
        text = text[: -len(renderer.end_of_turn)]
        if _digest(text[:length]) != digest:
            return None
        rendered = text[length:]
        calls = [call["function"]["name"] for call in _calls(message)]
        fragments = [message.get("reasoning_content") or "", message.get("content") or "", *calls]
        return (len(text), _digest(text)) if all(part.strip() in rendered for part in fragments) else None

    def trajectories(
        self, reward: float = 0.0, per: SequencesPer = "branch", credit: Credit = "turn", discount: float = 1.0
    ) -> list[Trajectory]:
        """Return all sampled completions as trajectories.

        With `credit="turn"`, the return of a turn is its reward plus `discount` times the return of the next turn of
        its sequence. The return of the last turn is its reward plus `reward`.

        Args:
            reward: reward of the episode.
            per: `branch`: one sequence for each turn that no call continues, with all earlier turns. Turns that several
                sequences share are trained in the first one. `call`: one sequence for each turn, in which only its
                completion is trained.
            credit: use of the rewards of turns. `episode`: the reward of every sequence is the sum of the rewards of
                all turns and `reward`. Each turn reward is multiplied by `discount` once per earlier turn on its
                branch, and `reward` once per earlier turn on the longest branch. `turn`: the reward of every sequence
                is `reward`. `token_rewards` are nonzero only on the last token of each turn. The return of a turn is
                the sum of the `token_rewards` from this turn onward, plus `reward`.
            discount: factor per turn, in (0, 1].

        Returns:
            trajectories in which each token sampled from the policy is trained exactly once, and has its log-prob and
            version in every sequence. Completions with `learn=False` are context. A sequence without a token to train
            is left out.

        Raises:
            DataError: the completions to train in one sequence have different temperatures.
        """
        returns: dict[Turn, float] = {}
        if credit == "episode":
            reward = self._episode_reward(reward, discount)
        elif discount < 1 or any(turn.reward for turn in self.turns):
            returns = self._returns(reward, discount)
        trajectories, trained = [], set[Turn]()
        for turn in self.turns:
            if per == "branch" and turn.children:
                continue
            path = turn.path()
            untrained = {each for each in ([turn] if per == "call" else path) if each.is_trained} - trained
            trained |= untrained
            if not untrained:
                continue
            trajectories.append(_trajectory(path, untrained, reward, returns))
        return trajectories

    def _episode_reward(self, reward: float, discount: float) -> float:
        depths = [len(turn.path()) - 1 for turn in self.turns]
        turn_rewards = sum(discount**depth * turn.reward for depth, turn in zip(depths, self.turns, strict=True))
        discounted = reward * discount ** max(depths, default=0)
        return turn_rewards + discounted if turn_rewards else discounted  # the sum would lose the reward components

    def _returns(self, reward: float, discount: float) -> dict[Turn, float]:
        """Return the return of each turn, along the branch in which it is trained."""
        following: dict[Turn, Turn] = {}
        for turn in self.turns:
            for current, next_turn in pairwise(turn.path() if not turn.children else ()):
                following.setdefault(current, next_turn)
        returns: dict[Turn, float] = {}
        for turn in reversed(self.turns):
            successor = following.get(turn)
            returns[turn] = turn.reward + (reward if successor is None else discount * returns[successor])
        return returns


def token_ids_until(turn: Turn) -> list[int]:
    """Return all tokens up to the end of a turn's completion."""
    ids: list[int] = []
    for each in turn.path():
        ids += each.prompt.tolist()
        ids += each.output.tolist()
    return ids


def _trajectory(path: list[Turn], trained: set[Turn], reward: float, returns: Mapping[Turn, float]) -> Trajectory:
    """Return the sequence of a path of turns. Only the completions of `trained` are in its loss mask."""
    import numpy as np

    from rl_contracts.batch.trajectory import Trajectory

    def per_token(name: str, fill: Any) -> np.ndarray:
        segments = [
            segment
            for turn in path
            for values in [getattr(turn, name)]
            for segment in (np.full_like(turn.prompt, fill), values if turn.is_trained else np.full_like(values, fill))
        ]
        return np.concatenate(segments).astype(getattr(path[0], name).dtype)

    temperatures = {turn.temperature for turn in trained}
    if len(temperatures) > 1:
        raise DataError(
            f"a sequence has completions with the temperatures {sorted(temperatures)}; expected a single temperature. "
            "Build one sequence per call, or sample the whole conversation at one temperature."
        )
    ends = np.cumsum([len(turn.prompt) + len(turn.output) for turn in path])
    mask = np.zeros(ends[-1], dtype=bool)
    rewards = np.zeros(ends[-1], dtype=np.float32)
    learned = [(turn, end) for turn, end in zip(path, ends.tolist(), strict=True) if turn.is_trained]
    for (turn, end), successor in zip(learned, [*(turn for turn, _ in learned[1:]), None], strict=True):
        if turn in trained:
            mask[end - len(turn.output) : end] = True
            if returns:
                rewards[end - 1] = returns[turn] - (reward if successor is None else returns[successor])
    return Trajectory(
        input_ids=np.concatenate([segment for turn in path for segment in (turn.prompt, turn.output)]),
        loss_mask=mask,
        logprobs=per_token("logprobs", 0),
        versions=per_token("versions", -1),
        reward=float(reward),
        reward_components=components_of(reward),
        temperature=temperatures.pop(),
        truncated=path[-1].truncated,
        token_rewards=rewards if returns else None,
        info={"turns": len(path), "conversation": branch_messages(path)},
        images=path[-1].images,
    )


def branch_messages(path: list[Turn]) -> list[dict[str, Any]]:
    """Return the messages of a branch for display, without the data of images.

    Each completion has its reward, token count and versions.
    """
    messages: list[dict[str, Any]] = []
    for turn in path:
        first, last = int(turn.versions.min()), int(turn.versions.max())
        turn_info = {"reward": turn.reward, "tokens": len(turn.output), "version_first": first, "version_last": last}
        turn_info |= {} if turn.is_trained else {"learned": False}
        messages += [*map(without_images, turn.new_messages), {**turn.message, **turn_info}]
    return messages


def text_with_image_marks(parts: Sequence[Any]) -> str:
    """Return the text of content parts, with `[image]` for each image."""
    return "".join("[image]" if is_image_part(part) else part["text"] for part in parts)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _extend_key(key: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message. It covers only content that agents do not change."""
    if message.get("role") == "assistant":
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in _calls(message)]
        content: Any = ["assistant", (message.get("content") or "").strip(), calls]
    else:
        content = {name: value for name, value in message.items() if name != "tool_call_id"}
    return blake2b(json.dumps(content, sort_keys=True, default=str).encode(), key=key, digest_size=16).digest()


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _matching_turn(turns: Sequence[Turn], message: Message) -> Turn | None:
    """Return the latest turn that a message repeats, preferably one with the same ids of tool calls.

    Args:
        turns: turns with the same digest of the conversation up to and including their completion.
        message: assistant message. If it has reasoning, the reasoning must be equal too.
    """
    reasoning = (message.get("reasoning_content") or "").strip()
    matches = [t for t in turns if reasoning in ("", (t.message.get("reasoning_content") or "").strip())]
    ids = [call.get("id") for call in _calls(message)]
    return max(reversed(matches), key=lambda t: [call.get("id") for call in _calls(t.message)] == ids, default=None)
