"""Console output of the steps of a run."""

import io
import json

import pytest
from rich.console import Console

from rl_monitor.progress import GRPO_COLUMNS, RunProgress, step_line, warnings_of


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"applied": 0.75, "grad_norm": None}, "NOT APPLIED: 25% (loss or gradients not finite)"),
        ({"applied": 0.0, "minibatches/empty": 1.0}, "NOT APPLIED: 100% (no gradient)"),
    ],
)
def test_step_line_reports_step_that_was_not_applied(record, expected):
    assert step_line({"step": 3} | record, GRPO_COLUMNS, 90).endswith(expected)


def test_step_line_of_applied_step_has_no_note():
    assert "APPLIED" not in step_line({"step": 3, "reward/mean": 0.5, "applied": 1.0}, GRPO_COLUMNS, 90)


def test_progress_of_resumed_run_shows_only_new_steps(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    console = Console(record=True, width=80)
    with RunProgress(metrics, 2, {}, console), metrics.open("a") as file:
        file.write('{"step": 2}\n')

    assert console.export_text().splitlines() == ["step 2/2"]


def test_step_line_shows_held_out_reward_without_accuracy():
    line = step_line({"step": 3, "eval/reward": 12.5}, GRPO_COLUMNS, 90)
    assert "held-out reward 12.500" in line
    assert "accuracy" not in line
    both = step_line({"step": 3, "eval/reward": 0.5, "eval/accuracy": 0.5}, GRPO_COLUMNS, 90)
    assert "accuracy 0.500" in both
    assert "reward" not in both


@pytest.mark.parametrize(
    ("record", "warning"),
    [
        ({"truncated/fraction": 0.42}, "42% of the completions were truncated"),
        (
            {"groups/zero_variance": 7, "groups/singleton": 1, "groups/trained": 8},
            "every group had identical rewards (7 groups)",
        ),
        ({"groups/failed": 2}, "2 group(s) failed"),
        ({"applied": 0.5}, "optimizer steps were skipped"),
        ({"grad_norm": 0.0}, "the gradient is exactly 0"),
        (
            {"grad_norm": 0.0, "groups/zero_variance": 8, "groups/trained": 8},
            "every group had identical rewards (8 groups)",
        ),
    ],
)
def test_warnings_of_faulty_step_name_the_fault(record, warning):
    (message,) = warnings_of(record).values()
    assert message.startswith(warning)


def test_warnings_of_healthy_step_are_empty():
    healthy = {"truncated/fraction": 0.1, "groups/zero_variance": 7, "groups/trained": 8, "groups/failed": 0}
    assert warnings_of(healthy | {"applied": 1.0}) == {}


def test_repeated_warning_is_printed_at_growing_intervals(tmp_path):
    metrics, output = tmp_path / "metrics.jsonl", io.StringIO()
    progress = RunProgress(metrics, 9, GRPO_COLUMNS, Console(file=output))
    metrics.write_text("".join(json.dumps({"step": step, "groups/failed": 1}) + "\n" for step in range(9)))

    progress.tick()

    warnings = [line for line in output.getvalue().splitlines() if line.startswith("warning: 1 group(s) failed")]
    assert [line.partition("(also in ")[2][:1] for line in warnings] == ["", "1", "3", "7"]
