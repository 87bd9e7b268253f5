"""Calculator tool: values of expressions, and rejection of everything except bounded arithmetic."""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_workflows.agents.calculator import LARGEST, MAX_CHARACTERS, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" (3 + 4) * 2.5", "17.5"),
        ("1 / 3", "0.333333333333"),
        ("1,234,567 - 1,000", "1233567"),
        ("3 \u00d7 4 \u00f7 2 \u2212 1", "5"),
        ("[2^10] * 2", "2048"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 200", str(2**200)),
        ("10**100 / 10**99", "10"),
    ],
)
def test_calculator_expression_returns_value(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').system('true')", "expected numbers"),
        ("'a' * 9", "expected numbers"),
        ("True + 1", "expected numbers"),
        ("(-8) ** 0.5", "not a real number"),
        ("1 << 900", "expected numbers"),
        ("1e400", "larger than"),
        ("9**999", "larger than"),
        ("2 ** 1001", "exponent"),
        ("1 +", "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
        ("(" * MAX_CHARACTERS, "not an arithmetic expression"),
        ("1" * (MAX_CHARACTERS + 1), "characters"),
    ],
)
def test_calculator_other_than_bounded_arithmetic_raises(expression, message):
    with pytest.raises(ValueError, match=message):
        calculator(expression)


def test_calculator_division_by_zero_raises():
    with pytest.raises(ZeroDivisionError):
        calculator("1 / 0")


@given(st.text(alphabet="0123456789.+-*/%()^, ", max_size=MAX_CHARACTERS))
@example("9**9" * 40)
@example("-" * (MAX_CHARACTERS - 1) + "1")
def test_calculator_any_text_quickly_returns_bounded_value_or_raises(expression):
    begin = time.process_time()
    try:
        value = calculator(expression)
    except (ValueError, ArithmeticError):
        value = "0"

    assert abs(Fraction(value)) <= LARGEST
    assert time.process_time() - begin < 1
