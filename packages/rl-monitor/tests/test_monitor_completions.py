"""Rendering of saved completions."""

import pytest

from rl_monitor.completions import last_user_turn

QUESTION = "What is 1 < 2?\nAnswer."


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
        f"{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        f"<bos><start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n",
        f"<s>[INST] {QUESTION} [/INST]",
        f"<\uff5cUser\uff5c>{QUESTION}<\uff5cAssistant\uff5c>",
        f"<|user|>{QUESTION}<|assistant|>",
        QUESTION,
    ],
)
def test_last_user_turn_of_rendered_prompt_is_question(prompt):
    assert last_user_turn({"prompt": prompt}) == QUESTION


def test_last_user_turn_of_conversation_is_last_user_message():
    turns = [("user", "one"), ("assistant", "1"), ("user", [{"type": "text", "text": "two"}]), ("tool", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert last_user_turn({"conversation": messages[:2]}) == "one"
    assert last_user_turn({"conversation": messages}) == "two"
