"""Workflows with images: prompts, conversations of several turns, and tools that return images."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_model import ScriptedEngine
from image_model import load_processor, noise, user, vision_engine
from test_workflows_conversation import Sampler

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import GenerationConfig
from rl_contracts.errors import DataError
from rl_contracts.images import Image
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.testing.image_files import broken_image_files
from rl_contracts.testing.vision_families import VISION_FAMILIES
from rl_workflows import RLVRWorkflow, Ticket
from rl_workflows.agents.conversation import Conversation
from rl_workflows.agents.message_parsing import MessageParser
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.groups import run_group
from rl_workflows.workflows.multi_turn import MultiTurnWorkflow, ToolWorkflow

pytestmark = pytest.mark.slow
GENERATION = GenerationConfig(max_new_tokens=64)
RED, BLUE, GREEN = noise(24, 16, 1), noise(24, 16, 2), noise(32, 16, 3)
CI_FAMILIES = ("qwen2_5_vl", "llava_onevision")


def reward(*args: Any, **data: Any) -> float:
    return 1.0


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_processor("qwen2_5_vl", tmp_path_factory.mktemp("model"), tools=True)


async def test_rlvr_images_reach_server_and_trajectory(processor: Any) -> None:
    engine, messages = vision_engine(processor), [user(RED, "and ", BLUE, "?")]

    [trajectory] = await RLVRWorkflow(processor, GENERATION, reward).arun_episode(engine, {"messages": messages})

    (request,) = engine.requests
    assert request.images == trajectory.images == (RED, BLUE)
    assert request.input_ids == ChatRenderer(processor).render(messages)
    assert trajectory.input_ids.tolist() == [*request.input_ids, *engine.responses[0].output_ids]
    assert trajectory.info["completion"] == "red"


async def test_rlvr_group_runs_processor_once(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, workflow, renders = vision_engine(processor), RLVRWorkflow(processor, GENERATION, reward), list[Any]()
    render = workflow._renderer.render
    monkeypatch.setattr(workflow._renderer, "render", lambda *args: renders.append(args) or render(*args))
    example = {"messages": [user(RED, "color?")], "prompt_id": 0}

    group = await run_group(Episodes(workflow, engine, SystemClock(), seed=0), example, Ticket(0, 0), size=4, needed=4)

    assert len(renders) == 1
    assert [trajectory.images for trajectory in group.trajectories] == [(RED,)] * 4


@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow])
async def test_episode_sampled_placeholder_is_rejected(processor: Any, kind: Callable[..., RLVRWorkflow]) -> None:
    engine = vision_engine(processor, lambda prompt: f"a {processor.image_token}<|im_end|>")

    with pytest.raises(DataError, match="placeholder"):
        await kind(processor, GENERATION, reward).arun_episode(engine, {"messages": [user(RED, "color?")]})


@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow])
async def test_episode_broken_image_is_rejected_with_its_message(
    processor: Any, kind: Callable[..., RLVRWorkflow], tmp_path: Path
) -> None:
    file = tmp_path / "broken.png"
    file.write_bytes(broken_image_files()["truncated PNG"])
    broken = {"role": "user", "content": [{"type": "image", "path": str(file)}]}

    with pytest.raises(DataError, match=r"message 1 \(user\)"):
        await kind(processor, GENERATION, reward).arun_episode(
            vision_engine(processor), {"messages": [user("what?"), broken]}
        )


async def test_multi_turn_feedback_keeps_images(processor: Any) -> None:
    engine = vision_engine(processor)
    workflow = MultiTurnWorkflow(processor, GENERATION, lambda *args, **data: 0.0, turns=2)

    [trajectory] = await workflow.arun_episode(engine, {"messages": [user(RED, "color?")]})

    first, second = engine.requests
    assert first.images == second.images == trajectory.images == (RED,)
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert trajectory.info["conversation"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "color?"}]


@pytest.fixture(
    scope="module",
    params=[name if name in CI_FAMILIES else pytest.param(name, marks=pytest.mark.nightly) for name in VISION_FAMILIES],
)
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    """Return a sampler of unusual tokens for a family; `test_workflows_conversation` has one per chat format."""
    processor = load_processor(request.param, tmp_path_factory.mktemp(request.param))
    sampler = Sampler("llama3", random.Random(1))
    sampler.name, sampler.tokenizer, sampler.renderer = request.param, processor.tokenizer, ChatRenderer(processor)
    sampler.parser = MessageParser(sampler.tokenizer, stop_ids=sampler.renderer.stop_ids)
    sampler.added_tokens = set(sampler.tokenizer.added_tokens_decoder)
    return sampler


def test_conversation_images_of_later_turns_grow_the_prompt(sampler: Sampler) -> None:
    conversation = sampler.conversation = Conversation(sampler.renderer)
    is_joint = sampler.name == "llava_onevision"  # splits an image into tiles only if the conversation has no other
    messages, prompts, images = list[dict[str, Any]](), list[list[int]](), [(RED,), (RED, BLUE), (RED, BLUE)]
    for question in (user(RED, "color?"), {**user("it is ", BLUE), "role": "tool"}, user("and now?")):
        messages.append(question)
        prompt = conversation.prompt(messages)
        turn = sampler.complete(prompt, "it is red<|im_end|>")
        prompts.append(prompt.ids)
        messages.append(dict(turn.message))

    assert [turn.images for turn in conversation.turns] == images
    for index in (1, 2):
        earlier = [*prompts[index - 1], *conversation.turns[index - 1].output.tolist()]
        continues = prompts[index][: len(earlier)] == earlier
        assert continues == (conversation.turns[index].parent is conversation.turns[index - 1])
        assert continues or (is_joint and index == 1 and prompts[1] == sampler.renderer.render(messages[:3]))
    trajectories = conversation.trajectories(1.0)
    assert [trajectory.images for trajectory in trajectories] == ([(RED,), images[2]] if is_joint else [images[2]])
    count = sampler.renderer.count_placeholders
    for trajectory in trajectories:
        whole = [user(*trajectory.images)]
        assert count(trajectory.input_ids.tolist()) == count(sampler.renderer.render(whole))


def test_conversation_other_image_of_equal_size_starts_a_new_tree(sampler: Sampler) -> None:
    conversation = sampler.conversation = Conversation(sampler.renderer)
    for image in (RED, BLUE):
        prompt = conversation.prompt([user(image, "color?")])
        turn = sampler.complete(prompt, "red<|im_end|>")
        following = conversation.prompt([user(BLUE, "color?"), turn.message, user("and now?")])
        assert (following.parent is turn, following.images) == (image is BLUE, (BLUE,))


def test_conversation_placeholder_in_text_is_rejected(sampler: Sampler) -> None:
    (placeholder, *_) = sampler.renderer._placeholders
    conversation = Conversation(sampler.renderer)
    for build in (
        lambda: conversation.prompt([user("what is ", sampler.tokenizer.convert_ids_to_tokens(placeholder))]),
        lambda: conversation.completion([5, placeholder]),
    ):
        with pytest.raises(DataError, match="placeholder"):
            build()


def screenshot(kind: str) -> Any:
    """Takes a picture of the screen.

    Args:
        kind: the kind of result.
    """
    url = {"type": "image_url", "image_url": {"url": GREEN.data_url}}
    results: dict[str, Any] = {
        "image": [{"type": "text", "text": "screen: "}, url],
        "object": [{"type": "image", "image": BLUE.open()}],
        "broken": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        "path": [{"type": "image", "path": "/etc/hostname"}],
        "number": [1, 2],
    }
    return results[kind]


def calling(kinds: list[str]) -> Callable[[str], str]:
    """Return completions that call `screenshot` once for each kind, and then end."""

    def says(prompt: str) -> str:
        made = prompt.count("<tool_call>")
        if made == len(kinds):
            return "it is red<|im_end|>"
        arguments = f'{{"kind": "{kinds[made]}"}}'
        return f'<tool_call>\n{{"name": "screenshot", "arguments": {arguments}}}\n</tool_call><|im_end|>'

    return says


async def run_tools(processor: Any, kinds: list[str]) -> tuple[ScriptedEngine, Any]:
    engine = vision_engine(processor, calling(kinds))
    generation = replace(GENERATION, max_new_tokens=512)
    workflow = ToolWorkflow(processor, generation, reward, tools=[screenshot])
    [trajectory] = await workflow.arun_episode(engine, {"messages": [user(RED, "look")]})
    return engine, trajectory


async def test_tool_images_are_in_the_next_prompt(processor: Any) -> None:
    engine, trajectory = await run_tools(processor, ["image", "object", "number"])

    sent: list[tuple[Image, ...]] = [request.images for request in engine.requests]
    pixels = [image.open().tobytes() for image in trajectory.images]
    assert [len(images) for images in sent] == [1, 2, 3, 3]
    assert sent[-1] == trajectory.images
    assert pixels == [image.open().tobytes() for image in (RED, GREEN, BLUE)]
    for request, response, following in zip(engine.requests, engine.responses, engine.requests[1:], strict=False):
        earlier = [*request.input_ids, *response.output_ids]
        assert following.input_ids[: len(earlier)] == earlier
    contents = [message["content"] for message in trajectory.info["conversation"] if message["role"] == "tool"]
    picture = {"type": "image"}
    assert contents == [[{"type": "text", "text": "screen: "}, picture], [picture], "[1, 2]"]


async def test_tool_broken_image_or_path_becomes_an_error(processor: Any) -> None:
    _, trajectory = await run_tools(processor, ["broken", "path"])

    contents = [message["content"] for message in trajectory.info["conversation"] if message["role"] == "tool"]
    assert [content.partition("image")[0] for content in contents] == [
        "error: screenshot: message 0 (tool): ",
        "error: screenshot: expected text parts, or ",
    ]
    assert trajectory.images == (RED,)
