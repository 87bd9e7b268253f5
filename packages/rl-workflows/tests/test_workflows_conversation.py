"""Conversations with random agents over the chat formats of several model families.

Trained tokens are exactly the sampled ones, and every prompt is exactly what the chat template renders.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from rl_contracts.batch.trajectory import Trajectory, stack, validate
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.data import ModelResponse, StopReason
from rl_contracts.errors import DataError
from rl_contracts.testing.chat_formats import CHAT_FORMATS, format_completion, make_chat_tokenizer
from rl_workflows.agents.conversation import Conversation, Prompt, Turn, branch_messages, token_ids_until
from rl_workflows.agents.message_parsing import MessageParser

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
WORDS = ("it is 12", "the answer", "what? 345", '{"a": 1}', "é ü", "no")


@dataclass
class Sampler:
    """Sampler of given texts, split into unusual tokens. It records all responses."""

    name: str
    random: random.Random
    responses: list[ModelResponse] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = make_chat_tokenizer(self.name)
        self.renderer = ChatRenderer(self.tokenizer)
        self.parser = MessageParser(self.tokenizer, stop_ids=self.renderer.stop_ids)
        self.conversation = Conversation(self.renderer)
        self.added_tokens = set(self.tokenizer.added_tokens_decoder)

    def call(self, messages: Sequence[dict[str, Any]], tools: Any = None, **content: Any) -> tuple[Prompt, Turn]:
        """Make one call, whose completion has this content."""
        prompt = self.conversation.prompt(messages, tools)
        return prompt, self.complete(prompt, format_completion(self.name, **content), tools)

    def complete(self, prompt: Prompt, text: str, tools: Any = None) -> Turn:
        ids = self.tokenize_unusually(text)
        count = len(self.responses)
        ended = ids[-1] in self.renderer.stop_ids
        response = ModelResponse(
            list(prompt.ids),
            ids,
            [-(count + 1) - i / 1024 for i in range(len(ids))],
            [count + i // 3 for i in range(len(ids))],
            StopReason.STOP if ended else StopReason.LENGTH,
        )
        self.responses.append(response)
        message = self.parser.message(prompt.ids, self.renderer.generation_prompt, ids, tools)
        return self.conversation.add(prompt, response, message, 1.0)

    def tokenize_unusually(self, text: str) -> list[int]:
        """Return ids that decode to a text, in which random tokens are split into letters."""
        ids = self.renderer.encode(text)
        pieces = self.tokenizer.convert_ids_to_tokens(ids)
        return [
            new_id
            for token, piece in zip(ids, pieces, strict=True)
            for new_id in (
                [token]
                if token in self.added_tokens or self.random.random() < 0.6
                else self.tokenizer.convert_tokens_to_ids(list(piece))
            )
        ]


def check_trajectories(trajectories: list[Trajectory], responses: list[ModelResponse]) -> None:
    """Check that each response is trained exactly once, directly after the prompt for which it was sampled."""
    remaining = [(r.input_ids, r.output_ids, np.float32(r.logprobs).tolist(), r.versions) for r in responses]
    for trajectory in trajectories:
        ids, trained = trajectory.input_ids.tolist(), trajectory.loss_mask
        begin = 0
        assert (trajectory.versions[trained] >= 0).all()
        assert not trajectory.logprobs[trajectory.versions < 0].any()
        while trained[begin:].any():
            begin += int(np.argmax(trained[begin:]))
            matches = [
                response
                for response in remaining
                if response[0] == ids[:begin]
                and response[1] == ids[begin : begin + len(response[1])]
                and response[2] == trajectory.logprobs[begin : begin + len(response[1])].tolist()
                and response[3] == trajectory.versions[begin : begin + len(response[1])].tolist()
            ]
            assert len(matches) == 1
            remaining.remove(matches[0])
            end = begin + len(matches[0][1])
            assert trained[begin:end].all()
            begin = end
    assert not remaining
    for number, trajectory in enumerate(trajectories):
        trajectory.prompt_id = trajectory.group_id = trajectory.episode_id = number
    validate(stack(trajectories))


def sent_back(message: dict[str, Any], rng: random.Random, ids: bool) -> dict[str, Any]:
    """Return an assistant message as agents send it back, with random omissions."""
    message = json.loads(json.dumps(message))
    if rng.random() < 0.5:
        message.pop("reasoning_content", None)
    if rng.random() < 0.5:
        message["content"] = message["content"].strip()
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = dict(sorted(arguments.items(), reverse=rng.random() < 0.5))
        if not ids and rng.random() < 0.3:
            call["id"] = "another0"
    return message


def results_of(message: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the messages after a completion: results of its calls, or another question."""
    calls = message.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": rng.choice(WORDS)}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": rng.choice(WORDS)} for call in calls]


def random_content(rng: random.Random, name: str, tools: bool) -> dict[str, Any]:
    """Return the content of a completion: text, one or several calls, and reasoning if the family supports it."""
    calls = rng.choice([0, 0, 1, 3]) if tools else 0
    content: dict[str, Any] = {
        "calls": [{"name": "add", "arguments": {"a": rng.randrange(99), "b": 2}} for _ in range(calls)]
    }
    if not calls or (name in ("qwen3", "qwen3_coder", "gemma3") and rng.random() < 0.3):
        content["content"] = rng.choice(WORDS)
    if name in ("qwen3", "qwen3_coder") and rng.random() < 0.6:
        content["reasoning"] = rng.choice(WORDS)
    return content


@pytest.mark.parametrize("name", CHAT_FORMATS)
@given(seed=st.integers(0, 2**32))
def test_conversation_random_agent_prompts_and_trajectories_are_exact(name: str, seed: int) -> None:
    rng = random.Random(seed)
    sampler = Sampler(name, rng)
    tools = [ADD] if rng.random() < 0.7 else None
    start = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]
    requests: list[list[dict[str, Any]]] = [start]
    conversations: list[list[dict[str, Any]]] = []
    for _ in range(rng.randrange(1, 9)):
        action = rng.choice(
            ["continue", "continue", "continue", "again", "edit", "another agent"] if conversations else ["again"]
        )
        if action == "again":
            messages = rng.choice(requests)
        elif action == "another agent":
            messages = [{"role": "user", "content": rng.choice(WORDS)}]
        else:
            messages = rng.choice(conversations[-2:])
            messages = [*messages, *results_of(messages[-1], rng)]
            if action == "edit":
                messages = json.loads(json.dumps(messages))
                rng.choice([m for m in messages if m["role"] != "system"])["content"] += " indeed"
        requests.append(messages)

        prompt, turn = sampler.call(messages, tools, **random_content(rng, name, bool(tools)))

        conversations.append([*messages, sent_back(dict(turn.message), rng, ids=name == "mistral")])
        decoded = sampler.tokenizer.decode(prompt.ids)
        without_ids = re.sub(r', "id": "\w+"', "", prompt.text)  # no model writes these ids
        assert re.sub(r', "id": "\w+"', "", decoded) == without_ids

    check_trajectories(sampler.conversation.trajectories(), sampler.responses)
    check_trajectories(sampler.conversation.trajectories(per="call"), sampler.responses)


def _eight_turns(name: str, questions: bool) -> Sampler:
    """Make eight calls with one or three tool calls each. With `questions`, every fourth one is a text instead."""
    sampler = Sampler(name, random.Random(7))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is it?"}]
    for turn in range(8):
        last = questions and turn % 4 == 3
        calls = [{"name": "add", "arguments": {"a": turn, "b": i}} for i in range(0 if last else 1 + 2 * (turn % 2))]
        _, sampled = sampler.call(messages, [ADD], calls=calls, content="it is" if last else "")
        messages.append(sent_back(dict(sampled.message), random.Random(turn), ids=True))
        messages += results_of(dict(sampled.message), random.Random(turn))
    return sampler


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_conversation_eight_turns_with_tools_are_one_trajectory(name: str) -> None:
    sampler = _eight_turns(name, questions=False)

    trajectories = sampler.conversation.trajectories(2.0)

    assert [trajectory.info["turns"] for trajectory in trajectories] == [8]
    assert trajectories[0].reward == 2.0
    assert trajectories[0].token_rewards is None
    check_trajectories(trajectories, sampler.responses)


def test_conversation_reasoning_dropped_at_next_question_branches() -> None:
    sampler = Sampler("qwen3", random.Random(7))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is it?"}]
    for turn in range(6):
        calls = [] if turn == 3 else [{"name": "add", "arguments": {"a": turn}}]
        _, sampled = sampler.call(
            messages, [ADD], calls=calls, content="no" if turn == 3 else "", reasoning=f"hm {turn}"
        )
        back = sent_back(dict(sampled.message), random.Random(turn), ids=True)
        messages += [back, *results_of(back, random.Random(turn))]

    trajectories = sampler.conversation.trajectories()

    assert [trajectory.info["turns"] for trajectory in trajectories] == [4, 2]
    assert "hm 0" in sampler.tokenizer.decode(trajectories[0].input_ids)
    assert "hm 0" not in sampler.tokenizer.decode(trajectories[1].input_ids)
    assert "hm 4" in sampler.tokenizer.decode(trajectories[1].input_ids)
    check_trajectories(trajectories, sampler.responses)


def test_conversation_tools_moved_to_last_question_branch() -> None:
    sampler = _eight_turns("mistral", questions=True)

    trajectories = sampler.conversation.trajectories()

    assert [trajectory.info["turns"] for trajectory in trajectories] == [4, 4]
    check_trajectories(trajectories, sampler.responses)


def test_conversation_retries_and_edits_train_shared_turns_once() -> None:
    sampler = Sampler("llama3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="it is 12")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="345")
    _, third = sampler.call(again, content="the answer")
    _, edited = sampler.call([*start, {**first.message, "content": "it is 13"}, again[-1]], content="no")

    trajectories = sampler.conversation.trajectories()

    assert (second.parent, third.parent, edited.parent) == (first, first, None)
    assert [int(trajectory.loss_mask.sum()) for trajectory in trajectories] == [
        len(first.output) + len(second.output),
        len(third.output),
        len(edited.output),
    ]
    assert (trajectories[1].versions >= 0).sum() == len(first.output) + len(third.output)
    check_trajectories(trajectories, sampler.responses)


def test_conversation_reasoning_changed_by_agent_starts_new_tree() -> None:
    sampler = Sampler("qwen3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    call = {"name": "add", "arguments": {"a": 1}}
    _, first = sampler.call(start, [ADD], calls=[call], reasoning="hm")
    after = results_of(dict(first.message), random.Random(1))
    dropped = {name: value for name, value in first.message.items() if name != "reasoning_content"}

    assert sampler.conversation.prompt([*start, dropped, *after], [ADD]).parent is first
    assert sampler.conversation.prompt([*start, first.message, *after], [ADD]).parent is first
    changed = sampler.conversation.prompt([*start, {**first.message, "reasoning_content": "aha"}, *after], [ADD])
    assert changed.parent is None
    assert "aha" in sampler.tokenizer.decode(changed.ids)


def test_conversation_equal_completions_differ_by_ids_of_calls() -> None:
    sampler = Sampler("llama3", random.Random(3))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, [ADD], calls=[{"name": "add", "arguments": {"a": 1111, "b": 2222}}])
    _, second = sampler.call(start, [ADD], calls=[{"name": "add", "arguments": {"a": 1111, "b": 2222}}])
    assert first.output.tolist() != second.output.tolist(), (
        "the two completions must have different tokens for the same text"
    )

    for turn in (first, second):
        after = results_of(dict(turn.message), random.Random(1))
        assert sampler.conversation.prompt([*start, turn.message, *after], [ADD]).parent is turn


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_conversation_truncated_completion_gets_end_token_and_mark(name: str) -> None:
    sampler = Sampler(name, random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    prompt = sampler.conversation.prompt(start)
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    first = sampler.complete(prompt, think + "it is")
    assert first.truncated

    after = sampler.conversation.prompt([*start, first.message, {"role": "user", "content": "no"}])

    if name == "qwen3":  # this template drops empty reasoning of earlier turns
        assert after.parent is None
    else:
        assert after.parent is first
        assert after.ids[len(token_ids_until(first))] == sampler.renderer.stop_ids[0]
    assert sampler.conversation.trajectories()[0].truncated


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = {
    "omits calls": CHATML,
    "drops all reasoning": CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
    "lists tools only after the first turn": CHATML.replace(
        "{% for", "{% if messages | length > 1 and tools %}{{ tools | tojson }}{% endif %}{% for", 1
    ),
    "ends differently": CHATML.replace(
        "<|im_end|>\n{% endfor %}", "{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("rewriting", REWRITING)
def test_conversation_template_that_rewrites_turns_starts_new_tree(rewriting: str) -> None:
    sampler = Sampler("qwen3", random.Random(1))
    tokenizer = copy.copy(sampler.tokenizer)
    tokenizer.chat_template = REWRITING[rewriting]
    sampler.conversation = Conversation(ChatRenderer(tokenizer))
    start, calls = [{"role": "user", "content": "what is it?"}], [{"name": "add", "arguments": {"a": 1}}]
    content: dict[str, Any] = {
        "calls": calls if "calls" in rewriting else [],
        "reasoning": "hm" if "reasoning" in rewriting else "",
    }
    _, first = sampler.call(start, [ADD], content="no", **content)

    after = sampler.conversation.prompt([*start, first.message, {"role": "user", "content": "no"}], [ADD])

    assert after.parent is None
    assert tokenizer.decode(after.ids) == after.text


def test_completion_continued_with_text_or_tokens_keeps_sampled_ids() -> None:
    sampler = Sampler("llama3", random.Random(5))
    conversation = sampler.conversation
    first = sampler.complete(conversation.completion("the question: what is it? "), "the answer ")
    text = "the question: what is it? the answer "

    assert conversation.completion(text + "no").parent is first
    assert conversation.completion(text + "no").ids[: len(token_ids_until(first))] == token_ids_until(first)
    assert conversation.completion([*token_ids_until(first), 9]).ids == [*token_ids_until(first), 9]
    assert conversation.completion([*token_ids_until(first), 9]).added == 1
    assert conversation.completion("the question: what is it? the other").parent is None

    ended = sampler.complete(conversation.completion(text + "no"), "it is 12<|eot_id|>")
    assert conversation.completion(text + "noit is 12 and").parent is first, (
        "the text does not show that the completion ended"
    )
    assert conversation.completion([*token_ids_until(ended), 9]).parent is ended
    check_trajectories(conversation.trajectories(), sampler.responses)


def test_completion_text_gets_bos_only_at_its_beginning() -> None:
    sampler = Sampler("llama3", random.Random(5))
    sampler.tokenizer = tokenizer = copy.deepcopy(sampler.tokenizer)
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.bos_token_id)]
    )
    conversation = sampler.conversation = Conversation(ChatRenderer(tokenizer))

    first = sampler.complete(conversation.completion("what is it? "), "the answer ")
    after = conversation.completion("what is it? the answer no")

    assert after.parent is first
    assert tokenizer.decode(after.ids) == "<|begin_of_text|>what is it? the answer no"
    assert conversation.completion([5, 6]).ids == [5, 6]


def test_rows_turn_rewards_are_once_on_last_tokens() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="it is 12")
    sampler.call(again, content="345")
    first.reward, second.reward = 0.5, 2.0

    first_branch, second_branch = sampler.conversation.trajectories(1.0)

    assert first_branch.reward == second_branch.reward == 1.0
    assert first_branch.token_rewards is not None
    assert first_branch.token_rewards.nonzero()[0].tolist() == [len(token_ids_until(first)) - 1, len(first_branch) - 1]
    assert first_branch.token_rewards.sum() == 2.5
    assert second_branch.token_rewards is not None
    assert not second_branch.token_rewards.any()


def rewarded_tree() -> tuple[Sampler, list[Turn]]:
    """Return a rewarded conversation: after the first turn two branches, of one and of two turns."""
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="it is 12")
    _, third = sampler.call(again, content="345")
    _, fourth = sampler.call([*again, third.message, {"role": "user", "content": "what?"}], content="the answer")
    turns = [first, second, third, fourth]
    for turn, reward in zip(turns, (0.5, 0.25, -1.0, 2.0), strict=True):
        turn.reward = reward
    return sampler, turns


def test_rows_episode_credit_sums_discounted_turn_and_episode_rewards() -> None:
    sampler, _ = rewarded_tree()

    for per in ("branch", "call"):
        trajectories = sampler.conversation.trajectories(8.0, per, "episode", 0.5)
        assert [trajectory.reward for trajectory in trajectories] == [0.5 + (0.25 - 1.0) / 2 + 2.0 / 4 + 8.0 / 4] * len(
            trajectories
        )
        assert all(trajectory.token_rewards is None for trajectory in trajectories)
    assert sampler.conversation.trajectories(8.0, credit="episode")[0].reward == 8.0 + 1.75


def test_rows_turn_credit_token_rewards_sum_to_returns() -> None:
    discount = 0.5
    sampler, (first, second, third, fourth) = rewarded_tree()
    returns = {second: 0.25 + 8.0, fourth: 2.0 + 8.0}
    returns[first] = 0.5 + discount * returns[second]
    returns[third] = -1.0 + discount * returns[fourth]

    branches = sampler.conversation.trajectories(8.0, "branch", "turn", discount)
    calls = sampler.conversation.trajectories(8.0, "call", "turn", discount)

    turn_returns = []
    for trajectory in (*branches, *calls):
        assert trajectory.reward == 8.0
        assert trajectory.token_rewards is not None
        assert not trajectory.token_rewards[~trajectory.loss_mask].any()
        begins = np.flatnonzero(trajectory.loss_mask & ~np.roll(trajectory.loss_mask, 1))
        turn_returns.append([8.0 + float(trajectory.token_rewards[begin:].sum()) for begin in begins])
    expected = [[returns[first], returns[second]], [returns[third], returns[fourth]]]
    assert turn_returns == [*expected, *([returns[turn]] for turn in (first, second, third, fourth))]


def test_rows_only_episode_reward_is_discounted_over_turns() -> None:
    sampler, turns = rewarded_tree()
    for turn in turns:
        turn.reward = 0.0

    first_branch, _ = sampler.conversation.trajectories(8.0, discount=0.5)

    assert first_branch.token_rewards is not None
    assert first_branch.token_rewards[first_branch.token_rewards != 0].tolist() == [-4.0]
    assert sampler.conversation.trajectories(8.0)[0].token_rewards is None


def test_rows_turn_with_learn_false_is_context_and_returns_add_up() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="345")
    _, third = sampler.call([*again, second.message, {"role": "user", "content": "no"}], content="it is 12")
    first.reward, second.reward, third.reward, second.is_trained = 0.5, 2.0, 4.0, False

    (trajectory,) = sampler.conversation.trajectories(1.0)
    spans = [
        range(len(token_ids_until(turn)) - len(turn.output), len(token_ids_until(turn)))
        for turn in (first, second, third)
    ]

    assert trajectory.loss_mask.nonzero()[0].tolist() == [*spans[0], *spans[2]]
    assert set(trajectory.versions[spans[1]]) == {-1}
    assert not trajectory.logprobs[spans[1]].any()
    assert trajectory.token_rewards is not None
    assert trajectory.token_rewards[spans[0][-1] :].sum() + trajectory.reward == 0.5 + 2.0 + 4.0 + 1.0
    assert trajectory.token_rewards[spans[2][-1]] == 4.0
    assert [
        entry.get("learned", True) for entry in trajectory.info["conversation"] if entry["role"] == "assistant"
    ] == [
        True,
        False,
        True,
    ]
    assert len(sampler.conversation.trajectories(per="call")) == 2
    first.is_trained = third.is_trained = False
    assert sampler.conversation.trajectories(1.0) == []


def test_rows_several_temperatures_raise_unless_one_row_per_call() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    _, second = sampler.call([*start, first.message, {"role": "user", "content": "no"}], content="it is 12")
    second.temperature = 0.5

    with pytest.raises(DataError, match=r"temperatures \[0.5, 1.0\]"):
        sampler.conversation.trajectories()
    assert [trajectory.temperature for trajectory in sampler.conversation.trajectories(per="call")] == [1.0, 0.5]


def test_add_wrong_or_incomplete_response_raises() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    prompt = sampler.conversation.prompt([{"role": "user", "content": "what is it?"}])
    message = {"role": "assistant", "content": ""}

    for response in (
        ModelResponse([1], [5], [-1.0], [0], StopReason.STOP),
        ModelResponse(prompt.ids, [5, 6], [-1.0, -1.0], [0], StopReason.STOP),
        ModelResponse(prompt.ids, [], [], [], StopReason.STOP),
    ):
        with pytest.raises(DataError, match="log-probs and versions"):
            sampler.conversation.add(prompt, response, message, 1.0)
    with pytest.raises(DataError, match="at least one message"):
        sampler.conversation.prompt([])
    assert sampler.conversation.trajectories() == []


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral"])
def test_rows_info_has_messages_with_versions_and_rewards(name: str) -> None:
    sampler, tools = Sampler(name, random.Random(0)), [ADD]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what?"}]
    _, calling = sampler.call(messages, tools, calls=[{"name": "add", "arguments": {"a": 1, "b": 2}}])
    calling.reward = 0.5
    reply = [calling.message, {"role": "tool", "content": "3", "tool_call_id": calling.message["tool_calls"][0]["id"]}]
    _, final = sampler.call([*messages, *reply], tools, content="it is 3")

    trajectory = sampler.conversation.trajectories(1.0)[-1]

    entries = trajectory.info["conversation"]
    assert [message["role"] for message in entries] == ["user", "assistant", "tool", "assistant"]
    assert [entries[0], entries[2]] == [messages[0], reply[1]]
    assert entries[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert entries[3]["content"].strip() == "it is 3"
    if final.parent is calling:
        assert entries[1]["reward"] == 0.5
    assert (entries[3]["version_first"], entries[3]["version_last"]) == (final.versions.min(), final.versions.max())
    assert entries[3]["tokens"] == len(final.output)
    json.dumps(entries)


@pytest.mark.parametrize("name", ["llama3", "mistral"])  # Qwen 3 drops the empty reasoning of earlier turns
def test_prompt_continuing_unchanged_completion_renders_once(name, monkeypatch):
    sampler = Sampler(name, random.Random(0))
    renderer, texts = sampler.renderer, list[str]()
    # Reading these properties caches them, so that the calls below do not render for them.
    render, _ = renderer.text, (renderer.generation_prompt, renderer.end_of_turn, renderer.stop_ids)
    monkeypatch.setattr(renderer, "text", lambda *args, **options: texts.append(render(*args, **options)) or texts[-1])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what?"}]
    _, first = sampler.call(messages, content="the answer")
    messages += [{"role": "assistant", "content": "the answer"}, {"role": "user", "content": "no"}]
    prompt, _ = sampler.call(messages, content="it is 12")
    assert prompt.parent is first
    assert len(texts) == 2
    assert prompt.text == texts[1]


def test_prompt_invalid_utf8_raises() -> None:
    conversation = Conversation(ChatRenderer(make_chat_tokenizer("llama3")))
    with pytest.raises(DataError, match="UTF-8"):
        conversation.prompt([{"role": "user", "content": "half \ud83d"}])
    with pytest.raises(DataError, match="UTF-8"):
        conversation.completion("half \ud83d")


def test_branch_messages_with_images_have_no_image_data() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "?"}]
    one = np.ones(1, dtype=np.int64)
    message = {"role": "assistant", "content": "red"}
    turn = Turn(None, one, one, -one, one, message, 1.0, False, [{"role": "user", "content": content}])

    question, _ = branch_messages([turn])

    assert question == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
