"""`rl show` and `rl plot`: answers and curves of a run in the terminal."""

import json

import pytest
from report_runs import make_run

from rl_apps.cli import main
from rl_monitor import show


def test_show_prints_prompts_answers_rewards_and_advantages_of_the_newest_step(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", answers=3)

    assert main.main(["show", str(run), "-n", "2"]) == 0

    out = capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "rollouts" / "step_6-0.jsonl").read_text().splitlines()]
    assert f"== step 6, prompt 0, episode 0, reward {rows[0]['reward']:g}, advantage {rows[0]['reward']:+.3g}\n" in out
    assert "prompt: question 0 of step 6" in out
    assert 'calculator({"expression": "1+2"})' in out
    assert out.endswith("2 of 3 answers of step 6\n")


def test_show_worst_begins_with_the_least_reward_of_the_step_that_is_asked_for(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", answers=9)
    rewards = [json.loads(line)["reward"] for line in (run / "rollouts" / "step_2-0.jsonl").read_text().splitlines()]

    assert main.main(["show", str(run), "--step", "2", "--worst", "-n", "9"]) == 0

    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("== step 2")]
    assert [f"reward {reward:g}" in head for reward, head in zip(sorted(rewards), heads, strict=True)] == [True] * 9


def test_show_of_a_step_that_is_not_kept_says_which_are(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", every=3)

    assert main.main(["show", str(run), "--step", "2"]) == 2
    assert "expected answers of step 2, found those of the steps [1, 4]" in capsys.readouterr().err
    assert main.main(["show", str(run), "--evaluation", "--step", "4"]) == 2
    assert "expected answers of an evaluation at step 4, found those of the steps [0]" in capsys.readouterr().err


def test_plot_draws_a_curve_for_each_run_in_plain_text(tmp_path, capsys) -> None:
    runs = [str(make_run(tmp_path / name)) for name in ("one", "two")]

    assert main.main(["plot", *runs, "--figure", "entropy/mean", "--figure", "length/mean"]) == 0

    out = capsys.readouterr().out
    assert "entropy/mean by step" in out
    assert "length/mean by step" in out
    assert out.count(" one") == out.count(" two") == 2
    assert "\x1b" not in out
    assert any("\u2801" <= character <= "\u28ff" for character in out), "a line"


def test_plot_without_a_figure_draws_the_reward(tmp_path, capsys) -> None:
    assert main.main(["plot", str(make_run(tmp_path / "run"))]) == 0
    assert "reward/mean by step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "reward"], "expected a figure of these runs, found reward; near it: reward/mean"),
        (["-o", "curve.xyz"], "-o: expected a file that ends with one of"),
        (["-o", "no/curve.png"], "the picture cannot be written"),
    ],
)
def test_plot_that_cannot_be_drawn_says_what_is_wrong(tmp_path, capsys, options, message) -> None:
    pytest.importorskip("matplotlib", reason="the extra rl-apps[plot] is not installed")
    assert main.main(["plot", str(make_run(tmp_path / "run")), *options]) == 2
    assert message in capsys.readouterr().err


def test_plot_writes_a_picture(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="the extra rl-apps[plot] is not installed")
    picture = tmp_path / "curve.png"

    assert main.main(["plot", str(make_run(tmp_path / "run")), "-o", str(picture)]) == 0

    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_without_the_extra_that_draws_it_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)

    assert main.main(["plot", str(make_run(tmp_path / "run")), "-o", str(tmp_path / "curve.png")]) == 2

    assert "pictures need matplotlib, which is not installed: pip install 'rl-apps[plot]'" in capsys.readouterr().err


def test_plot_of_a_run_without_records_says_so(tmp_path, capsys) -> None:
    (tmp_path / "config.yaml").touch()
    assert main.main(["plot", str(tmp_path)]) == 2
    assert "expected records of steps, found none so far" in capsys.readouterr().err
