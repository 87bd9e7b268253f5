"""Rewards of rl-rewards in the real TRL and verifiers, and their rewards here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from rl_contracts.testing import make_tiny_model
from rl_rewards import gsm8k_reward_fn
from rl_rewards.adapters import for_trl, from_trl

VERIFIERS_CURRENT = """
import asyncio, json, verifiers.v1 as vf
from rl_rewards import gsm8k_reward_fn
from rl_rewards.adapters import for_verifiers, from_verifiers

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    right = vf.reward(for_verifiers(gsm8k_reward_fn), weight=2.0)

    @vf.reward
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 10 * len(self.data.answer))

def score(reply, config):
    task = Task(Data(prompt="2 + 3", answer="5"), config)
    trace = vf.Trace(
        task={"type": "Task", "data": task.data},
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)],
    )
    asyncio.run(task.score(trace))
    return trace.reward

plugged = for_verifiers(gsm8k_reward_fn)

if __name__ == "__main__":
    config = vf.TaskConfig(rewards={"again": {"fn": "program:plugged"}})
    ours = from_verifiers(Task.brief)
    replies = "#### 5", "#### 6", "#### 5" * 9
    print(json.dumps([[score(reply, config) for reply in replies],
                      [asyncio.run(ours("2 + 3", reply, [], [], answer="5")) for reply in replies]]))
"""
"""Program for verifiers 0.4: a reward of rl-rewards as method and by name, and the other way round."""
VERIFIERS_RUBRIC = """
import asyncio, json, verifiers.legacy as vf
from rl_rewards import gsm8k_reward_fn
from rl_rewards.adapters import for_verifiers, from_verifiers

def brief(completion, answer, **kwargs):
    return float(len(completion[-1]["content"]) < 10 * len(answer))

def score(reply):
    rubric = vf.Rubric(funcs=[for_verifiers(gsm8k_reward_fn), brief], weights=[3.0, 1.0])
    prompt, completion = [{"role": "user", "content": "2 + 3"}], [{"role": "assistant", "content": reply}]
    state = vf.State(prompt=prompt, completion=completion, answer="5", timing={"total_ms": 0.0, "scoring_ms": 0.0})
    asyncio.run(rubric.score_rollout(state))
    return state["reward"]

ours, replies = from_verifiers(brief), ("#### 5", "#### 6", "#### 5" * 9)
print(json.dumps([list(map(score, replies)), [ours("2 + 3", reply, [], [], answer="5") for reply in replies]]))
"""
"""Program for verifiers 0.3, with a `Rubric`."""


@pytest.mark.slow
def test_for_trl_rewards_are_those_of_grpo_trainer_steps(tmp_path: Path) -> None:
    from datasets import Dataset  # these imports take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = make_tiny_model(tmp_path / "model")
    questions = [("What is 2 + 3?", "5"), ("What is 2 + 4?", "6")]
    scored, rewards = [], []

    def mixed_fn(prompt, completions, prompt_ids, completion_ids, *, answer, **data):
        scored.append((prompt, len(completion_ids), answer, sorted(data)))
        rewards.append(gsm8k_reward_fn(prompt, completions, [], [], answer=answer) + 1 / (1 + len(completions)))
        return rewards[-1]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[for_trl(gsm8k_reward_fn), for_trl(mixed_fn)],
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=8,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in questions]
        ),
    )
    trainer.train()

    logged = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["rewards/mixed_fn/mean"] for log in logged] == pytest.approx([mean(rewards[:4]), mean(rewards[4:])])
    assert all(0 <= log["rewards/gsm8k_reward_fn/mean"] < log["rewards/mixed_fn/mean"] for log in logged)
    assert {(prompt, answer) for prompt, _, answer, _ in scored} == set(questions)
    assert all(0 < tokens <= 8 and other_columns == [] for _, tokens, _, other_columns in scored)


@pytest.mark.slow
def test_from_trl_scores_with_rewards_of_trl() -> None:
    from trl.rewards import accuracy_reward, think_format_reward

    accuracy, form = from_trl(accuracy_reward), from_trl(think_format_reward)

    assert [accuracy("", rf"\boxed{{{n}}}", [], [], solution="$\\frac{1}{2}$") for n in ("0.5", "0.6")] == [1.0, 0.0]
    assert [form("", text, [], []) for text in ("<think>a</think>b", "b")] == [1.0, 0.0]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("requirement", "program", "expected"),
    [
        ("verifiers>=0.4", VERIFIERS_CURRENT, [[4.0, 1.0, 3.0], [1.0, 1.0, 0.0]]),
        ("verifiers==0.3.*", VERIFIERS_RUBRIC, [[4.0, 1.0, 3.0], [1.0, 1.0, 0.0]]),
    ],
)
def test_verifiers_scores_with_adapted_rewards_and_the_reverse(
    tmp_path: Path, requirement: str, program: str, expected: list[list[float]]
) -> None:
    python, packages = tmp_path / "env" / "bin" / "python", Path(__file__).parents[2] / "packages"
    install = [
        "pip",
        "install",
        "--python",
        str(python),
        requirement,
        packages / "rl-contracts",
        packages / "rl-rewards",
    ]
    for command in (["venv", "--python", sys.executable, str(tmp_path / "env")], install):
        subprocess.run(["uv", "--quiet", *command], check=True)
    (tmp_path / "program.py").write_text(program)

    done = subprocess.run([python, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert json.loads(done.stdout.splitlines()[-1]) == expected
