"""Peer of `grpo_samples.py`: TRL's GRPOTrainer on the demo's problems. The last line is one JSON object.

python grpo_samples_trl.py JOB.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from grpo_step_trl import COMMON_SETTINGS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl_rewards.gsm8k import gsm8k_reward_fn


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1.0 for each correct completion, else 0.0."""
    texts = [completion[-1]["content"] for completion in completions]
    return [gsm8k_reward_fn("", text, [], [], answer=gold) for text, gold in zip(texts, answer, strict=True)]


class Evaluation(TrainerCallback):
    """Evaluate greedily before the first step and every few steps; stop the run at the goal."""

    def __init__(self, job: dict[str, Any], model: Any, tokenizer: Any) -> None:
        self.job, self.model, self.tokenizer = job, model, tokenizer
        self.curve: list[tuple[int, float]] = []
        self.prompt_ids = [
            tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            for row in job["held_out"]
        ]

    @torch.inference_mode()
    def accuracy(self) -> float:
        """Return the fraction of correct completions."""
        width = max(map(len, self.prompt_ids))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in self.prompt_ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in self.prompt_ids])
        training = self.model.training
        self.model.eval()
        output_ids = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=self.job["max_new_tokens"], pad_token_id=pad
        )
        self.model.train(training)
        texts = self.tokenizer.batch_decode(output_ids[:, width:], skip_special_tokens=True)
        golds = [row["answer"] for row in self.job["held_out"]]
        rewards = [gsm8k_reward_fn("", text, [], [], answer=gold) for text, gold in zip(texts, golds, strict=True)]
        return sum(rewards) / len(rewards)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.curve.append((0, self.accuracy()))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.job["every"] == 0:
            self.curve.append((state.global_step, self.accuracy()))
            control.should_training_stop = self.curve[-1][1] >= self.job["goal"]


def main(path: str) -> None:
    """Train with the settings of the job and print the curve."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    evaluation = Evaluation(job, model, tokenizer)
    config = GRPOConfig(
        output_dir=job["directory"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["prompts"] * job["group"],
        num_generations=job["group"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        beta=0.0,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        optim="adamw_torch_fused",
        weight_decay=job["weight_decay"],
        adam_beta2=job["beta2"],
        **COMMON_SETTINGS,
        seed=job["seed"],
    )
    rows = [{"prompt": row["messages"], "answer": row["answer"]} for row in job["rows"]]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[evaluation],
    )
    trainer.train()
    print(json.dumps({"curve": evaluation.curve}))


if __name__ == "__main__":
    main(sys.argv[1])
