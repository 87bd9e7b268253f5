"""`rl watch --conversations`: those of a run, from the files that it keeps of them."""

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

ANSWERED = {"reward": 0.5, "tokens": 3, "version_first": 4, "version_last": 5}
CALL = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+2"}}}
TALK = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "", "reasoning_content": "hard", "tool_calls": [CALL], **ANSWERED},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "assistant", "content": "#### 3", **ANSWERED, "reward": 0.0, "version_first": 5},
]


def keep(directory: Path, name: str, *answers: dict[str, Any]) -> None:
    (directory / "rollouts").mkdir(exist_ok=True)
    (directory / "config.yaml").touch()
    common = {"reward": 1.0, "rejected": None, "truncated": False, "episode_id": 2}
    with (directory / "rollouts" / f"{name}.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"prompt_id": i, **common, **answer}, ensure_ascii=False) + "\n"
            for i, answer in enumerate(answers)
        )


def test_watch_shows_turns_with_tools_rewards_and_versions_in_plain_text(tmp_path, capsys) -> None:
    keep(tmp_path, "step_7-0", {"conversation": TALK}, {"conversation": TALK, "rejected": "stale", "truncated": True})

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "== step 7, prompt 0, episode 2, reward 1",
        "user: What is 1 + 2?",
        "assistant (v4-5, reward 0.5): <think>hard</think>",
        '  calculator({"expression": "1+2"})',
        "tool: 3",
        "assistant (v5): #### 3",
        "",
        "== step 7, prompt 1, episode 2, reward 1, not learned from: stale, cut off",
        *["user: What is 1 + 2?", "assistant (v4-5, reward 0.5): <think>hard</think>"],
        *['  calculator({"expression": "1+2"})', "tool: 3", "assistant (v5): #### 3", ""],
    ]


@pytest.mark.parametrize("odd", ["\u2028", "\x85"])
def test_watch_of_an_answer_with_an_end_of_line_that_json_has_not_shows_it_whole(odd, tmp_path, capsys) -> None:
    keep(tmp_path, "step_1-0", {"prompt": "one?", "completion": f"no{odd}!", "version_first": 0, "version_last": 0})

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    assert re.search(r"completion \(v0\): no\S+!\n\n$", capsys.readouterr().out)


def test_watch_of_answers_without_turns_shows_prompt_and_completion(tmp_path, capsys) -> None:
    keep(tmp_path, "step_1-0", {"prompt": "one?", "completion": "no", "version_first": 0, "version_last": 0})

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    assert capsys.readouterr().out.splitlines()[1:3] == ["prompt: one?", "completion (v0): no"]


def test_watch_chooses_steps_evaluations_rows_and_how_many(tmp_path, capsys) -> None:
    for name in ("step_1-0", "step_2-0", "step_2-1", "eval_step_0-0"):
        keep(tmp_path, name, *({"conversation": TALK},) * 3)

    def headings(*options: str) -> list[str]:
        assert main.main(["watch", str(tmp_path), "--conversations", *options]) == 0
        return [line.partition(", ep")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("==")]

    assert headings() == ["== step 2, prompt 0", "== step 2, prompt 1"]
    assert headings("--step", "1", "-n", "9") == [f"== step 1, prompt {i}" for i in range(3)]
    assert headings("--prompt", "2") == ["== step 2, prompt 2"] * 2
    assert headings("--evaluation", "-n", "1") == ["== evaluation at step 0, prompt 0"]


def test_watch_goes_on_while_the_run_does_and_leaves_half_lines_for_later(tmp_path, capsys) -> None:
    (tmp_path / "config.yaml").touch()
    said, codes = "", []
    with RunControl(names_of(tmp_path), beat=0.4):
        watching = threading.Thread(
            target=lambda: codes.append(main.main(["watch", str(tmp_path), "--conversations"])), daemon=True
        )
        watching.start()
        keep(tmp_path, "step_1-0", {"conversation": TALK})
        file = tmp_path / "rollouts" / "step_1-0.jsonl"
        whole = file.read_text()
        with file.open("a") as more:
            more.write(whole[:50])
            more.flush()
            until = time.monotonic() + 30
            while "step 1" not in said and time.monotonic() < until:
                said += capsys.readouterr().out
                time.sleep(0.05)
            more.write(whole[50:])
        keep(tmp_path, "step_2-0", {"conversation": TALK})
    wait_until(lambda: bool(codes), 30)
    said += capsys.readouterr().out
    assert (codes, said.count("== step 1"), said.count("== step 2")) == ([0], 2, 1)


def test_watch_shows_no_control_characters_of_what_a_model_wrote(tmp_path, capsys) -> None:
    wrote = "[bold]red[/bold] \x1b[31m\x07"
    keep(tmp_path, "step_1-0", {"prompt": "", "completion": wrote, "version_first": 0, "version_last": 0})

    assert main.main(["watch", str(tmp_path), "--conversations"]) == 0

    out = capsys.readouterr().out
    assert r"[bold]red[/bold] \x1b[31m\x07" in out
    assert "\x1b" not in out


def test_watch_without_answers_says_which_there_are(tmp_path, capsys) -> None:
    keep(tmp_path, "step_4-0", {"conversation": TALK})

    assert main.main(["watch", str(tmp_path), "--step", "3"]) == 2

    assert "expected answers of step 3, found none; kept are those of the steps [4]" in capsys.readouterr().err


@pytest.mark.parametrize("colours", [False, True])
def test_watch_is_coloured_on_a_terminal_alone(tmp_path, capsys, monkeypatch, colours: bool) -> None:
    keep(tmp_path, "step_1-0", {"conversation": TALK})
    monkeypatch.setenv("FORCE_COLOR", "1") if colours else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    main.main(["watch", str(tmp_path), "--conversations"])

    assert ("\x1b[" in capsys.readouterr().out) == colours
