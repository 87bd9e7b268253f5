"""Reward for mathematical answers."""

# ruff: noqa: RUF001 (models write look-alike characters)
import math
import subprocess
import sys
import threading
import time

import pytest

from rl_contracts.errors import RewardError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_rewards import math_reward_fn
from rl_rewards.answer_forms import marked_answer, read_part, stated_answers


def check(table):
    """Compare the rewards of (completion, gold answer, reward)."""
    assert [(text, gold, math_reward_fn("", text, [], [], answer=gold)) for text, gold, _ in table] == table


def test_math_reward_is_one_only_for_equal_expressions():
    check(
        [
            (r"so $\boxed{\frac{1}{2}}$", "1/2", 1.0),
            (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
            (r"\boxed{(x+1)^2}", "x^2+1", 0.0),
            (r"The answer is $\sqrt{8}$.", r"2\sqrt{2}", 1.0),
            (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
            (r"\boxed{x = 5}", "5", 1.0),
            (r"\boxed{7}", r"Adding gives $\boxed{7}$.", 1.0),
            ("3 + 4 = 7\n#### 7", "3 + 4 = 7\n#### 7", 1.0),
            ("the answer is 5", 5, 1.0),
            (r"\boxed{7:32}", r"S_{MBCN}:S=7:32", 1.0),
            ("I do not know", "4", 0.0),
        ]
    )


NOTATIONS = {
    "percent": [
        (r"25\%", "25"),
        (r"25\%", "0.25"),
        (r"25\%", r"25\text{ percent}"),
        (r"\frac{1}{2}\%", r"0.5\%"),
    ],
    "numbers": [
        ("42.", "42"),
        ("3½", r"\frac{7}{2}"),
        ("1 1/2", "1.5"),
        ("１２", "12"),
        ("٣", "3"),
        (r"12\,500", "12500"),
        ("12'500", "12,500"),
        (r"0.123\,456\,7", "0.1234567"),
        ("1.5e3", "1500"),
        (r"0.1\overline{6}", "1/6"),
        ("1/700", "0.001429"),
        ("6.626e-34", r"6.626 \times 10^{-34}"),
    ],
    "units": [
        (r"5~\text{m}", "5"),
        (r"3\sqrt{2}\,cm", r"3\sqrt{2}"),
        ("5π m³", r"5\pi"),
        ("10 cm²", "10"),
        (r"9.8\;m/s^2", "9.8"),
        (r"10^\circ C", "10"),
        (r"10^{\circ}\,F", "10"),
        (r"60\degree", "60"),
        (r"60 ^ { \circ }", r"60^\circ"),
        (r"3 1/2 hours", "3.5"),
    ],
    "expressions": [
        ("√3", r"\sqrt{3}"),
        ("√(2)/2", r"\frac{\sqrt{2}}{2}"),
        ("x² + 1", "x^2+1"),
        ("(−∞, 3]", r"(-\infty,3]"),
        (r"1 - \frac{1}{\mathrm{e}}", "1-1/e"),
        ("E_1,E_2", "E_1, E_2"),
        (r"x=2~\text{or}~x=3", "2,3"),
        (r"\begin{pmatrix}1 \\ 2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("sin x", r"\sin x"),
        ("ab", "ba"),
        ("x < 1", "-x > -1"),
        ("z = 1 + 1 = 2", "z = 3 + 3 = 2"),
        ("x^*", "x^*"),
        ("3:2", r"\frac{3}{2}"),
    ],
    "texts": [
        ("07:05", "7:05"),
        ("12:00 noon", r"12:00 \text{ noon}"),
        ("Monday, 12:00", "monday, 12:00"),
        ("1001_2", "1001_{2}"),
        ("No solution", r"\text{no solution}"),
        ("C", r"\textbf{(C)}\ 12"),
        ("A and C", "A, C"),
    ],
}


@pytest.mark.parametrize("kind", NOTATIONS)
def test_math_reward_of_two_notations_is_one_in_both_roles(kind):
    check([(rf"So $\boxed{{{one}}}$.", other, 1.0) for one, other in NOTATIONS[kind]])
    check([(rf"So $\boxed{{{other}}}$.", one, 1.0) for one, other in NOTATIONS[kind]])


DIFFERENT = {
    "texts": [
        ("listen", "silent"),
        ("no", "on"),
        ("odd", "d o d"),
        ("forty two", "42"),
        ("12:00", "1:00"),
        ("12:00 noon", "12:00"),
        ("3:2", "1.5"),
        ("1001_2", "1001"),
        ("12/25/2020", "25/12/2020"),
        ("C", "D"),
        ("A", "A, C"),
        ("(a)^2", "(a)^3"),
    ],
    "numbers": [
        (r"1.6 \times 10^{-19}", r"q = 3.2 \times 10^{-19}\text{ C}"),
        ("0.00000001", "0.00000002"),
        ("10^{-9}", "0"),
        ("(0.00000001, 3]", "(0.00000002, 3]"),
        ("0.00000001, 3", "0.00000002, 3"),
        (r"\begin{pmatrix}0.00000001 & 3\end{pmatrix}", r"\begin{pmatrix}0.00000002 & 3\end{pmatrix}"),
        ("1 2", "12"),
        (r"1\quad\; 2", "12"),
        (r"25\%", r"0.25\%"),
        (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
    ],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_math_reward_of_different_answers_is_zero_in_both_roles(kind):
    check([(rf"So $\boxed{{{one}}}$.", other, 0.0) for one, other in DIFFERENT[kind]])
    check([(rf"So $\boxed{{{other}}}$.", one, 0.0) for one, other in DIFFERENT[kind]])


def test_math_reward_with_boxes_reads_the_last_answer():
    check(
        [
            (r"The roots are \boxed{1} and \boxed{2}.", "1,2", 1.0),
            (r"The roots are \boxed{1} and \boxed{2}.", "2", 0.0),
            (r"\boxed{(98, 2)} \quad \text{and} \quad \boxed{(99, 503)}", "(98, 2), (99, 503)", 1.0),
            (r"\boxed{1,-2}", r"The solutions are \boxed{1} and \boxed{-2}.", 1.0),
            (r"First \boxed{4}. Wait, no: \boxed{5}", "5", 1.0),
            (r"\boxed{1/2} = \boxed{0.5}", "0.5", 1.0),
            (r"\boxed{1} papers and \boxed{2} bins", "1,2", 1.0),
            (r"\boxed{1/2} ≈ \boxed{0.4}", "0.4", 1.0),
            (r"The base is $\boxed{3}$, and the area is $\boxed{9}$.", "9", 1.0),
            (r"Part a: \boxed{3} and part b: \boxed{5}. Sum: \boxed{8}", "8", 1.0),
            (r"\boxed{3}，所以 \boxed{9}", "9", 1.0),
            ("(a) $\\boxed{8}$\n\n(b) $\\boxed{9}$", "8, 9", 1.0),
            (r"$x_1 = \boxed{2}$ or $x_2 = \boxed{5}$", "2, 5", 1.0),
            (r"\begin{aligned} \lambda &= \boxed{2} \\ \mu &= \boxed{5} \end{aligned}", "2, 5", 1.0),
            (r"Maybe \boxed{7}? No: \boxed{12", "7", 0.0),
            (r"\boxed{7} then \boxed{ }", "7", 0.0),
            (r"Write it as \boxed{}. It is \boxed{7}.", "7", 1.0),
            (r"\boxed 9", "9", 1.0),
            (r"\framebox{42}", "42", 1.0),
        ]
    )


FORMS = {
    "tags": [
        (r"I thought of \boxed{4}. <answer>\boxed{5}</answer> It is not 6.", "5", 1.0),
        ("<answer></answer> It is 5", "5", 1.0),
        ("<answer>12 apples in 3 bags</answer>", "12", 1.0),
        ("<answer>12 apples in 3 bags</answer>", "3", 0.0),
        ("<answer>\nWe add 3 and 4.\nThe answer is 7.\n</answer>", "7", 1.0),
        ("<answer>no solution</answer>", "no solution", 1.0),
    ],
    "hashes": [
        ("#### Answer: 12", "12", 1.0),
        ("#### Final Answer\n12 cm", "12", 1.0),
        ("#### Step 2: Double it\n14", "14", 1.0),
        ("#### 12 apples (3 bags)", "12", 1.0),
        ("#### 25% of all 12", "0.25", 1.0),
        ("#### 4 May 2021", "4 May 2021", 1.0),
        ("#### 12<|im_end|>", "12", 1.0),
        ("#### Total cost = $18", "18", 1.0),
        ("#### none of the 5", "5", 0.0),
        ("#### 5\n\nCheck: the answer is 6 - 1.", "5", 1.0),
        ("#### **x^{*}**", "x^*", 1.0),
    ],
    "final sentence": [
        (r"That is \boxed{200}. Final Answer: The final answer is $10,455$. I hope it is correct.", "10455", 1.0),
        ("That is \\boxed{200}. The final answer is\n$10,455$.\nI hope it is correct.", "10455", 1.0),
        (r"That is \boxed{200}. So the final answer is $10,455$.", "10455", 1.0),
        (r"That is \boxed{200}. So the final answer is shown above.", "200", 1.0),
    ],
    "statements": [
        ("The answer is 3 1/2 hours.", "3.5", 1.0),
        (r"So the answer is $\frac{9}{4}$ cups.", "9/4", 1.0),
        ("The solutions are $x=1$ and $x=2$.", "1,2", 1.0),
        ("The answer equals Evelyn, and Bob is wrong.", "Evelyn", 1.0),
        ("The correct option is **C**.", "C", 1.0),
        ("Option C is the correct answer.", "C", 1.0),
        ("The answer is a large number", "A", 0.0),
        ("The answer is 12:00.", "12:00", 1.0),
        ("**The answer is x^***", "x^*", 1.0),
        ("The answer is 25%.", r"25\%", 1.0),
        ("The answer is 5 :)", "5", 1.0),
    ],
    "labels": [
        ("Answer: C", "C", 1.0),
        ("Answer = Evelyn", "Evelyn", 1.0),
        ("**Answer:** (C) 12 m", "C", 1.0),
        ("A and B are too small. Answer: C", "A", 0.0),
        ("Answer: x = 3 or x = -3", "3,-3", 1.0),
        ("### Final Answer\n\\[\n\\frac{5}{6}\n\\]", "5/6", 1.0),
        ("答案：5", "5", 1.0),
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_math_reward_finds_answers_in_every_form(form):
    check(FORMS[form])


@pytest.mark.parametrize(
    "unit", [r"\boxed{", r"\boxed{1} and ", "answer is ", "final answer is 1 ", "<answer>", "(A) is "]
)
def test_answer_search_in_adversarial_text_takes_linear_time(unit):
    text = unit * (1_000_000 // len(unit)) + "}" * 100_000

    started = time.process_time()
    marked_answer(read_part(text))
    stated_answers(text)

    assert time.process_time() - started < 10.0  # about 0.5 s


@pytest.mark.parametrize("answer", [None, "???", "1/0", r"\frac{1}{", r"\boxed{5", math.nan, "1e400"])
def test_math_reward_without_a_readable_gold_answer_raises_reward_error(answer):
    with pytest.raises(RewardError, match="expected `answer`"):
        math_reward_fn("", r"\boxed{5}", [], [], answer=answer)


def test_math_reward_works_outside_the_main_thread():
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(math_reward_fn("", r"\boxed{5}", [], [], answer="5")))

    thread.start()
    thread.join(30)

    assert rewards == [1.0]


@pytest.mark.slow
async def test_math_reward_of_endless_comparison_fails_at_the_deadline():
    reward = AsyncRewardWrapper("math", timeout=3.0)

    with pytest.raises(RewardError):
        await reward("", r"\boxed{9^{9^{9^{9}}}}", [], [], answer="5")

    reward.close()


def test_import_of_rl_rewards_loads_neither_torch_nor_sympy():
    code = "import sys, rl_rewards; assert not {'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
