"""`rl show` and `rl plot`: completions and curves of a run in the terminal."""

import json

import pytest
from report_runs import make_run

from rl_apps.cli import main
from rl_monitor import show


def test_show_prints_completions_of_newest_step(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", completions=3)

    assert main.main(["show", str(run), "-n", "2"]) == 0

    out = capsys.readouterr().out
    records = [json.loads(line) for line in (run / "rollouts" / "step_6-0.jsonl").read_text().splitlines()]
    assert (
        f"== step 6, prompt 0, episode 0, reward {records[0]['reward']:g}, advantage {records[0]['reward']:+.3g}\n"
        in out
    )
    assert "prompt: question 0 of step 6" in out
    assert 'calculator({"expression": "1+2"})' in out
    assert out.endswith("2 of 3 completions of step 6\n")


def test_show_prints_size_and_path_of_images(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", completions=1)
    file = run / "rollouts" / "step_6-0.jsonl"
    image = {"file": "images/ab.png", "width": 30, "height": 20}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"images": [image]}) + "\n")

    assert main.main(["show", str(run)]) == 0

    assert f"image 1: 30 x 20, {run}/rollouts/images/ab.png\nprompt: question" in capsys.readouterr().out


def test_show_worst_sorts_completions_of_step_by_reward(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", completions=9)
    rewards = [json.loads(line)["reward"] for line in (run / "rollouts" / "step_2-0.jsonl").read_text().splitlines()]

    assert main.main(["show", str(run), "--step", "2", "--worst", "-n", "9"]) == 0

    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("== step 2")]
    assert [f"reward {reward:g}" in heading for reward, heading in zip(sorted(rewards), headings, strict=True)] == [
        True
    ] * 9


def test_show_of_missing_step_lists_saved_steps(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", every=3)

    assert main.main(["show", str(run), "--step", "2"]) == 2
    assert "step 2, found steps [1, 4]" in capsys.readouterr().err
    assert main.main(["show", str(run), "--evaluation", "--step", "4"]) == 2
    assert "evaluation at step 4, found steps [0]" in capsys.readouterr().err


def test_plot_draws_one_curve_per_run_in_plain_text(tmp_path, capsys) -> None:
    runs = [str(make_run(tmp_path / name)) for name in ("one", "two")]

    assert main.main(["plot", *runs, "--metric", "entropy/mean", "--metric", "length/mean"]) == 0

    out = capsys.readouterr().out
    assert "entropy/mean by step" in out
    assert "length/mean by step" in out
    assert out.count(" one") == out.count(" two") == 2
    assert "\x1b" not in out
    assert any("\u2801" <= character <= "\u28ff" for character in out), "a curve in braille characters"


def test_plot_without_metric_draws_the_reward(tmp_path, capsys) -> None:
    assert main.main(["plot", str(make_run(tmp_path / "run"))]) == 0
    assert "reward/mean by step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "curve.xyz"], "-o: expected a file name that ends with one of"),
        (["-o", "no/curve.png"], "curve.png is not writable"),
    ],
)
def test_plot_with_invalid_option_reports_error(tmp_path, capsys, options, message) -> None:
    pytest.importorskip("matplotlib", reason="the extra rl-apps[plot] is not installed")
    assert main.main(["plot", str(make_run(tmp_path / "run")), *options]) == 2
    assert message in capsys.readouterr().err


def test_plot_writes_png_file(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="the extra rl-apps[plot] is not installed")
    file = tmp_path / "curve.png"

    assert main.main(["plot", str(make_run(tmp_path / "run")), "-o", str(file)]) == 0

    assert file.read_bytes().startswith(b"\x89PNG")


def test_plot_to_file_without_matplotlib_reports_error(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)

    assert main.main(["plot", str(make_run(tmp_path / "run")), "-o", str(tmp_path / "curve.png")]) == 2

    assert "matplotlib, which is not installed. Run `pip install 'rl-apps[plot]'`" in capsys.readouterr().err
