"""Synthetic directories of finished runs, for tests of the tools that show them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

NASTY = "</script><script>alert(1)</script><b>bold</b> & \u2028 \ud83d half, whole: \U0001f600 {{data}}"
"""Possible model output that a page must show verbatim."""
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(50)} | {"?": 50}, "unk_token": "?"},
}


def make_run(
    directory: Path, steps: int = 6, completions: int = 4, tokens: int = 12, every: int = 1, **settings: Any
) -> Path:
    """Create the directory of a run of several steps with completions, evaluations, a failure and warnings."""
    draw = random.Random(steps)
    (directory / "rollouts").mkdir(parents=True)
    (directory / "logs").mkdir()
    (directory / "model").mkdir()
    (directory / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    model = {"path": "tiny", "directories": {"tiny": str(directory / "model")}}
    config = {"run_dir": str(directory), "seed": 1, "total_steps": steps, "model": model, **settings}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(_record(draw, i)) + "\n" for i in range(1, steps + 1)))
    for step in range(1, steps + 1, every):
        records = [_completion(draw, step, i, tokens) for i in range(completions)]
        _write(directory / "rollouts" / f"step_{step}-0.jsonl", records)
        learned = [
            {"group_id": rec["group_id"], "episode_id": rec["episode_id"], "tokens": tokens, "advantage": rec["reward"]}
            | {"proximal": [value - 0.1 for value in rec["logprobs"]]}
            for rec in records
        ]
        _write(directory / "rollouts" / f"learned_step_{step}-0.jsonl", learned)
    _write(
        directory / "rollouts" / "eval_step_0-0.jsonl", [_completion(draw, 0, i, tokens) for i in range(completions)]
    )
    (directory / "logs" / "actor-0.log").write_text(
        "2026-11-25 20:02:51.526 WARNING [trainer/0] rl.trainers.gap: the gap is 0.31\n"
        "2026-11-25 20:02:52.526 INFO [trainer/0] rl.trainers: an ordinary line\n"
        "2026-11-25 20:02:53.526 WARNING [trainer/0] rl.trainers.gap: the gap is 0.32\n"
        "\n======== 2026-11-25 20:03:00 rollout-0 was killed by SIGKILL (out of memory?) ========\n"
    )
    failed_group = {
        "step": 2,
        "prompt_id": 1,
        "epoch": 0,
        "group_id": 9,
        "outcome": "failed",
        "reason": "the reward crashed",
    }
    _write(directory / "groups.jsonl", [failed_group])
    return directory


def _record(draw: random.Random, step: int) -> dict[str, float | None]:
    rising = 1 - math.exp(-step / 80)
    names = [f"own/metric_{i}" for i in range(40)]
    return {
        "step": step,
        "version": step,
        "reward/mean": rising + draw.gauss(0, 0.03),
        **({"eval/accuracy": rising} if step % 5 == 1 else {}),
        "length/mean": 200 + 20 * draw.random(),
        "entropy/mean": 0.5 * math.exp(-step / 100) + 0.02 * draw.random(),
        "kl/beh_k3": 1e-4 * draw.random(),
        "gap/mean_abs": 10 ** draw.uniform(-6, -4),
        "staleness/mean": draw.random(),
        "staleness/max": 1.0,
        "grad_norm": math.nan if step == 3 else draw.random(),
        "throughput/mfu": None,
        "throughput/generated_tokens_per_s": 5000 + 500 * draw.random(),
        "throughput/trained_tokens_per_s": 4000 + 500 * draw.random(),
        "time/rollout_wait": 1 + draw.random(),
        "time/train": 2 + draw.random(),
        "time/publish": 0.3,
        "time/gap": 0.1,
        "time/step": 5.5,
        "groups/trained": 8,
        "groups/failed": float(step == 2),
        **{name: draw.random() for name in names},
    }


def _completion(draw: random.Random, step: int, i: int, tokens: int) -> dict[str, Any]:
    calls = [{"function": {"name": "calculator", "arguments": {"expression": "1+2"}}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]},
        {"role": "assistant", "content": "", "tool_calls": calls, "version_first": 0, "reward": 0.5},
        {"role": "tool", "content": "3"},
    ]
    return {
        "prompt": f"question {i} of step {step}: {NASTY}",
        "completion": f"answer {i}: {NASTY}",
        **({"conversation": messages} if i == 1 else {}),
        "answer": "3",
        "reward": round(draw.random(), 3),
        "rejected": "stale" if i == 2 else None,
        "truncated": i == 3,
        "prompt_id": i,
        "group_id": 100 * step + i // 2,
        "episode_id": i % 2,
        "temperature": 1.0,
        "version_first": max(0, step - 1),
        "version_last": step,
        "token_ids": [draw.randrange(50) for _ in range(tokens)],
        "logprobs": [-3 * draw.random() for _ in range(tokens)],
        "versions": [max(0, step - 1)] * (tokens // 2) + [step] * (tokens - tokens // 2),
    }


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
