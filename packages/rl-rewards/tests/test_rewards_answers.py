import pytest

from rl_contracts import registry


@pytest.mark.parametrize(
    ("reward", "completions", "answer"),
    [
        ("gsm8k", ["so #### 1,200.0", r"The answer is \boxed{1200}", "<think>3</think> It is 1.2 thousand"], "1200"),
        ("gsm8k", ["no number"], None),
        ("math", [r"\boxed{\dfrac{1}{2}}", r"The answer is $\frac{1}{2}$.", r"#### \frac{1}{2}"], r"\frac{1}{2}"),
        ("math", [r"\boxed{}"], None),
        ("clevr_count_70k", ["[3]", "boxes [12, 40] and [ 03 ]"], "3"),
        ("clevr_count_70k", ["three"], None),
        ("geometry3k", [r"<think>\boxed{2}</think>\boxed{2\sqrt{221}}", r"[2\sqrt{221}]"], r"2\sqrt{221}"),
    ],
)
def test_extract_answer_equal_answers_have_equal_texts(reward, completions, answer):
    extract = registry.load("rl.rewards", reward).extract_answer
    assert {extract(completion) for completion in completions} == {answer}
