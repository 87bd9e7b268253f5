"""The last lines of a run."""

import json

from rl_apps.closing import after_sft
from rl_apps.config import SFTConfig


def test_after_sft_accuracy_of_zero_at_first_is_told_without_a_percentage(tmp_path):
    records = [{"step": 0, "loss/eval": 4.0, "eval/accuracy": 0.0}, {"step": 1, "loss/eval": 3.0, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = after_sft(SFTConfig(), tmp_path)
    assert "Held-out loss: 4.0000 at first, 3.0000 at last (-25%)." in lines
    assert "Held-out accuracy: 0.0000 at first, 0.5000 at last." in lines
