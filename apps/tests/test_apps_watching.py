"""`rl watch --conversations`: conversations from the saved completions of a run."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rl_apps.cli import main
from rl_contracts.testing.waiting import wait_until
from rl_launchers import RunControl
from rl_monitor.run_directory import names_of

COMPLETION_FIELDS = {"reward": 0.5, "tokens": 3, "version_first": 4, "version_last": 5}
CALL = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+2"}}}
CONVERSATION = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "", "reasoning_content": "hard", "tool_calls": [CALL], **COMPLETION_FIELDS},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "assistant", "content": "#### 3", **COMPLETION_FIELDS, "reward": 0.0, "version_first": 5},
]


def save(directory: Path, name: str, *completions: dict[str, Any]) -> None:
    (directory / "rollouts").mkdir(exist_ok=True)
    (directory / "config.yaml").touch()
    common = {"reward": 1.0, "rejected": None, "truncated": False, "episode_id": 2}
    with (directory / "rollouts" / f"{name}.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"prompt_id": i, **common, **completion}, ensure_ascii=False) + "\n"
            for i, completion in enumerate(completions)
        )


def test_watch_prints_turns_with_tools_rewards_and_versions(tmp_path, capsys) -> None:
    save(
        tmp_path,
        "step_7-0",
        {"conversation": CONVERSATION},
        {"conversation": CONVERSATION, "rejected": "stale", "truncated": True},
    )

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "== step 7, prompt 0, episode 2, reward 1",
        "user: What is 1 + 2?",
        "assistant (v4-5, reward 0.5): <think>hard</think>",
        '  calculator({"expression": "1+2"})',
        "tool: 3",
        "assistant (v5): #### 3",
        "",
        "== step 7, prompt 1, episode 2, reward 1, rejected: stale, truncated",
        *["user: What is 1 + 2?", "assistant (v4-5, reward 0.5): <think>hard</think>"],
        *['  calculator({"expression": "1+2"})', "tool: 3", "assistant (v5): #### 3", ""],
    ]


def test_watch_without_turns_shows_prompt_and_whole_completion(tmp_path, capsys) -> None:
    completion = "no\u2028\x85!"
    save(tmp_path, "step_1-0", {"prompt": "one?", "completion": completion, "version_first": 0, "version_last": 0})

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    assert re.search(r"\nprompt: one\?\ncompletion \(v0\): no\S+!\n\n$", capsys.readouterr().out)


def test_watch_options_select_steps_evaluations_and_examples(tmp_path, capsys) -> None:
    for name in ("step_1-0", "step_2-0", "step_2-1", "eval_step_0-0"):
        save(tmp_path, name, *({"conversation": CONVERSATION},) * 3)
    save(tmp_path, "eval_math-500_step_4-0", {"conversation": CONVERSATION, "set": "math-500"})

    def headings(*options: str) -> list[str]:
        assert main.main(["watch", str(tmp_path), "--conversations", *options]) == 0
        return [line.partition(", ep")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("==")]

    assert headings() == ["== step 2, prompt 0", "== step 2, prompt 1"]
    assert headings("--step", "1", "-n", "9") == [f"== step 1, prompt {i}" for i in range(3)]
    assert headings("--prompt", "2") == ["== step 2, prompt 2"] * 2
    assert headings("--evaluation", "--step", "0", "-n", "1") == ["== evaluation at step 0, prompt 0"]
    assert headings("--evaluation") == ["== evaluation at step 4, set math-500, prompt 0"]


def test_watch_follows_run_and_waits_for_incomplete_lines(tmp_path, capsys) -> None:
    (tmp_path / "config.yaml").touch()
    output, codes = "", []
    with RunControl(names_of(tmp_path), beat=0.4):
        watching = threading.Thread(
            target=lambda: codes.append(main.main(["watch", str(tmp_path), "--conversations"])), daemon=True
        )
        watching.start()
        save(tmp_path, "step_1-0", {"conversation": CONVERSATION})
        file = tmp_path / "rollouts" / "step_1-0.jsonl"
        record = file.read_text()
        with file.open("a") as more:
            more.write(record[:50])
            more.flush()
            deadline = time.monotonic() + 30
            while "step 1" not in output and time.monotonic() < deadline:
                output += capsys.readouterr().out
                time.sleep(0.05)
            more.write(record[50:])
        save(tmp_path, "step_2-0", {"conversation": CONVERSATION})
    wait_until(lambda: bool(codes), 30)
    output += capsys.readouterr().out
    assert (codes, output.count("== step 1"), output.count("== step 2")) == ([0], 2, 1)


def test_watch_escapes_control_characters_of_completions(tmp_path, capsys) -> None:
    completion = "[bold]red[/bold] \x1b[31m\x07"
    save(tmp_path, "step_1-0", {"prompt": "", "completion": completion, "version_first": 0, "version_last": 0})

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    out = capsys.readouterr().out
    assert r"[bold]red[/bold] \x1b[31m\x07" in out
    assert "\x1b" not in out


def test_watch_of_missing_step_lists_saved_steps(tmp_path, capsys) -> None:
    save(tmp_path, "step_4-0", {"conversation": CONVERSATION})

    assert main.main(["watch", str(tmp_path), "--step", "3"]) == 2

    assert "expected completions of step 3, found none; saved steps: [4]" in capsys.readouterr().err


@pytest.mark.parametrize("force_color", [False, True])
def test_watch_uses_color_only_on_a_terminal(tmp_path, capsys, monkeypatch, force_color: bool) -> None:
    save(tmp_path, "step_1-0", {"conversation": CONVERSATION})
    monkeypatch.setenv("FORCE_COLOR", "1") if force_color else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    main.main(["watch", str(tmp_path), "--conversations"])

    assert ("\x1b[" in capsys.readouterr().out) == force_color
