"""Conversations of agents of every kind, over the chat formats of four families: what is learned from is what was
sampled, and every prompt is what the template gives."""

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
from rl_workflows.agents.conversation import Conversation, Prompt, Turn, tokens_to
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
    """Answers with given texts, cut into tokens as no tokenizer would; remembers every answer."""

    name: str
    random: random.Random
    responses: list[ModelResponse] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = make_chat_tokenizer(self.name)
        self.renderer = ChatRenderer(self.tokenizer)
        self.reader = MessageParser(self.tokenizer, stop_ids=self.renderer.stop_ids)
        self.conversation = Conversation(self.renderer)
        self.whole = set(self.tokenizer.added_tokens_decoder)

    def call(self, messages: Sequence[dict[str, Any]], tools: Any = None, **says: Any) -> tuple[Prompt, Turn]:
        """One call, whose answer says this."""
        prompt = self.conversation.prompt(messages, tools)
        return prompt, self.answer(prompt, format_completion(self.name, **says), tools)

    def answer(self, prompt: Prompt, text: str, tools: Any = None) -> Turn:
        ids = self.odd(text)
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
        message = self.reader.message(prompt.ids, self.renderer.generation_prompt, ids, tools)
        return self.conversation.add(prompt, response, message, 1.0)

    def odd(self, text: str) -> list[int]:
        """Ids of a text that decode to it; some letters are tokens of their own."""
        ids = self.renderer.encode(text)
        pieces = self.tokenizer.convert_ids_to_tokens(ids)
        return [
            part
            for token, piece in zip(ids, pieces, strict=True)
            for part in (
                [token]
                if token in self.whole or self.random.random() < 0.6
                else self.tokenizer.convert_tokens_to_ids(list(piece))
            )
        ]


def check_rows(rows: list[Trajectory], responses: list[ModelResponse]) -> None:
    """Whatever is trained follows exactly the prompt after which it was sampled, and is trained once."""
    left = [(r.input_ids, r.output_ids, np.float32(r.logprobs).tolist(), r.versions) for r in responses]
    for row in rows:
        ids, trained = row.input_ids.tolist(), row.loss_mask
        begin = 0
        assert (row.versions[trained] >= 0).all()
        assert not row.logprobs[row.versions < 0].any()
        while trained[begin:].any():
            begin += int(np.argmax(trained[begin:]))
            found = [
                answer
                for answer in left
                if answer[0] == ids[:begin]
                and answer[1] == ids[begin : begin + len(answer[1])]
                and answer[2] == row.logprobs[begin : begin + len(answer[1])].tolist()
                and answer[3] == row.versions[begin : begin + len(answer[1])].tolist()
            ]
            assert len(found) == 1
            left.remove(found[0])
            end = begin + len(found[0][1])
            assert trained[begin:end].all()
            begin = end
    assert not left
    for number, row in enumerate(rows):
        row.prompt_id = row.group_id = row.episode_id = number
    validate(stack(rows))


def sent_back(message: dict[str, Any], chance: random.Random, ids: bool) -> dict[str, Any]:
    """An answer as agents send it back."""
    message = json.loads(json.dumps(message))
    if chance.random() < 0.5:
        message.pop("reasoning_content", None)
    if chance.random() < 0.5:
        message["content"] = message["content"].strip()
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = dict(sorted(arguments.items(), reverse=chance.random() < 0.5))
        if not ids and chance.random() < 0.3:
            call["id"] = "another0"
    return message


def results_of(message: dict[str, Any], chance: random.Random) -> list[dict[str, Any]]:
    """What comes after an answer: results of its calls, or another question."""
    calls = message.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": chance.choice(WORDS)}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": chance.choice(WORDS)} for call in calls]


def says(chance: random.Random, name: str, tools: bool) -> dict[str, Any]:
    """An answer: text, one call or several, and reasoning where the family has it."""
    calls = chance.choice([0, 0, 1, 3]) if tools else 0
    said: dict[str, Any] = {
        "calls": [{"name": "add", "arguments": {"a": chance.randrange(99), "b": 2}} for _ in range(calls)]
    }
    if not calls or (name in ("qwen3", "qwen3_coder", "gemma3") and chance.random() < 0.3):
        said["content"] = chance.choice(WORDS)
    if name in ("qwen3", "qwen3_coder") and chance.random() < 0.6:
        said["reasoning"] = chance.choice(WORDS)
    return said


@pytest.mark.parametrize("name", CHAT_FORMATS)
@given(seed=st.integers(0, 2**32))
def test_conversation_any_agent_prompts_are_the_templates_and_rows_what_was_sampled(name: str, seed: int) -> None:
    chance = random.Random(seed)
    sampler = Sampler(name, chance)
    tools = [ADD] if chance.random() < 0.7 else None
    start = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]
    asked: list[list[dict[str, Any]]] = [start]
    answered: list[list[dict[str, Any]]] = []
    for _ in range(chance.randrange(1, 9)):
        action = chance.choice(["go on", "go on", "go on", "again", "edit", "another agent"] if answered else ["again"])
        if action == "again":
            messages = chance.choice(asked)
        elif action == "another agent":
            messages = [{"role": "user", "content": chance.choice(WORDS)}]
        else:
            messages = chance.choice(answered[-2:])
            messages = [*messages, *results_of(messages[-1], chance)]
            if action == "edit":
                messages = json.loads(json.dumps(messages))
                chance.choice([m for m in messages if m["role"] != "system"])["content"] += " indeed"
        asked.append(messages)

        prompt, turn = sampler.call(messages, tools, **says(chance, name, bool(tools)))

        answered.append([*messages, sent_back(dict(turn.message), chance, ids=name == "mistral")])
        said = sampler.tokenizer.decode(prompt.ids)
        without_ids = re.sub(r', "id": "\w+"', "", prompt.text)  # which no model writes
        assert re.sub(r', "id": "\w+"', "", said) == without_ids

    check_rows(sampler.conversation.rows(), sampler.responses)
    check_rows(sampler.conversation.rows(per="call"), sampler.responses)


def _eight_turns(name: str, questions: bool) -> Sampler:
    """Eight calls, with one call of a tool, three at once, and text; or with questions in between."""
    sampler = Sampler(name, random.Random(7))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is it?"}]
    for turn in range(8):
        last = questions and turn % 4 == 3
        calls = [{"name": "add", "arguments": {"a": turn, "b": i}} for i in range(0 if last else 1 + 2 * (turn % 2))]
        _, answer = sampler.call(messages, [ADD], calls=calls, content="it is" if last else "")
        messages.append(sent_back(dict(answer.message), random.Random(turn), ids=True))
        messages += results_of(dict(answer.message), random.Random(turn))
    return sampler


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral"])
def test_conversation_eight_turns_with_tools_are_one_row(name: str) -> None:
    sampler = _eight_turns(name, questions=False)

    rows = sampler.conversation.rows(2.0)

    assert [row.info["turns"] for row in rows] == [8]
    assert rows[0].reward == 2.0
    assert rows[0].token_rewards is None
    check_rows(rows, sampler.responses)


def test_conversation_reasoning_is_kept_within_a_question_and_branches_at_the_next() -> None:
    sampler = Sampler("qwen3", random.Random(7))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is it?"}]
    for turn in range(6):
        calls = [] if turn == 3 else [{"name": "add", "arguments": {"a": turn}}]
        _, answer = sampler.call(
            messages, [ADD], calls=calls, content="no" if turn == 3 else "", reasoning=f"hm {turn}"
        )
        back = sent_back(dict(answer.message), random.Random(turn), ids=True)
        messages += [back, *results_of(back, random.Random(turn))]

    rows = sampler.conversation.rows()

    assert [row.info["turns"] for row in rows] == [4, 2]
    assert "hm 0" in sampler.tokenizer.decode(rows[0].input_ids)
    assert "hm 0" not in sampler.tokenizer.decode(rows[1].input_ids)
    assert "hm 4" in sampler.tokenizer.decode(rows[1].input_ids)
    check_rows(rows, sampler.responses)


def test_conversation_tools_that_move_to_the_last_question_branch() -> None:
    sampler = _eight_turns("mistral", questions=True)

    rows = sampler.conversation.rows()

    assert [row.info["turns"] for row in rows] == [4, 4]
    check_rows(rows, sampler.responses)


def test_conversation_retries_and_edits_are_branches_of_one_tree_whose_common_part_is_trained_once() -> None:
    sampler = Sampler("llama3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="it is 12")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="345")
    _, third = sampler.call(again, content="the answer")
    _, edited = sampler.call([*start, {**first.message, "content": "it is 13"}, again[-1]], content="no")

    rows = sampler.conversation.rows()

    assert (second.parent, third.parent, edited.parent) == (first, first, None)
    assert [int(row.loss_mask.sum()) for row in rows] == [
        len(first.output) + len(second.output),
        len(third.output),
        len(edited.output),
    ]
    assert (rows[1].versions >= 0).sum() == len(first.output) + len(third.output)
    check_rows(rows, sampler.responses)


def test_conversation_reasoning_that_an_agent_changes_is_another_conversation() -> None:
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


def test_conversation_answers_alike_are_told_apart_by_the_ids_of_their_calls() -> None:
    sampler = Sampler("llama3", random.Random(3))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, [ADD], calls=[{"name": "add", "arguments": {"a": 1111, "b": 2222}}])
    _, second = sampler.call(start, [ADD], calls=[{"name": "add", "arguments": {"a": 1111, "b": 2222}}])
    assert first.output.tolist() != second.output.tolist(), "expected two ways of cutting the same text into tokens"

    for turn in (first, second):
        after = results_of(dict(turn.message), random.Random(1))
        assert sampler.conversation.prompt([*start, turn.message, *after], [ADD]).parent is turn


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_conversation_answer_that_was_cut_off_is_closed_and_marked(name: str) -> None:
    sampler = Sampler(name, random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    prompt = sampler.conversation.prompt(start)
    think = "<think>\n\n</think>\n\n" if name in ("qwen3", "qwen3_coder") else ""
    first = sampler.answer(prompt, think + "it is")
    assert first.truncated

    after = sampler.conversation.prompt([*start, first.message, {"role": "user", "content": "no"}])

    if name in ("qwen3", "qwen3_coder"):  # which shows no empty reasoning in an earlier turn
        assert after.parent is None
    else:
        assert after.parent is first
        assert after.ids[len(tokens_to(first))] == sampler.renderer.stop_ids[0]
    assert sampler.conversation.rows()[0].truncated


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = {
    "shows no calls": CHATML,
    "drops all reasoning": CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
    "shows tools after the first turn alone": CHATML.replace(
        "{% for", "{% if messages | length > 1 and tools %}{{ tools | tojson }}{% endif %}{% for", 1
    ),
    "ends differently": CHATML.replace(
        "<|im_end|>\n{% endfor %}", "{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("how", REWRITING)
def test_conversation_template_that_shows_answers_otherwise_than_sampled_begins_anew(how: str) -> None:
    sampler = Sampler("qwen3", random.Random(1))
    tokenizer = copy.copy(sampler.tokenizer)
    tokenizer.chat_template = REWRITING[how]
    sampler.conversation = Conversation(ChatRenderer(tokenizer))
    start, calls = [{"role": "user", "content": "what is it?"}], [{"name": "add", "arguments": {"a": 1}}]
    said: dict[str, Any] = {"calls": calls if "calls" in how else [], "reasoning": "hm" if "reasoning" in how else ""}
    _, first = sampler.call(start, [ADD], content="no", **said)

    after = sampler.conversation.prompt([*start, first.message, {"role": "user", "content": "no"}], [ADD])

    assert after.parent is None
    assert tokenizer.decode(after.ids) == after.text


def test_completions_that_go_on_with_tokens_or_text_keep_what_was_sampled() -> None:
    sampler = Sampler("llama3", random.Random(5))
    talk = sampler.conversation
    first = sampler.answer(talk.completion("the question: what is it? "), "the answer ")
    told = "the question: what is it? the answer "

    assert talk.completion(told + "no").parent is first
    assert talk.completion(told + "no").ids[: len(tokens_to(first))] == tokens_to(first)
    assert talk.completion([*tokens_to(first), 9]).ids == [*tokens_to(first), 9]
    assert talk.completion([*tokens_to(first), 9]).added == 1
    assert talk.completion("the question: what is it? the other").parent is None

    ended = sampler.answer(talk.completion(told + "no"), "it is 12<|eot_id|>")
    assert talk.completion(told + "noit is 12 and").parent is first, "the text does not say that the answer ended"
    assert talk.completion([*tokens_to(ended), 9]).parent is ended
    check_rows(talk.rows(), sampler.responses)


def test_completion_text_begins_with_one_bos_that_later_texts_lack() -> None:
    sampler = Sampler("llama3", random.Random(5))
    sampler.tokenizer = tokenizer = copy.deepcopy(sampler.tokenizer)
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.bos_token_id)]
    )
    talk = sampler.conversation = Conversation(ChatRenderer(tokenizer))

    first = sampler.answer(talk.completion("what is it? "), "the answer ")
    after = talk.completion("what is it? the answer no")

    assert after.parent is first
    assert tokenizer.decode(after.ids) == "<|begin_of_text|>what is it? the answer no"
    assert talk.completion([5, 6]).ids == [5, 6]


def test_rows_turns_rewards_lie_on_their_last_tokens_and_once() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="it is 12")
    sampler.call(again, content="345")
    first.reward, second.reward = 0.5, 2.0

    one, other = sampler.conversation.rows(1.0)

    assert one.reward == other.reward == 1.0
    assert one.token_rewards is not None
    assert one.token_rewards.nonzero()[0].tolist() == [len(tokens_to(first)) - 1, len(one) - 1]
    assert one.token_rewards.sum() == 2.5
    assert other.token_rewards is not None
    assert not other.token_rewards.any()


def rewarded_tree() -> tuple[Sampler, list[Turn]]:
    """Two answers one after the other, and another try of the second that goes on to a third; each earned something."""
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="it is 12")
    _, third = sampler.call(again, content="345")
    _, fourth = sampler.call([*again, third.message, {"role": "user", "content": "what?"}], content="the answer")
    turns = [first, second, third, fourth]
    for turn, earned in zip(turns, (0.5, 0.25, -1.0, 2.0), strict=True):
        turn.reward = earned
    return sampler, turns


def test_rows_episodes_reward_is_the_discounted_sum_over_turns_of_what_all_earned_and_the_outcome() -> None:
    sampler, _ = rewarded_tree()

    for per in ("branch", "call"):
        rows = sampler.conversation.rows(8.0, per, "episode", 0.5)
        assert [row.reward for row in rows] == [0.5 + (0.25 - 1.0) / 2 + 2.0 / 4 + 8.0 / 4] * len(rows)
        assert all(row.token_rewards is None for row in rows)
    assert sampler.conversation.rows(8.0, credit="episode")[0].reward == 8.0 + 1.75


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_rows_rewards_of_tokens_add_up_to_the_returns_of_turns(discount: float) -> None:
    sampler, (first, second, third, fourth) = rewarded_tree()
    returns = {second: 0.25 + 8.0, fourth: 2.0 + 8.0}
    returns[first] = 0.5 + discount * returns[second]
    returns[third] = -1.0 + discount * returns[fourth]

    branches = sampler.conversation.rows(8.0, "branch", "turn", discount)
    calls = sampler.conversation.rows(8.0, "call", "turn", discount)

    found = []
    for row in (*branches, *calls):
        assert row.reward == 8.0
        assert row.token_rewards is not None
        assert not row.token_rewards[~row.loss_mask].any()
        begins = np.flatnonzero(row.loss_mask & ~np.roll(row.loss_mask, 1))
        found.append([8.0 + float(row.token_rewards[begin:].sum()) for begin in begins])
    expected = [[returns[first], returns[second]], [returns[third], returns[fourth]]]
    assert found == [*expected, *([returns[turn]] for turn in (first, second, third, fourth))]


def test_rows_outcome_alone_is_discounted_over_turns() -> None:
    sampler, turns = rewarded_tree()
    for turn in turns:
        turn.reward = 0.0

    one, _ = sampler.conversation.rows(8.0, discount=0.5)

    assert one.token_rewards is not None
    assert one.token_rewards[one.token_rewards != 0].tolist() == [-4.0]
    assert sampler.conversation.rows(8.0)[0].token_rewards is None


def test_rows_answers_that_were_not_drawn_from_the_policy_are_context_and_returns_still_add_up() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    again = [*start, first.message, {"role": "user", "content": "no"}]
    _, second = sampler.call(again, content="345")
    _, third = sampler.call([*again, second.message, {"role": "user", "content": "no"}], content="it is 12")
    first.reward, second.reward, third.reward, second.learn = 0.5, 2.0, 4.0, False

    (row,) = sampler.conversation.rows(1.0)
    places = [range(len(tokens_to(turn)) - len(turn.output), len(tokens_to(turn))) for turn in (first, second, third)]

    assert row.loss_mask.nonzero()[0].tolist() == [*places[0], *places[2]]
    assert set(row.versions[places[1]]) == {-1}
    assert not row.logprobs[places[1]].any()
    assert row.token_rewards is not None
    assert row.token_rewards[places[0][-1] :].sum() + row.reward == 0.5 + 2.0 + 4.0 + 1.0
    assert row.token_rewards[places[2][-1]] == 4.0
    assert [entry.get("learned", True) for entry in row.info["conversation"] if entry["role"] == "assistant"] == [
        True,
        False,
        True,
    ]
    assert len(sampler.conversation.rows(per="call")) == 2
    first.learn = third.learn = False
    assert sampler.conversation.rows(1.0) == []


def test_rows_of_several_temperatures_are_refused_but_one_by_one() -> None:
    sampler = Sampler("gemma3", random.Random(1))
    start = [{"role": "user", "content": "what is it?"}]
    _, first = sampler.call(start, content="no")
    _, second = sampler.call([*start, first.message, {"role": "user", "content": "no"}], content="it is 12")
    second.temperature = 0.5

    with pytest.raises(DataError, match=r"temperatures \[0.5, 1.0\]"):
        sampler.conversation.rows()
    assert [row.temperature for row in sampler.conversation.rows(per="call")] == [1.0, 0.5]


def test_add_answer_that_belongs_to_another_prompt_or_lacks_versions_is_refused() -> None:
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
    assert sampler.conversation.rows() == []


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_rows_tell_their_conversation_with_versions_and_rewards(name: str) -> None:
    sampler, tools = Sampler(name, random.Random(0)), [ADD]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what?"}]
    _, asking = sampler.call(messages, tools, calls=[{"name": "add", "arguments": {"a": 1, "b": 2}}])
    asking.reward = 0.5
    more = [asking.message, {"role": "tool", "content": "3", "tool_call_id": asking.message["tool_calls"][0]["id"]}]
    _, answered = sampler.call([*messages, *more], tools, content="it is 3")

    row = sampler.conversation.rows(1.0)[-1]

    told = row.info["conversation"]
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "assistant"]
    assert [told[0], told[2]] == [messages[0], more[1]]
    assert told[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert told[3]["content"].strip() == "it is 3"
    if answered.parent is asking:
        assert told[1]["reward"] == 0.5
    assert (told[3]["version_first"], told[3]["version_last"]) == (answered.versions.min(), answered.versions.max())
    assert told[3]["tokens"] == len(answered.output)
    json.dumps(told)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral"])  # Qwen 3 drops the empty reasoning of earlier turns
def test_call_that_goes_on_from_what_is_shown_as_sampled_costs_one_rendering(name, monkeypatch):
    sampler = Sampler(name, random.Random(0))
    renderer, texts = sampler.renderer, list[str]()
    whole, _ = renderer.text, (renderer.generation_prompt, renderer.end_of_turn, renderer.stop_ids)  # each found once
    monkeypatch.setattr(renderer, "text", lambda *args, **options: texts.append(whole(*args, **options)) or texts[-1])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what?"}]
    _, first = sampler.call(messages, content="the answer")
    messages += [{"role": "assistant", "content": "the answer"}, {"role": "user", "content": "no"}]
    prompt, _ = sampler.call(messages, content="it is 12")
    assert prompt.parent is first
    assert len(texts) == 2
    assert prompt.text == texts[1]


def test_prompt_of_text_that_is_not_utf8_is_rejected() -> None:
    conversation = Conversation(ChatRenderer(make_chat_tokenizer("llama3")))
    with pytest.raises(DataError, match="UTF-8"):
        conversation.prompt([{"role": "user", "content": "half \ud83d"}])
    with pytest.raises(DataError, match="UTF-8"):
        conversation.completion("half \ud83d")
