"""Peer of `grpo_step.py`: TRL's GRPOTrainer on the same prompts in one process. The last line is one JSON object.

python grpo_step_trl.py JOB.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from imposed_lengths import CASES, even_fraction
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

COMMON_SETTINGS: dict[str, Any] = {
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "shuffle_dataset": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""TRL settings of all comparisons: the gradient clipping of `gsm8k-grpo`, no shuffling, and training only."""


class ImposedLengths(LogitsProcessor):
    """Forbid the end token until a completion has its length minus one, then force it."""

    def __init__(self, lengths: list[int], prompt_tokens: int, end_id: int) -> None:
        self.lengths, self.prompt_tokens, self.end_id = torch.tensor(lengths), prompt_tokens, end_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [completions, vocabulary] with the end token forbidden or forced."""
        ends = input_ids.shape[1] - self.prompt_tokens + 1 >= self.lengths
        scores = scores.masked_fill(ends[:, None], float("-inf"))
        scores[:, self.end_id] = torch.where(ends, 0.0, float("-inf"))
        return scores


class StepTimer(TrainerCallback):
    """Record the end time of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def impose_lengths(model: Any, prompt_ids: dict[tuple[int, ...], int], case: str, end_id: int) -> list[int]:
    """Wrap `model.generate` to impose the lengths of `case`; return the list that collects the tokens per call."""
    generate, counts = model.generate, []

    def generate_imposed(**arguments: Any) -> Any:
        ids, mask = arguments["input_ids"], arguments["attention_mask"].bool()
        samples: Counter[int] = Counter()
        lengths = []
        for row, is_prompt in zip(ids, mask, strict=True):
            prompt = prompt_ids[tuple(row[is_prompt].tolist())]
            lengths.append(CASES[case](prompt, samples[prompt]))
            samples[prompt] += 1
        counts.append(sum(lengths))
        processor = ImposedLengths(lengths, ids.shape[1], end_id)
        return generate(**arguments, logits_processor=LogitsProcessorList([processor]))

    model.generate = generate_imposed
    return counts


class Reward:
    """Reward of `gsm8k-grpo` in this benchmark; also counts tokens per step."""

    __name__ = "even_fraction"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        return [even_fraction(None, None, [], ids) for ids in completion_ids]


def main(path: str) -> None:
    """Train with the settings of the job and print the measurements."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rows = job["rows"]  # in the order of the other side
    rendered_prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    prompt_ids = {tuple(ids): row["prompt_id"] for ids, row in zip(rendered_prompts, rows, strict=True)}
    counts = impose_lengths(model, prompt_ids, job["case"], tokenizer.eos_token_id)
    timer, reward, warmup, steps = StepTimer(), Reward(), job["warmup"], job["steps"]
    config = GRPOConfig(
        output_dir=job["directory"],
        max_steps=warmup + steps,
        per_device_train_batch_size=job["prompts"] * job["group"],
        num_generations=job["group"],
        max_completion_length=max(CASES[job["case"]](row["prompt_id"], s) for row in rows for s in range(job["group"])),
        temperature=1.0,
        beta=0.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=job["weight_decay"],
        adam_beta2=job["beta2"],
        **COMMON_SETTINGS,
        seed=job["seed"],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[timer],
    )
    trainer.train()
    if reward.tokens != counts:
        raise SystemExit(f"TRL: expected {counts} tokens per step, found {reward.tokens}")
    measurements = {
        "seconds": timer.ends[-1] - timer.ends[warmup - 1],
        "completions": job["prompts"] * job["group"] * steps,
        "tokens": sum(counts[warmup : warmup + steps]),
    }
    print(json.dumps(measurements))


if __name__ == "__main__":
    main(sys.argv[1])
