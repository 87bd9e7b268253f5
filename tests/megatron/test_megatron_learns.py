"""Training the embedded MoE model with its experts on two ranks raises the reward."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

COMMAND = str(Path(sys.executable).parent / "gsm8k-grpo")
EXPERTS = ("allocation=embedded:d1+megatron:(attn:d2|ffn:e2)", "model.path=embedded-moe", "seed=1")


@pytest.mark.nightly
@pytest.mark.timeout(3300)
def test_moe_on_two_expert_ranks_raises_reward_by_a_fifth(tmp_path, record_property):
    line = [COMMAND, *EXPERTS, f"run_dir={tmp_path / 'run'}", "total_steps=200", "evaluation.examples=0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]

    first, last = mean(rewards[:5]), mean(rewards[-5:])
    record_property("mean reward, first and last five steps", f"{first:.3f}, {last:.3f}")
    assert last >= first + 0.2
    assert all(abs(r["experts/dropped"]) < 1e-9 for r in records if "experts/dropped" in r)
    assert any("experts/entropy" in record for record in records)
