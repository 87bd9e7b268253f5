"""Conversations as trees of sampled answers: token in, token out, over any number of turns.

An agent sends messages, a server samples tokens. Where the messages of a call go on from an earlier answer, its prompt
is the tokens of that answer's prompt, the tokens that were sampled, and the encoded text of what is new: nothing that
was sampled is ever encoded again. An answer goes on where two things hold:

- The messages are those of its call, then its own message, then further ones. Reasoning that is left out, blanks around
  the text, the order of arguments and the ids of tool calls may differ: agents rarely send those back as they were.
- The chat template shows all of them as before. It does not where it drops the reasoning of earlier turns, moves the
  tools to another place, or shows no tool calls; then the call goes on from an earlier answer that is shown as before,
  or begins anew, and what is rewritten is a prompt like any other.

So every call has the prompt that its template gives, and retries, parallel calls, sub-agents and rewritten histories
are branches of one tree. `Conversation.rows` makes trajectories of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError
from rl_contracts.reward import components_of

if TYPE_CHECKING:
    import numpy as np

    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.chat.rendering import ChatRenderer, Message
    from rl_contracts.data import ModelResponse
    from rl_contracts.endpoint import Credit, SequencesPer

_ROOT = b""
_UNKNOWN = (0, b"")


class PromptTooLongError(DataError):
    """The text of a prompt has more characters than its caller accepts."""


@dataclass(eq=False, slots=True)
class Turn:
    """One sampled answer, and what was put before it. All arrays are of its own tokens alone."""

    parent: Turn | None
    """The answer that it goes on from."""
    prompt: np.ndarray
    """int64, the tokens between the parent's answer and this one; the whole prompt where there is no parent."""
    output: np.ndarray
    """int64, what was sampled."""
    logprobs: np.ndarray
    """float32, of what was sampled."""
    versions: np.ndarray
    """int32, of what was sampled."""
    message: Message
    """What was made of it for the agent."""
    temperature: float
    """Of the sampler."""
    truncated: bool
    """Ended by a limit of length."""
    asked: Sequence[Message] = ()
    """Messages since the parent's answer."""
    learn: bool = True
    """Whether it was drawn from the policy, so that it can be trained; else it is context like a prompt."""
    reward: float = 0.0
    """What the turn itself earned, besides the outcome of the episode."""
    children: int = 0
    """Answers that go on from it."""
    tools: Sequence[Any] | None = None
    """That the model was shown."""
    before: tuple[int, bytes] | None = None
    """Length and digest of the text that it answers, without the opening of its turn; None where nothing can go on from
    it."""
    shown: tuple[int, bytes] | None = _UNKNOWN
    """Length and digest of the text of the conversation up to and with this answer, without the end of the turn, as the
    template shows it; None where it shows something else."""

    def path(self) -> list[Turn]:
        """The answers from the first to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a call stands in a conversation."""

    ids: list[int]
    """All tokens before the answer."""
    added: int
    """How many of them come after the parent's answer."""
    parent: Turn | None = None
    """The answer that it goes on from."""
    text: str = ""
    """What the template gives; empty for a prompt that is no conversation."""
    messages: Sequence[Message] = ()
    """Of the call, with each answer as it was sampled."""
    tools: Sequence[Any] | None = None
    """Of the call."""
    key: bytes = _ROOT
    """Digest of what the messages say; of a prompt that is no conversation, what was given."""

    @property
    def asked(self) -> Sequence[Message]:
        """Messages since the parent's answer."""
        before = sum(len(turn.asked) + 1 for turn in self.parent.path()) if self.parent else 0
        return self.messages[before:]


@dataclass(slots=True)
class Conversation:
    """All calls of an episode.

    Args:
        renderer: of the model that is sampled from.
    """

    renderer: ChatRenderer
    turns: list[Turn] = field(default_factory=list)
    """In the order in which they were answered."""
    _by_key: dict[bytes, list[Turn]] = field(default_factory=dict)
    """Answers by the digest of what was said up to and with them."""
    _lengths: set[int] = field(default_factory=set)
    """In bytes, of what was said in conversations without messages."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, max_characters: float = float("inf")
    ) -> Prompt:
        """Where a call with these messages stands, and its tokens.

        Args:
            messages: of the call, at least one.
            tools: that the model is shown.
            max_characters: of the rendered text; a longer one is not tokenized.

        Raises:
            DataError: no messages, or ones that the template refuses.
            PromptTooLongError: the text has more than `max_characters` characters.
        """
        if not messages:
            raise DataError("expected at least one message, found none")
        known, found, key = [], [], _ROOT
        for message in messages:
            key = _next(key, message)
            turn = _nearest(self._by_key.get(key, ()), message)
            if turn is not None:
                found.append(turn)
            known.append(message if turn is None else turn.message)
        text = self.renderer.text(known, tools)
        if len(text) > max_characters:
            raise PromptTooLongError(f"{len(text)} characters, at most {max_characters} fit")
        for turn in reversed(found):
            end = self._end(turn, text)
            if end is None:
                continue
            added = self.renderer.text_after_completion(turn.output[-1:].tolist(), text[end:])
            if added is not None:
                return Prompt([*tokens_to(turn), *added], len(added), turn, text, known, tools, key)
        ids = self.renderer.encode(text)
        return Prompt(ids, len(ids), None, text, known, tools, key)

    def completion(self, given: str | Sequence[int]) -> Prompt:
        """Where a call stands whose prompt is a text or tokens without messages: after the longest of such prompts and
        its answer with which it begins. After a text that is an answer that the model did not end. A text that begins a
        prompt gets the beginning-of-text token that the tokenizer adds.

        Raises:
            DataError: the text is not UTF-8.
        """
        import numpy as np

        from rl_contracts.chat.rendering import require_utf8

        if isinstance(given, str):
            require_utf8(given)
        content = given.encode() if isinstance(given, str) else np.asarray(given, dtype=np.int64).tobytes()
        hashed, done, parent, length = blake2b(digest_size=16), 0, None, 0
        for end in sorted(self._lengths):
            if end >= len(content):
                break
            hashed.update(content[done:end])
            done = end
            if turns := self._by_key.get(hashed.digest()):
                parent, length = turns[-1], end
        rest = content[length:]
        if isinstance(given, str):
            added = self.renderer.encode(rest.decode(), begins=parent is None)
        else:
            added = np.frombuffer(rest, np.int64).tolist()
        return Prompt([*(tokens_to(parent) if parent else ()), *added], len(added), parent, key=content)

    def add(
        self, prompt: Prompt, response: ModelResponse, message: Message, temperature: float, learn: bool = True
    ) -> Turn:
        """A call was answered.

        Args:
            prompt: of `prompt` or `completion`.
            response: what was sampled after `prompt.ids`.
            message: what the agent is given: `role`, `content`, and `reasoning_content` and `tool_calls` where it has
                them, whose arguments are objects, not their text.
            temperature: of the sampler.
            learn: whether the answer was drawn from the policy, and not from what a schema left of it.

        Raises:
            DataError: the answer is to another prompt, has no tokens, or not one log-prob and version for each.
        """
        import numpy as np

        count = len(response.output_ids)
        if list(response.input_ids) != prompt.ids or not count == len(response.logprobs) == len(response.versions) > 0:
            raise DataError(
                f"answer of {response.server or 'a server'}: expected tokens after the {len(prompt.ids)} of the "
                f"prompt, with a log-prob and a version each; found {count} tokens, {len(response.logprobs)} log-probs "
                f"and {len(response.versions)} versions after {len(response.input_ids)}."
            )
        turn = Turn(
            prompt.parent,
            np.asarray(prompt.ids[len(prompt.ids) - prompt.added :], dtype=np.int64),
            np.asarray(response.output_ids, dtype=np.int64),
            np.asarray(response.logprobs, dtype=np.float32),
            np.asarray(response.versions, dtype=np.int32),
            message,
            temperature if temperature > 0 else 1.0,
            response.stop_reason == "length",
            prompt.asked,
            learn=learn,
            tools=prompt.tools,
        )
        if turn.parent is not None:
            turn.parent.children += 1
        if prompt.messages:
            text, opening = prompt.text, self.renderer.generation_prompt
            if text.endswith(opening):
                length = len(text) - len(opening)
                turn.before = length, _digest(text[:length])
            self._by_key.setdefault(_next(prompt.key, message), []).append(turn)
        else:
            self._index_turn(np.asarray(tokens_to(turn), dtype=np.int64).tobytes(), turn)
            if response.output_ids[-1] not in self.renderer.stop_ids:
                self._index_turn(prompt.key + message["content"].encode(), turn)
        self.turns.append(turn)
        return turn

    def _index_turn(self, content: bytes, turn: Turn) -> None:
        self._lengths.add(len(content))
        self._by_key.setdefault(blake2b(content, digest_size=16).digest(), []).append(turn)

    def _end(self, turn: Turn, text: str) -> int | None:
        """Where an answer ends in the text of a conversation that goes on from it; None where that shows the answer, or
        what was before it, in another way than it was sampled."""
        if turn.before is None:
            return None
        length, digest = turn.before
        if _digest(text[:length]) != digest:
            return None
        opening, said = self.renderer.generation_prompt, self.renderer.decode_completion(turn.output.tolist()).strip()
        answer = text[length + len(opening) :].lstrip()  # blanks around it are the template's
        if text.startswith(opening, length) and answer.startswith(said):  # nearly always; it spares the template once
            return len(text) - len(answer) + len(said)
        if turn.shown is _UNKNOWN:
            turn.shown = self._find_rendered(turn, length, digest)
        return turn.shown[0] if turn.shown and _digest(text[: turn.shown[0]]) == turn.shown[1] else None

    def _find_rendered(self, turn: Turn, length: int, digest: bytes) -> tuple[int, bytes] | None:
        """How the template shows an answer, in other words than were sampled, but with all that it says."""
        renderer, message = self.renderer, turn.message
        messages = [each for before in turn.path() for each in (*before.asked, before.message)]
        try:
            text = renderer.text(messages, turn.tools, add_generation_prompt=False)
        except DataError:
            return None
        if not renderer.end_of_turn or not text.endswith(renderer.end_of_turn):
            return None
        text = text[: -len(renderer.end_of_turn)]
        if _digest(text[:length]) != digest:
            return None
        answer = text[length:]
        calls = [call["function"]["name"] for call in _calls(message)]
        said = [message.get("reasoning_content") or "", message.get("content") or "", *calls]
        return (len(text), _digest(text)) if all(part.strip() in answer for part in said) else None

    def rows(
        self, reward: float = 0.0, per: SequencesPer = "branch", credit: Credit = "turn", discount: float = 1.0
    ) -> list[Trajectory]:
        """All that was sampled.

        Args:
            reward: outcome of the episode.
            per: `branch`: a row of each answer that nothing goes on from, with all before it; what several rows share
                is trained in the first. `call`: a row of each answer, which alone is trained.
            credit: what becomes of what turns earned themselves. `episode`: every row's reward is their sum and the
                outcome, each times `discount` for every turn before it on its branch (the outcome: on the longest one).
                `turn`: every row's reward is the outcome, and `token_rewards`, on the last tokens of turns, are such
                that from each turn on they add up, together with the outcome, to the turn's return: what it earned, and
                `discount` times the return of the turn that follows it in its row, or the outcome where none does.
            discount: in (0, 1].

        Returns:
            rows in which every token that was drawn from the policy is trained once, and has its log-prob and version
            wherever it stands. Answers that were not are context, and without any other there is no row.

        Raises:
            DataError: what a row trains was sampled at several temperatures.
        """
        returns: dict[Turn, float] = {}
        if credit == "episode":
            reward = self._episode(reward, discount)
        elif discount < 1 or any(turn.reward for turn in self.turns):
            returns = self._returns(reward, discount)
        rows, trained = [], set[Turn]()
        for turn in self.turns:
            if per == "branch" and turn.children:
                continue
            path = turn.path()
            fresh = {each for each in ([turn] if per == "call" else path) if each.learn} - trained
            trained |= fresh
            if not fresh:
                continue
            rows.append(_row(path, fresh, reward, returns))
        return rows

    def _episode(self, reward: float, discount: float) -> float:
        depths = [len(turn.path()) - 1 for turn in self.turns]
        earned = sum(discount**depth * turn.reward for depth, turn in zip(depths, self.turns, strict=True))
        outcome = reward * discount ** max(depths, default=0)
        return earned + outcome if earned else outcome  # a sum has no parts

    def _returns(self, reward: float, discount: float) -> dict[Turn, float]:
        """Of each turn, along the branch in which it is trained."""
        following: dict[Turn, Turn] = {}
        for turn in self.turns:
            for one, its_next in pairwise(turn.path() if not turn.children else ()):
                following.setdefault(one, its_next)
        returns: dict[Turn, float] = {}
        for turn in reversed(self.turns):
            after = following.get(turn)
            returns[turn] = turn.reward + (reward if after is None else discount * returns[after])
        return returns


def tokens_to(turn: Turn) -> list[int]:
    """All tokens up to the end of an answer."""
    ids: list[int] = []
    for each in turn.path():
        ids += each.prompt.tolist()
        ids += each.output.tolist()
    return ids


def _row(path: list[Turn], trained: set[Turn], reward: float, returns: Mapping[Turn, float]) -> Trajectory:
    """The row of some answers, each of which goes on from the one before."""
    import numpy as np

    from rl_contracts.batch.trajectory import Trajectory

    def laid(name: str, between: Any) -> np.ndarray:
        parts = [
            part
            for turn in path
            for values in [getattr(turn, name)]
            for part in (np.full_like(turn.prompt, between), values if turn.learn else np.full_like(values, between))
        ]
        return np.concatenate(parts).astype(getattr(path[0], name).dtype)

    temperatures = {turn.temperature for turn in trained}
    if len(temperatures) > 1:
        raise DataError(
            f"a row's answers were sampled at the temperatures {sorted(temperatures)}; expected one in a row. Make "
            "rows of calls, or sample a conversation at one temperature."
        )
    ends = np.cumsum([len(turn.prompt) + len(turn.output) for turn in path])
    mask = np.zeros(ends[-1], dtype=bool)
    rewards = np.zeros(ends[-1], dtype=np.float32)
    learned = [(turn, end) for turn, end in zip(path, ends.tolist(), strict=True) if turn.learn]
    for (turn, end), after in zip(learned, [*(turn for turn, _ in learned[1:]), None], strict=True):
        if turn in trained:
            mask[end - len(turn.output) : end] = True
            if returns:
                rewards[end - 1] = returns[turn] - (reward if after is None else returns[after])
    return Trajectory(
        input_ids=np.concatenate([part for turn in path for part in (turn.prompt, turn.output)]),
        loss_mask=mask,
        logprobs=laid("logprobs", 0),
        versions=laid("versions", -1),
        reward=float(reward),
        reward_components=components_of(reward),
        temperature=temperatures.pop(),
        truncated=path[-1].truncated,
        token_rewards=rewards if returns else None,
        info={"turns": len(path), "conversation": branch_messages(path)},
    )


def branch_messages(path: list[Turn]) -> list[dict[str, Any]]:
    """A branch for people: its messages, and with each answer what it earned and the versions that made it."""
    messages: list[dict[str, Any]] = []
    for turn in path:
        first, last = int(turn.versions.min()), int(turn.versions.max())
        figures = {"reward": turn.reward, "tokens": len(turn.output), "version_first": first, "version_last": last}
        figures |= {} if turn.learn else {"learned": False}
        messages += [*map(dict, turn.asked), {**turn.message, **figures}]
    return messages


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _next(key: bytes, message: Message) -> bytes:
    """Digest of a conversation with one more message, of what agents send back as it was."""
    if message.get("role") == "assistant":
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in _calls(message)]
        said: Any = ["assistant", (message.get("content") or "").strip(), calls]
    else:
        said = {name: value for name, value in message.items() if name != "tool_call_id"}
    return blake2b(json.dumps(said, sort_keys=True, default=str).encode(), key=key, digest_size=16).digest()


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _nearest(turns: Sequence[Turn], message: Message) -> Turn | None:
    """Of answers that say the same to the same messages the last, if possible one with the message's ids of tool calls;
    None where there is none with its reasoning, if it has any."""
    reasoning = (message.get("reasoning_content") or "").strip()
    same = [t for t in turns if reasoning in ("", (t.message.get("reasoning_content") or "").strip())]
    ids = [call.get("id") for call in _calls(message)]
    return max(reversed(same), key=lambda t: [call.get("id") for call in _calls(t.message)] == ids, default=None)
