"""The page of a run: what it holds, how large it is, and that a browser opens it."""

import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import NASTY, make_run

from rl_apps.cli import main
from rl_contracts.testing.waiting import wait_until
from rl_monitor.report import page as module
from rl_monitor.report.curves import BANDS, curves_of, stages_of, thinned
from rl_monitor.report.facts import commands_of, record_command
from rl_monitor.report.page import RunReport, as_json, write_report
from rl_monitor.report.samples import EACH, NEWEST, STEPS, Samples, extremes, spread_steps, to_page_record
from rl_monitor.run_directory import names_of


def data_of(page: Path) -> dict[str, Any]:
    """What a page has embedded, as a browser finds it: up to the first end of a script."""
    text = page.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(re.search(r'id="data">(.*?)</script', text, re.DOTALL)[1])
    return found


# ---- the page


def test_page_of_a_run_has_curves_events_settings_origin_and_answers_with_advantages(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    record_command(run, ["gsm8k-grpo", "total_steps=6", "tracker.api_key=abc"])

    assert main.main(["report", str(run)]) == 0

    (found,) = data_of(run / "report.html")["runs"]
    assert found["curves"]["reward/mean"][0] == [1, 2, 3, 4, 5, 6]
    assert found["curves"]["grad_norm"][0] == [1, 2, 4, 5, 6], "what is no number is no point"
    assert found["settings"]["model.path"] == "tiny"
    (command,) = found["commands"]
    assert command["command"] == ["gsm8k-grpo", "total_steps=6", "tracker.api_key=***"]
    assert command["packages"]["torch"]
    assert command["host"]
    newest = [answer for answer in found["answers"] if answer["step"] == 6]
    assert [answer["reward"] for answer in newest] == sorted(answer["reward"] for answer in newest)
    learned = next(answer for answer in newest if answer["rejected"] is None)
    assert learned["advantage"] == learned["reward"]
    assert learned["tokens"]["text"][0].startswith("w")
    assert learned["tokens"]["proximal"][0] == pytest.approx(learned["tokens"]["logprobs"][0] - 0.1)
    assert learned["tokens"]["versions"] == [[5, 6], [6, 6]]
    (talk,) = [answer["conversation"] for answer in newest if "conversation" in answer]
    assert talk[1]["calls"] == ['calculator({"expression": "1+2"})']
    assert all("advantage" not in answer for answer in found["answers"] if answer["rejected"])


def test_events_of_a_run_are_told_once_with_how_often_they_came(tmp_path) -> None:
    run = make_run(tmp_path / "run")

    write_report([run], tmp_path / "page.html")

    (found,) = data_of(tmp_path / "page.html")["runs"]
    told = {event["text"]: event for event in found["events"]}
    gap = told["[trainer/0] rl.trainers.gap: the gap is 0.31"]
    assert (gap["times"], gap["at"], gap["where"]) == (2, "2026-11-25 20:02:51", "actor-0")
    assert told["grad_norm was nan"]["step"] == 3
    assert told["a group failed: the reward crashed"]["times"] == 1
    assert told["rollout-0 was killed by SIGKILL (out of memory?)"]["level"] == "note"
    assert any(text.startswith("1 group(s) failed") for text in told)
    assert not any("nothing to see" in text for text in told)


def test_failure_and_restarts_of_a_run_are_its_first_events(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    said = {"state": "failed", "error": "actor-0 was killed", "trainer_restarts": 1, "history": ["actor-0 ended"]}
    names_of(run).add("status", json.dumps(said))

    write_report([run], tmp_path / "page.html")

    (found,) = data_of(tmp_path / "page.html")["runs"]
    assert (found["state"], found["restarts"]) == ("failed", 1)
    assert [(event["level"], event["text"]) for event in found["events"][:2]] == [
        ("error", "actor-0 was killed"),
        ("warning", "the run was started again: actor-0 ended"),
    ]


def test_pictures_of_a_conversation_are_shown_if_they_need_no_network() -> None:
    inside, outside = "data:image/png;base64,AAAA", "https://example.org/a.png"
    content = [{"type": "image_url", "image_url": {"url": address}} for address in (inside, outside)]
    answer = {"conversation": [{"role": "user", "content": content}], "reward": 1.0}

    (message,) = to_page_record(answer, lambda ids: None, 10, 1000)["conversation"]

    assert message["parts"][0] == {"image": inside}
    assert outside in message["parts"][1]["text"]


def test_whatever_a_model_wrote_stands_in_the_page_as_it_was_and_ends_no_script(tmp_path) -> None:
    run = make_run(tmp_path / "run")

    write_report([run], tmp_path / "page.html")

    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2, "that of the data and that of the script"
    assert "<b>" not in text
    prompts = [
        answer["prompt"] for answer in data_of(tmp_path / "page.html")["runs"][0]["answers"] if "prompt" in answer
    ]
    assert prompts
    assert all(prompt.endswith(NASTY) for prompt in prompts)


def test_figures_that_are_no_numbers_are_null_in_json_that_browsers_read() -> None:
    text = as_json({"a": [math.nan, math.inf, 1.5], 3: "\ud800<\u2028", "e": Path("/x")})

    assert text == r'{"a":[null,null,1.5],"3":"\ud800\u003c\u2028","e":"/x"}'
    text.encode()


@pytest.mark.slow
def test_page_stays_below_its_size_by_leaving_out_tokens(tmp_path, monkeypatch) -> None:
    run = make_run(tmp_path / "run", steps=200, answers=6, tokens=600, every=8)
    large = write_report([run], tmp_path / "page.html")
    assert large < 5_000_000
    monkeypatch.setattr(module, "BYTES", large // 2)

    small = write_report([run], tmp_path / "page.html")

    assert small <= large // 2
    assert small == (tmp_path / "page.html").stat().st_size
    (found,) = data_of(tmp_path / "page.html")["runs"]
    assert {answer["tokens"]["count"] for answer in found["answers"]} == {600}
    assert all(len(answer["tokens"]["text"]) < 600 for answer in found["answers"])


def test_tokens_without_their_tokenizer_are_ids(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    (run / "model" / "tokenizer.json").unlink()

    write_report([run], tmp_path / "page.html")

    (found,) = data_of(tmp_path / "page.html")["runs"]
    assert re.fullmatch(r"\[\d+\] ", found["answers"][0]["tokens"]["text"][0])


def test_several_runs_are_on_one_page_with_the_settings_that_differ(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (make_run(tmp_path / name, actor={"lr": lr}) for name, lr in (("a", 1.0), ("b", 2.0)))

    assert main.main(["report", str(first), str(second)]) == 0

    found = data_of(tmp_path / "comparison.html")
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert found["differing"] == [["actor.lr", 1.0, 2.0]]


def test_run_that_has_nothing_yet_has_a_page(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("total_steps: 3\n")

    assert main.main(["report", str(tmp_path)]) == 0

    (found,) = data_of(tmp_path / "report.html")["runs"]
    assert (found["curves"], found["answers"], found["events"], found["total_steps"]) == ({}, [], [], 3)


def test_report_of_no_run_or_without_a_place_is_one_sentence(tmp_path, capsys) -> None:
    assert main.main(["report", str(tmp_path)]) == 2
    assert "expected the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main.main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "expected a place for the page" in capsys.readouterr().err


# ---- while a run goes on


def test_page_of_a_run_is_written_while_it_goes_on_and_at_its_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "SOON", 0.01)
    monkeypatch.setattr(module, "WRITE_SECONDS", 0)
    run, page = make_run(tmp_path / "run"), tmp_path / "run" / "report.html"
    with RunReport(run, ["gsm8k-grpo"]) as report:
        report.begin()
        wait_until(page.exists, 30)
        first = data_of(page)["runs"][0]["step"]
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "reward/mean": 1.0}\n')
        wait_until(lambda: data_of(page)["runs"][0]["step"] == 7, 30)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "reward/mean": 1.0}\n')

    assert (first, data_of(page)["runs"][0]["step"]) == (6, 8)
    assert [fact["command"] for fact in commands_of(run)] == [["gsm8k-grpo"]]
    assert not [*run.glob(".report*")]


def test_run_that_never_began_has_no_page(tmp_path) -> None:
    with RunReport(tmp_path, []):
        pass

    assert [*tmp_path.iterdir()] == []


def test_page_that_cannot_be_written_ends_no_run_and_is_told_once(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "SOON", 0.01)
    monkeypatch.setattr(module, "WRITE_SECONDS", 0)
    run = make_run(tmp_path / "run")
    (run / "report.html").mkdir()
    with RunReport(run, []) as report:
        report.begin()
        wait_until(lambda: "report.html is not written" in caplog.text, 30)

    assert caplog.text.count("report.html is not written") == 1


def test_answers_that_did_not_change_are_not_read_again(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    samples = Samples(run)
    before = samples.choose()
    for path in (run / "rollouts").glob("step_[1-5]-0.jsonl"):
        path.write_bytes(b"x" * path.stat().st_size)
    (run / "rollouts" / "step_6-0.jsonl").write_text("")

    after = samples.choose()

    assert after == [answer for answer in before if answer["step"] != 6]


# ---- what is chosen


@given(st.integers(0, 3000))
def test_steps_that_are_shown_are_few_and_hold_first_and_newest(number: int) -> None:
    steps = list(range(1, number + 1))
    found = spread_steps(steps)
    assert len(found) <= STEPS + NEWEST + 1
    assert set(steps[:1] + steps[-NEWEST:]) <= set(found) <= set(steps)


@given(st.lists(st.floats(allow_nan=True), max_size=60))
def test_chosen_answers_hold_the_worst_and_the_best(rewards: list[float]) -> None:
    answers = [{"reward": reward, "episode_id": 0, "group_id": i} for i, reward in enumerate(rewards)]
    found = extremes(answers)
    assert len(found) == min(EACH, len(rewards))
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if finite and len(finite) == len(rewards):
        assert found[0]["reward"] == min(finite)
        assert found[-1]["reward"] == max(finite)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000), st.integers(10, 400))
def test_thinned_curve_is_short_and_keeps_its_ends_and_peaks(values: list[float], points: int) -> None:
    steps, found = thinned((list(range(len(values))), values), points)
    assert len(steps) <= points + 4
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert max(found) == pytest.approx(max(values), rel=1e-5)
    assert min(found) == pytest.approx(min(values), rel=1e-5)


def test_stages_of_a_long_run_add_up_to_its_steps() -> None:
    times = {"time/step": 6.0, "time/train": 3.0, "time/gap": 1.0}
    records = [{"step": step, **times, "time/rollout_wait": step % 2} for step in range(1, 2 * BANDS + 1)]

    found = stages_of(records)

    assert len(found["steps"]) == BANDS
    assert found["steps"][-1] == 2 * BANDS
    assert list(found["seconds"]) == ["rollout_wait", "gap", "train", "other"]
    assert [sum(parts) for parts in zip(*found["seconds"].values(), strict=True)] == [6.0] * BANDS
    assert set(found["seconds"]["rollout_wait"]) == {0.5}


def test_half_a_line_of_the_records_is_left_for_later(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')

    write_report([run], tmp_path / "page.html")

    assert data_of(tmp_path / "page.html")["runs"][0]["step"] == 6
    assert "reward/mean" in curves_of([{"step": 1, "reward/mean": 1.0, "x": None, "flag": True}], 10)


# ---- in a browser

PROBE = """<script>
const lines = [];
for (const kind of ["error", "warn"]) console[kind] = (...said) => lines.push(said.join(" "));
window.addEventListener("error", (event) => lines.push(event.message));
window.addEventListener("load", () => {
  const change = (one, value) => { one.value = value; one.dispatchEvent(new Event("change")); };
  for (const one of document.querySelectorAll("select")) {
    for (const option of [...one.options]) change(one, option.value);
    change(one, one.options[0].value);
  }
  document.querySelectorAll("details").forEach((one) => (one.open = true));
  for (const svg of document.querySelectorAll("svg")) {
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: 200 }));
  }
  const { loadEventStart, fetchStart } = performance.getEntriesByType("navigation")[0];
  const count = (what) => document.querySelectorAll(what).length;
  const requests = performance.getEntriesByType("resource").map((one) => one.name);
  const found = JSON.stringify({
    lines, requests, ms: loadEventStart - fetchStart, cards: count(".card"), bold: count("#answers .text b"),
    answers: count("#answers details"), pictures: count("#answers img"),
  });
  document.body.replaceChildren();  // half characters of answers cannot be dumped
  document.body.dataset.probe = found;
});
</script>"""
"""Tries every choice of the page when it is there, and leaves what it found in the page."""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_browser_opens_the_page_of_a_long_run_within_a_second_without_errors_or_requests(tmp_path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium is installed here, so no browser opens the page")
    run = make_run(tmp_path / "run", steps=90, answers=6, tokens=200, every=4)
    write_report([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("<head>", f"<head>{PROBE}"), encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    place = ("--dump-dom", f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}")

    begin = time.monotonic()
    done = subprocess.run([browser, *options, *place], capture_output=True, text=True, timeout=180)

    said = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert said, f"the page did not load within {time.monotonic() - begin:.0f} s: {done.stderr[-2000:]}"
    found = json.loads(said[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert found["lines"] == []
    assert found["requests"] in ([], ["data:,"])
    assert found["bold"] == 0, "what a model wrote is text"
    assert found["cards"] == 10
    assert found["answers"] >= 40
    assert found["ms"] < 1000
