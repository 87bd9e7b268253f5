"""Round trips: numbers in all usual notations and answer forms are read back exactly."""

# ruff: noqa: RUF001 (models write look-alike characters)
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from rl_rewards import find_answer, gold_number, gsm8k_reward_fn

ANSWER_FORMS = [
    "#### {}",
    "First 3 + 4 = 7.\n#### {}",
    r"Hence $\boxed{{{}}}$.",
    "The answer is {}.",
    "the final answer is: {} clips",
    "**Answer:** {}",
    "A: {}",
    "3 of them, {}",
    "{}",
]


@st.composite
def written_numbers(draw: st.DrawFn) -> tuple[str, Fraction]:
    """Draw the text of a number and its value."""
    sign = draw(st.sampled_from(["", "-", "−"]))
    currency = draw(st.sampled_from(["", "$", r"\$", "€"]))
    percent = draw(st.sampled_from(["", "%", r"\%"]))
    integer = draw(st.integers(0, 10**12))
    kind = draw(st.sampled_from(["integer", "grouped", "latex groups", "decimal", "fraction", "mixed", "frac"]))
    if kind in ("integer", "grouped", "latex groups"):
        separator = {"integer": "", "grouped": ",", "latex groups": "{,}"}[kind]
        text, value = f"{integer:,}".replace(",", separator), Fraction(integer)
    elif kind == "decimal":
        digits = draw(st.text("0123456789", min_size=1, max_size=6))
        text, value = f"{integer:,}.{digits}", integer + Fraction(int(digits), 10 ** len(digits))
    else:
        bottom = draw(st.integers(2, 99))
        top = draw(st.integers(1, bottom - 1))
        text, value = f"{top}/{bottom}", Fraction(top, bottom)
        if kind == "mixed":
            whole = draw(st.integers(1, 999))
            text, value = f"{whole} {text}", whole + value
        elif kind == "frac":
            text = rf"\frac{{{top}}}{{{bottom}}}"
    return f"{sign}{currency}{text}{percent}", -value if sign else value


@given(written_numbers(), st.sampled_from(ANSWER_FORMS))
def test_find_answer_of_a_formatted_number_round_trips(written, answer_form):
    text, value = written

    number = find_answer(answer_form.format(text))

    assert number is not None
    assert number.value == value
    assert gold_number(text) == value
    assert gsm8k_reward_fn("", answer_form.format(text), [], [], answer=f"Because.\n#### {text}") == 1.0


@given(written_numbers(), written_numbers(), st.sampled_from(ANSWER_FORMS))
def test_reward_of_two_formatted_numbers_is_one_only_if_equal(written, gold, answer_form):
    reward = gsm8k_reward_fn("", answer_form.format(written[0]), [], [], answer=gold[0])

    assert reward == float(written[1] == gold[1])


@given(st.text(max_size=400), st.integers(-(10**6), 10**6))
def test_reward_of_any_text_is_zero_or_one(text, gold):
    assert gsm8k_reward_fn("", text, [], [], answer=gold) in (0.0, 1.0)


@given(st.text("0123456789.,/-+$#%{}\\ \n=:xA½e()", max_size=80))
def test_find_answer_of_number_like_text_never_raises(text):
    find_answer(text)
    find_answer(f"#### {text}")
    find_answer(rf"\boxed{{{text}}}")
