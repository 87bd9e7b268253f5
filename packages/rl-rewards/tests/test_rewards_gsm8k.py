"""GSM8K reward on answers in the notations that models use."""

# ruff: noqa: RUF001 (models write look-alike characters)
import time
from fractions import Fraction

import pytest

from rl_contracts.errors import RewardError
from rl_rewards import find_answer, gold_number, gsm8k_reward_fn

WORKED = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


def score(completion: str, answer: object) -> float:
    return gsm8k_reward_fn("", completion, [], [], answer=answer)


HASHES = [
    (WORKED, 72),
    ("#### 72", 72),
    ("####72", 72),
    ("####   72   ", 72),
    ("####: 72", 72),
    ("####\n72", 72),
    ("She sold 72.\n#### 72.", 72),
    ("#### $72", 72),
    (r"#### \$72", 72),
    ("#### $72$", 72),
    (r"#### \(72\)", 72),
    (r"#### \boxed{72}", 72),
    ("#### **72**", 72),
    ("#### `72`", 72),
    ("#### -5", -5),
    ("#### - 5", -5),
    ("#### −5", -5),
    ("#### -$5", -5),
    ("#### $-5", -5),
    ("#### 1,234", 1234),
    ("#### 1,234,567", 1234567),
    ("#### 1,234.50", Fraction("1234.5")),
    ("#### 12 500", 12500),
    ("#### $1 234 567.50", Fraction("1234567.5")),
    ("#### 12'500", 12500),
    ("#### 12’500", 12500),
    ("#### 0.75", Fraction(3, 4)),
    ("#### .75", Fraction(3, 4)),
    ("#### 18.00", 18),
    ("#### 20%", 20),
    ("#### 20 %", 20),
    (r"#### 20\%", 20),
    ("#### 3/4", Fraction(3, 4)),
    ("#### 1 3/4", Fraction(7, 4)),
    ("#### 72 clips", 72),
    ("#### 72 clips in April and 5 in May", 72),
    ("#### 50 cents", 50),
    ("#### 5kg", 5),
    ("#### €5", 5),
    ("#### 5€", 5),
    ("#### 3 + 4 = 7", 7),
    ("#### x = 5", 5),
    ("#### Total cost = $18", 18),
    ("#### 5\n\nLet me check that: 2 + 3 = 5, and 4 + 3 = 7.", 5),
    ("Draft:\n#### 10\nNo, I forgot the tip.\n#### 12", 12),
    ("I get \\boxed{10}, hence\n#### 12", 12),
    ("The answer is 10.\n#### 12", 12),
    ("#### 18. I hope it is correct.", 18),
    ("#### 12<|im_end|>", 12),
    ("#### 2e3", 2000),
    # Markdown headings
    ("#### Step 1: Add\n3 + 4 = 7\n#### Step 2: Double\n14\n\\boxed{14}", 14),
    ("#### 1. Add the clips\n48 + 24 = 72\n#### 2. Answer\nShe sold \\boxed{72} clips.", 72),
    ("#### 1) Add the clips\nSo she sold 72", 72),
    ("#### Final Answer\n72", 72),
    ("#### Final Answer: 72", 72),
    ("#### The answer is 72\n", 72),
]

BOXES = [
    (r"\boxed{72}", 72),
    (r"Thus $\boxed{72}$.", 72),
    (r"\[ \boxed{72} \]", 72),
    (r"\boxed {72}", 72),
    (r"\fbox{72}", 72),
    (r"\boxed{ 72 }", 72),
    (r"\boxed{-5}", -5),
    (r"\boxed{−5}", -5),
    (r"\boxed{- 5}", -5),
    (r"\boxed{\$72}", 72),
    (r"\boxed{-\$5}", -5),
    (r"\boxed{\$1,234.50}", Fraction("1234.5")),
    (r"\boxed{1{,}234}", 1234),
    (r"\boxed{1,\!234}", 1234),
    (r"\boxed{1\,234}", 1234),
    (r"\boxed{20\%}", 20),
    (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{\dfrac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{\tfrac34}", Fraction(3, 4)),
    (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4)),
    (r"\boxed{\frac{-3}{4}}", Fraction(-3, 4)),
    (r"\boxed{1\frac{3}{4}}", Fraction(7, 4)),
    (r"\boxed{1 \frac{3}{4}}", Fraction(7, 4)),
    (r"\boxed{\frac{36}{2}}", 18),
    (r"\boxed{3/4}", Fraction(3, 4)),
    (r"\boxed{72\text{ clips}}", 72),
    (r"\boxed{72 \text{ clips}}", 72),
    (r"\boxed{72~\mathrm{kg}}", 72),
    (r"\boxed{90^\circ}", 90),
    (r"\boxed{90^{\circ}}", 90),
    (r"\boxed{\text{72}}", 72),
    (r"\boxed{\textbf{72}}", 72),
    (r"\boxed{\text{She sold } 72 \text{ clips}}", 72),
    (r"\boxed{x = 5}", 5),
    (r"\boxed{48 + 24 = 72}", 72),
    (r"\boxed{\text{Total} = \$72}", 72),
    (r"\boxed{\boxed{72}}", 72),
    (r"\boxed{{{72}}}", 72),
    (r"First \boxed{10}, then \boxed{12}.", 12),
    (r"\boxed{7} is wrong, 12 is right: \boxed{}", 12),
    (r"\boxed{12} since 4 + 8 = 12 and not 13", 12),
    (r"The answer is 10, no: \boxed{12}", 12),
    (r"\boxed{1.5 \times 10^6}", 1500000),
    (r"\boxed{2 \times 10^{3}}", 2000),
    (r"\boxed{\approx 5}", 5),
    (r"\(\{3\}\) so \boxed{72}", 72),
    (r"so \boxed{72", 72),  # truncated: the last number counts
    (r"Maybe \boxed{7}? No: \boxed{72", 72),
]

STATEMENTS = [
    ("The answer is 72", 72),
    ("The answer is 72.", 72),
    ("the final answer is: 72", 72),
    ("The answer is $72.", 72),
    ("The answer is $72.50.", Fraction("72.5")),
    ("The answer is \\$72.", 72),
    ("The answer is **72**.", 72),
    ("The answer is 1,234.", 1234),
    ("The answer is -5.", -5),
    ("The answer is 3/4.", Fraction(3, 4)),
    ("The answer is 1½ hours.", Fraction(3, 2)),
    ("The answer is ½.", Fraction(1, 2)),
    ("The answer is 1 and 1/2 hours.", Fraction(3, 2)),
    ("The answer is 20%.", 20),
    ("The answer is 20 percent, up from 10.", 20),
    ("The answer is therefore 72", 72),
    ("The answer would be 72 clips", 72),
    ("The correct answer is $\\boldsymbol{72}$", 72),
    ("The answer to the question is 72", 72),
    ("The answer is that she sold 72 clips.", 72),
    ("The answer is 48 + 24 = 72.", 72),
    ("The answer is x = 72.", 72),
    ("The answer is:\n\n72", 72),
    ("The answer is\n\\[\n72\n\\]", 72),
    ("The answer is 18, since 3 * 6 = 18 and not 19.", 18),
    ("The answer is 72. She sold 48 in April and 24 in May.", 72),
    ("The answer is 10. Wait, the answer is 12.", 12),
    ("The answers are 72.", 72),
    ("The correct option is 72, of 80 in all.", 72),
    ("The answer is 3.5 hours.", Fraction("3.5")),
    ("The answer is $2 million.", 2000000),
    ("The answer is 2 million.", 2),  # asked for in millions
    ("The answer is obtained by adding 3 and 4, which makes 7", 7),
    ("The answer is 3 + 4, so 7", 7),
    ("The answer is 3 times 6 = 18.", 18),
    ("The answer is 20% of 50 = 10.", 10),
    ("The answer is 48 clips + 24 clips = 72 clips.", 72),
    ("The answer is 72 because 48 + 24 = 72 and 72 - 48 = 24.", 72),
    ("The answer is 72 (48 + 24 = 72).", 72),
    ("The answer (in dollars) is 72, for 3 days.", 72),
    ("To answer this, note that there are 12 eggs in a dozen. He has 36.", 36),
    ("To answer the question, let us see what is 3 + 4. It is 7.", 7),
]

LABELS = [
    ("Answer: 72", 72),
    ("ANSWER: 72", 72),
    ("**Answer:** 72", 72),
    ("**Answer**: 72", 72),
    ("### Answer: 72 clips\n\nThere are 2 months.", 72),
    ("### Final Answer\n\n72", 72),
    ("**Final Answer**\n\n$72$", 72),
    ("Final Answer: $1,234.00", 1234),
    ("Answer (in dollars): 72", 72),
    ("Answer：72", 72),
    ("Answer = 72", 72),
    ("Answer: -5", -5),
    ("Answer: 5/8", Fraction(5, 8)),
    ("Answer: 72\n\nExplanation: 48 in April and 24 in May.", 72),
    ("Answer: 48 + 24 = 72", 72),
    ("Answer: 48 + 24 = 72 (over 2 months)", 72),
    ("Answer: she sold 72 clips", 72),
    ("Answer: She sold 48/2 = 24 in May.\nTogether that makes 72", 72),
    ("Answer: First, look at April.\nThere were 48.\nIn all 72", 72),
    ("Answer:\n- 72 clips\n", 72),  # a bullet, not a sign
    ('{"reasoning": "48 + 24", "answer": 72, "unit": 1}', 72),
    ("To answer this question, follow these steps:\n1. He has 12.\n2. He buys 24.\nHe has 36", 36),
    ("Let me find the answer\n48 clips in April\n24 in May\n72 in all", 72),
    ("Answer: 72. That is for 2 months.", 72),
    ("Final answer\n1. He has 12.\n2. He buys 24.\nHe has 36", 36),
    ("A: 72", 72),
    ("A: $72", 72),
    ("A: **72**", 72),
    ("Q: How many?\nA: 72\n", 72),
    ("Q: How many in 2 months?\nA: 72\nThat is for 2 months.", 72),
    ("A: 48 clips + 24 clips = 72 clips", 72),
    ("A: 18 dollars for 3 days", 18),
    ("A: Natalia sold 48/2 = 24 clips in May. In total 48+24 = 72", 72),
    ("A: Natalia sold 48/2 = 24 clips in May.\nIn total 72.", 72),
]

LAST_NUMBERS = [
    ("72", 72),
    ("She sold 72 clips.", 72),
    ("48 + 24 = 72", 72),
    ("48+24=72", 72),
    ("10 - 15 = -5", -5),
    ("10-15=-5", -5),
    ("10 - 5", 5),
    ("So it costs $1,234.50!", Fraction("1234.5")),
    ("so he has (72)", 72),
    ("In total, 12 500 dollars", 12500),
    ("of 12 there are 500", 500),
    ("In 2024 500 people", 500),
    ("12 boxes of 3 1/2", Fraction(7, 2)),
    ("so he pays 5 dollars and 3/4", Fraction(23, 4) - 5),
    ("In total, 1 3/4", Fraction(7, 4)),
    ("first 12, then 48/2", 24),
    ("答案是72。", 72),
    ("答案是７２。", 72),
    ("total is 1\u202f234\u202f567 grams", 1234567),
    ("it is—5", 5),
    ("the temperature fell to –5", -5),
    ("she sold 72 m² of it", 72),
    ("It has 72 H2O", 72),
    ("x2 is 72", 72),
    ("He arrives with 72 at 3:30", 72),
    ("72 with version 1.2.3", 72),
    ("<answer>72</answer>", 72),
    ("<answer>72 clips</answer> for 3 days", 72),
    ("<Answer>\n72 clips\n</ANSWER> for 3 days", 72),
    (r"I thought of \boxed{10}. <answer>\boxed{72}</answer> That is for 3 days.", 72),
    ("<answer>unknown</answer> or 72", 72),
    ("<think>maybe \\boxed{10}? #### 11</think>She sold 72 clips.", 72),
    ("*72*", 72),
    ("That's 72...", 72),
    ("and so...72", 72),
    ("Total: ₹500", 500),
    ("Rs.500", 500),
    ("US$500", 500),
    ("+5", 5),
    (r"So, Janet makes \( 9 \times 2 = 18 \) dollars every day.", 18),
    (r"\[ 9 \text{ eggs} \times \$2/\text{egg} = \$18 \]", 18),
    (r"Thus it costs **$18.00** in total.", 18),
    (r"Thus it costs $\$18$ per day.", 18),
    ("007", 7),
    ("3.", 3),
]


@pytest.mark.parametrize(
    "table",
    [HASHES, BOXES, STATEMENTS, LABELS, LAST_NUMBERS],
    ids=["hashes", "boxes", "statements", "labels", "last numbers"],
)
def test_reward_of_right_answer_is_one_and_of_other_numbers_zero(table):
    rewards = [(text, [score(text, number) for number in (gold, gold + 1, -gold)]) for text, gold in table]

    assert rewards == [(text, [1.0, 0.0, 0.0]) for text, _ in table]


def test_reward_without_a_number_is_zero():
    for completion in ("", r"\boxed{}", "The answer is five.", "x2 and H2O", "5/0"):
        assert find_answer(completion) is None, completion
        assert score(completion, 72) == 0.0, completion


def test_reward_of_a_near_miss_is_zero():
    assert score("#### 0.33", "1/3") == 0.0
    assert score("#### 0.3333333333333333", "1/3") == 0.0
    assert score("#### 9007199254740993", 9007199254740992) == 0.0  # equal as floats
    assert score("#### 3-5", 3) == 0.0
    assert score("\\boxed{3^2}", 3) == 0.0


GOLD = [
    (WORKED, 72),
    ("It is #### in the text.\n#### -5", -5),
    ("72", 72),
    (" $1,234.50 ", Fraction("1234.5")),
    (r"\frac{3}{4}", Fraction(3, 4)),
    ("20%", 20),
    ("12 500", 12500),
    ("3 thousand", 3000),
    ("2 million", 2000000),
    ("1.5 billion", 1500000000),
    ("4 trillion", 4000000000000),
    (72, 72),
    (0.1, Fraction(1, 10)),
    (Fraction(3, 4), Fraction(3, 4)),
]


def test_gold_number_of_a_worked_answer_or_a_number_is_its_value():
    assert [gold_number(answer) for answer, _ in GOLD] == [gold for _, gold in GOLD]


@pytest.mark.parametrize("answer", [None, "#### none", "72 or 73", float("nan"), float("inf"), True, [72]], ids=repr)
def test_gold_number_that_is_missing_or_unreadable_raises_reward_error(answer):
    with pytest.raises(RewardError, match="expected `answer`"):
        gsm8k_reward_fn("", "#### 72", [], [], answer=answer)


def test_reward_requires_answer_and_ignores_other_data():
    with pytest.raises(RewardError, match="no answer"):
        gsm8k_reward_fn("", "#### 72", [], [])
    assert gsm8k_reward_fn("q", "#### 72", [1], [2], answer="72", prompt_id=3, messages=[]) == 1.0


@pytest.mark.parametrize(
    "unit",
    [
        "1", "1,234", "1 1/", "- ", "$ ", ".", " ", "#### ", "{", "\\boxed{", "\\boxed{1}{", "\\frac{1}{", "answer is ",
        "answer to ", "answer (", "the answer to is 1 1 ", "1 and 1 and ", "A: 1\n", "1=", "1*10^9", "1½", "1\u202f234",
        "</think>", "1 million",
    ],
    ids=repr,
)  # fmt: skip
def test_reward_of_an_adversarial_text_takes_bounded_time(unit):
    text = unit * (1_000_000 // len(unit))

    started = time.process_time()
    score(text, 72)
    score("x" + text + "x", 72)
    score(text + " #### 72", 72)

    assert time.process_time() - started < 3.0  # takes about 0.1 s; the limit allows for a busy machine


def test_reward_of_a_long_text_reads_only_its_end():
    assert score("word " * 1_000_000 + "#### 72", 72) == 1.0
    assert score("7" * 1_000_000, 7) == 0.0
