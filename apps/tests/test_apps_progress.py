"""What a run says of a step on the console."""

import pytest

from rl_apps.progress import GRPO_COLUMNS, step_line


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"applied": 0.0, "grad_norm": None}, "NOT APPLIED: 100% (loss or gradients not finite)"),
        ({"applied": 0.75, "grad_norm": 1.0}, "NOT APPLIED: 25% (loss or gradients not finite)"),
        ({"applied": 0.0, "minibatches/empty": 1.0}, "NOT APPLIED: 100% (nothing to learn from)"),
    ],
)
def test_step_line_says_that_a_step_was_not_applied(record, expected):
    assert step_line({"step": 3} | record, GRPO_COLUMNS, 90).endswith(expected)


def test_step_line_of_an_applied_step_says_nothing_of_it():
    assert "APPLIED" not in step_line({"step": 3, "reward/mean": 0.5, "applied": 1.0}, GRPO_COLUMNS, 90)
