"""Report page of a run: contents, size, and errors in a browser."""

import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import NASTY, make_run

from rl_apps.cli import main
from rl_contracts.images import read_image
from rl_contracts.testing.waiting import wait_until
from rl_monitor.report import page as module
from rl_monitor.report.curves import BANDS, curves_of, stages_of, thinned
from rl_monitor.report.facts import commands_of, record_command
from rl_monitor.report.page import RunReport, as_json, write_report
from rl_monitor.report.samples import EACH, NEWEST, STEPS, Samples, extremes, spread_steps, to_page_record
from rl_monitor.report.summary import summary_of
from rl_monitor.run_directory import names_of


def data_of(page: Path) -> dict[str, Any]:
    """Return the data embedded in a page. As in a browser, the data ends at the first `</script`."""
    text = page.read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(re.search(r'id="data">(.*?)</script', text, re.DOTALL)[1])
    return data


# ---- the page


def test_report_page_has_curves_settings_origin_and_completions(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    record_command(run, ["gsm8k-grpo", "total_steps=6", "tracker.api_key=abc"])

    assert main.main(["report", str(run)]) == 0

    (run_data,) = data_of(run / "report.html")["runs"]
    assert run_data["curves"]["reward/mean"][0] == [1, 2, 3, 4, 5, 6]
    assert run_data["curves"]["grad_norm"][0] == [1, 2, 4, 5, 6], "values that are not finite are no points"
    assert run_data["settings"]["model.path"] == "tiny"
    (command,) = run_data["commands"]
    assert command["command"] == ["gsm8k-grpo", "total_steps=6", "tracker.api_key=***"]
    assert command["packages"]["torch"]
    assert command["host"]
    newest = [completion for completion in run_data["completions"] if completion["step"] == 6]
    assert [completion["reward"] for completion in newest] == sorted(completion["reward"] for completion in newest)
    learned = next(completion for completion in newest if completion["rejected"] is None)
    assert learned["advantage"] == learned["reward"]
    assert learned["tokens"]["text"][0].startswith("w")
    assert learned["tokens"]["proximal"][0] == pytest.approx(learned["tokens"]["logprobs"][0] - 0.1)
    assert learned["tokens"]["versions"] == [[5, 6], [6, 6]]
    (messages,) = [completion["conversation"] for completion in newest if "conversation" in completion]
    assert messages[1]["calls"] == ['calculator({"expression": "1+2"})']
    assert all("advantage" not in completion for completion in run_data["completions"] if completion["rejected"])


def test_report_summary_states_run_and_its_held_out_change(tmp_path) -> None:
    settings = {
        "data": {"name": "gsm8k", "batch_size": 4},
        "experiment": "grpo",
        "rollout": {"group_size": 8},
        "algorithm": {"advantage": {"kind": "outcome"}, "loss": {"kind": "clip"}},
    }
    run = make_run(tmp_path / "run", **settings)
    evaluations = [
        {"step": step, "eval/time/reward": 9.0, "eval/reward": accuracy, "eval/accuracy": accuracy}
        | {"eval/hard/examples": 2, "eval/hard/reward": reward}
        for step, accuracy, reward in ((6, 0.5, 1.5), (7, 0.25, 2.5))
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in evaluations)
    record_command(run, ["rl", "grpo"])

    write_report([run], tmp_path / "page.html")

    data = data_of(tmp_path / "page.html")
    summary = data["runs"][0]["summary"]
    assert summary.pop("Host")
    assert summary.pop("Held-out accuracy").endswith("→ 0.25 (steps 1 and 7)")
    assert summary.pop("Training reward").endswith("(steps 1 and 6)")
    assert summary == {
        "Model": "tiny",
        "Data": "gsm8k",
        "Algorithm": "grpo: outcome advantages, clip loss",
        "Batch": "4 examples x 8 completions",
        "Held-out reward, hard": "1.5 → 2.5 (steps 6 and 7)",
        "Training time": "0.6 minutes for 6 steps",
    }
    assert [name for name, note in data["notes"].items() if note["fraction"]] == ["eval/accuracy"]
    assert data["notes"]["grad_norm"]["unit"] == ""


def test_summary_of_tie_rounds_like_the_page() -> None:
    summary = summary_of([{"step": 1, "reward/mean": 0.40625}], {}, [])
    assert summary["Training reward"] == "0.4063 (step 1)", "toPrecision(4) of JavaScript"


def test_summary_of_run_without_steps_omits_batch_and_learning_rate() -> None:
    settings = {"data.batch_size": 4, "actor.optimizer.lr": 1e-6, "actor.optimizer.schedule": "constant"}
    assert [*summary_of([], settings | {"total_steps": 1}, [])] == ["Batch", "Learning rate"]
    assert not summary_of([], settings | {"total_steps": 0}, [])


def test_report_marks_checkpoints_and_resumed_steps(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=9)
    for step in (3, 9):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = (json.loads(line) | {"timestamp": 10.0 * step} for step, line in enumerate(lines, 1))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "commands.jsonl").write_text("".join(f'{{"started": {started}}}\n' for started in (1, 5, 42)))
    names_of(run).add("status", json.dumps({"state": "finished", "restart_steps": [0, 7]}))

    write_report([run], tmp_path / "page.html")

    (run_data,) = data_of(tmp_path / "page.html")["runs"]
    assert (run_data["checkpoints"], run_data["resumed"]) == ([3, 9], [4, 7])


def test_report_repeated_events_appear_once_with_their_count(tmp_path) -> None:
    run = make_run(tmp_path / "run")

    write_report([run], tmp_path / "page.html")

    (run_data,) = data_of(tmp_path / "page.html")["runs"]
    events = {event["text"]: event for event in run_data["events"]}
    gap = events["[trainer/0] rl.trainers.gap: the gap is 0.31"]
    assert (gap["times"], gap["at"], gap["where"]) == (2, "2026-11-25 20:02:51", "actor-0")
    assert events["grad_norm was nan"]["step"] == 3
    assert events["a group failed: the reward crashed"]["times"] == 1
    assert events["rollout-0 was killed by SIGKILL (out of memory?)"]["level"] == "note"
    assert any(text.startswith("1 group(s) failed") for text in events)
    assert not any("an ordinary line" in text for text in events)


def test_report_lists_failure_and_restarts_of_run_first(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    run_status = {"state": "failed", "error": "actor-0 was killed", "trainer_restarts": 1, "history": ["actor-0 ended"]}
    names_of(run).add("status", json.dumps(run_status))

    write_report([run], tmp_path / "page.html")

    (run_data,) = data_of(tmp_path / "page.html")["runs"]
    assert (run_data["state"], run_data["restarts"]) == ("failed", 1)
    assert [(event["level"], event["text"]) for event in run_data["events"][:2]] == [
        ("error", "actor-0 was killed"),
        ("warning", "the run was restarted: actor-0 ended"),
    ]


def test_report_lists_error_of_log_before_warnings(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "logs" / "actor-0.log").open("a") as file:
        file.write("2026-11-25 20:03:01.000 ERROR [trainer/0] rl.apps.worker: RLError: 3 groups failed\n")

    write_report([run], tmp_path / "page.html")

    levels = [event["level"] for event in data_of(tmp_path / "page.html")["runs"][0]["events"]]
    assert levels.count("error") >= 2
    assert levels == sorted(levels, key=lambda level: level != "error")


def test_report_shows_only_embedded_images_of_conversations() -> None:
    inside, outside = "data:image/png;base64,AAAA", "https://example.org/a.png"
    content = [{"type": "image_url", "image_url": {"url": address}} for address in (inside, outside)]
    completion = {"conversation": [{"role": "user", "content": content}], "reward": 1.0}

    (message,) = to_page_record(completion, lambda ids: None, 10, 1000)["conversation"]

    assert message["parts"][0] == {"image": inside}
    assert outside in message["parts"][1]["text"]


def _with_images(run: Path, step: int, *sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Give images of noise to the completions of a step: all to the first, and the first two to the second."""
    folder, images = run / "rollouts" / "images", []
    folder.mkdir()
    for size in sizes:
        image = read_image(PIL.Image.effect_noise(size, 80).convert("RGB"))
        (folder / f"{image.key}.png").write_bytes(image.data)
        images.append({"file": f"images/{image.key}.png", "width": image.width, "height": image.height})
    file = run / "rollouts" / f"step_{step}-0.jsonl"
    first, second, *others = (json.loads(line) for line in file.read_text().splitlines())
    first["images"], second["images"] = images, images[:2]
    second["conversation"][0]["content"].insert(0, {"type": "image"})
    file.write_text("".join(json.dumps(record) + "\n" for record in (first, second, *others)))
    return images


def test_report_embeds_each_image_once_as_thumbnail(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    images = _with_images(run, 6, (300, 200), (20, 10))

    write_report([run], tmp_path / "page.html")

    data = data_of(tmp_path / "page.html")
    names = [Path(image["file"]).name for image in images]
    assert list(data["images"]) == names
    thumbnails = [read_image(url) for url in data["images"].values()]
    assert [(image.width, image.height) for image in thumbnails] == [(156, 104), (20, 10)]
    assert (tmp_path / "page.html").read_text().count(data["images"][names[0]]) == 1
    shown = {c["prompt_id"]: c for c in data["runs"][0]["completions"] if c["step"] == 6 and not c["evaluation"]}
    parts = [{"image": name, "label": label} for name, label in zip(names, _labels(images), strict=True)]
    assert shown[0]["images"] == parts
    assert shown[1]["conversation"][0]["parts"][0] == parts[0]
    assert shown[1]["images"] == parts[1:], "no message has this image"


def _labels(images: list[dict[str, Any]]) -> list[str]:
    return [f"{image['width']} x {image['height']}, rollouts/{image['file']}" for image in images]


def test_report_shows_images_without_thumbnail_as_text(tmp_path, monkeypatch) -> None:
    run = make_run(tmp_path / "run")
    images = _with_images(run, 6, (30, 30), (31, 31), (32, 32), (33, 33))
    (run / "rollouts" / images[0]["file"]).unlink()
    (run / "rollouts" / images[1]["file"]).write_bytes(b"no image")
    monkeypatch.setattr(module, "THUMBNAIL_BYTES", 2_000)

    write_report([run], tmp_path / "page.html")

    data = data_of(tmp_path / "page.html")
    [name] = data["images"]
    (parts,) = [c["images"] for c in data["runs"][0]["completions"] if len(c.get("images", ())) == 4]
    texts = [{"text": f"[image {label}]"} for label in _labels(images)]
    assert parts == [*texts[:2], {"image": name, "label": _labels(images)[2]}, texts[3]]


def test_report_escapes_model_output_without_changing_it(tmp_path) -> None:
    run = make_run(tmp_path / "run")

    write_report([run], tmp_path / "page.html")

    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2, "one for the data and one for the script"
    assert "<b>" not in text
    prompts = [
        completion["prompt"]
        for completion in data_of(tmp_path / "page.html")["runs"][0]["completions"]
        if "prompt" in completion
    ]
    assert prompts
    assert all(prompt.endswith(NASTY) for prompt in prompts)


def test_as_json_writes_null_for_nonfinite_numbers_and_escapes() -> None:
    text = as_json({"a": [math.nan, math.inf, 1.5], 3: "\ud800<\u2028", "e": Path("/x")})

    assert text == r'{"a":[null,null,1.5],"3":"\ud800\u003c\u2028","e":"/x"}'
    text.encode()


@pytest.mark.slow
def test_report_page_omits_tokens_to_stay_below_its_size(tmp_path, monkeypatch) -> None:
    run = make_run(tmp_path / "run", steps=200, completions=6, tokens=600, every=8)
    large = write_report([run], tmp_path / "page.html")
    assert large < 5_000_000
    monkeypatch.setattr(module, "BYTES", large // 2)

    small = write_report([run], tmp_path / "page.html")

    assert small <= large // 2
    assert small == (tmp_path / "page.html").stat().st_size
    (run_data,) = data_of(tmp_path / "page.html")["runs"]
    assert {completion["tokens"]["count"] for completion in run_data["completions"]} == {600}
    assert all(len(completion["tokens"]["text"]) < 600 for completion in run_data["completions"])


def test_report_without_tokenizer_shows_token_ids(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    (run / "model" / "tokenizer.json").unlink()

    write_report([run], tmp_path / "page.html")

    (run_data,) = data_of(tmp_path / "page.html")["runs"]
    assert re.fullmatch(r"\[\d+\] ", run_data["completions"][0]["tokens"]["text"][0])


def test_report_of_several_runs_lists_differing_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (make_run(tmp_path / name, actor={"lr": lr}) for name, lr in (("a", 1.0), ("b", 2.0)))

    assert main.main(["report", str(first), str(second)]) == 0

    data = data_of(tmp_path / "comparison.html")
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["differing"] == [["actor.lr", 1.0, 2.0]]


def test_report_of_run_without_records_is_written(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("total_steps: 3\n")

    assert main.main(["report", str(tmp_path)]) == 0

    (run_data,) = data_of(tmp_path / "report.html")["runs"]
    assert (run_data["curves"], run_data["completions"], run_data["events"], run_data["total_steps"]) == ({}, [], [], 3)


# ---- during a run


def test_run_report_writes_page_during_run_and_at_its_end(tmp_path, monkeypatch) -> None:
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


def test_run_report_before_begin_writes_nothing(tmp_path) -> None:
    with RunReport(tmp_path, []):
        pass

    assert [*tmp_path.iterdir()] == []


def test_run_report_write_failure_logs_one_warning(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "SOON", 0.01)
    monkeypatch.setattr(module, "WRITE_SECONDS", 0)
    run = make_run(tmp_path / "run")
    (run / "report.html").mkdir()
    with RunReport(run, []) as report:
        report.begin()
        wait_until(lambda: "cannot write report.html" in caplog.text, 30)

    assert caplog.text.count("cannot write report.html") == 1


def test_samples_do_not_read_unchanged_files_again(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    samples = Samples(run)
    before = samples.choose()
    for path in (run / "rollouts").glob("step_[1-5]-0.jsonl"):
        path.write_bytes(b"x" * path.stat().st_size)
    (run / "rollouts" / "step_6-0.jsonl").write_text("")

    after = samples.choose()

    assert after == [completion for completion in before if completion["step"] != 6]


# ---- selection of completions


@given(st.integers(0, 3000))
def test_spread_steps_are_few_and_include_first_and_newest(number: int) -> None:
    steps = list(range(1, number + 1))
    selected = spread_steps(steps)
    assert len(selected) <= STEPS + NEWEST + 1
    assert set(steps[:1] + steps[-NEWEST:]) <= set(selected) <= set(steps)


@given(st.lists(st.floats(allow_nan=True), max_size=60))
def test_extremes_include_lowest_and_highest_reward(rewards: list[float]) -> None:
    completions = [{"reward": reward, "episode_id": 0, "group_id": i} for i, reward in enumerate(rewards)]
    selected = extremes(completions)
    assert len(selected) == min(EACH, len(rewards))
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if finite and len(finite) == len(rewards):
        assert selected[0]["reward"] == min(finite)
        assert selected[-1]["reward"] == max(finite)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000), st.integers(10, 400))
def test_thinned_curve_is_short_and_keeps_ends_and_peaks(values: list[float], points: int) -> None:
    steps, kept_values = thinned((list(range(len(values))), values), points)
    assert len(steps) <= points + 4
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert max(kept_values) == pytest.approx(max(values), rel=1e-5)
    assert min(kept_values) == pytest.approx(min(values), rel=1e-5)


def test_stages_of_long_run_sum_to_step_time() -> None:
    times = {"time/step": 6.0, "time/train": 3.0, "time/gap": 1.0}
    records = [{"step": step, **times, "time/rollout_wait": step % 2} for step in range(1, 2 * BANDS + 1)]

    stages = stages_of(records)

    assert len(stages["steps"]) == BANDS
    assert stages["steps"][-1] == 2 * BANDS
    assert list(stages["seconds"]) == ["rollout_wait", "gap", "train", "other"]
    assert [sum(parts) for parts in zip(*stages["seconds"].values(), strict=True)] == [6.0] * BANDS
    assert set(stages["seconds"]["rollout_wait"]) == {0.5}


def test_report_ignores_incomplete_last_record(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')

    write_report([run], tmp_path / "page.html")

    assert data_of(tmp_path / "page.html")["runs"][0]["step"] == 6
    assert "reward/mean" in curves_of([{"step": 1, "reward/mean": 1.0, "x": None, "flag": True}], 10)


# ---- in a browser

PROBE = """<script>
const lines = [];
for (const kind of ["error", "warn"]) console[kind] = (...words) => lines.push(words.join(" "));
window.addEventListener("error", (event) => lines.push(event.message));
window.addEventListener("load", () => {
  const change = (one, value) => { one.value = value; one.dispatchEvent(new Event("change")); };
  for (const one of document.querySelectorAll("select")) {
    for (const option of [...one.options]) change(one, option.value);
    change(one, one.options[0].value);
  }
  for (const one of document.querySelectorAll("details")) {
    one.open = true;
    one.dispatchEvent(new Event("toggle"));
  }
  for (const svg of document.querySelectorAll("svg")) {
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: 200 }));
  }
  const { loadEventStart, fetchStart } = performance.getEntriesByType("navigation")[0];
  const count = (what) => document.querySelectorAll(what).length;
  const texts = (what, root = document) =>
    [...root.querySelectorAll(what)].map((one) => one.firstChild?.data ?? one.textContent);
  const requests = performance.getEntriesByType("resource").map((one) => one.name);
  document.documentElement.style.width = "390px";
  const wide = [...document.querySelectorAll("body *")].filter(
    (one) => one.getBoundingClientRect().right > 391 && !one.closest(".table"));
  const result = JSON.stringify({
    wide: wide.map((one) => one.tagName),
    lines, requests, ms: loadEventStart - fetchStart, cards: count(".card"), bold: count("#completions .text b"),
    completions: count("#completions details"), extremes: texts("#extremes h3"), marks: count(".resumed, .checkpoint"),
    summary: texts("#summary h3, #summary td"),
    explained: [...document.querySelectorAll(".explained")].map((one) => one.title),
    axes: [...document.querySelectorAll("#panels .card")].map((one) => [texts("h3", one)[0], texts("svg text", one)]),
    pictures: [...document.querySelectorAll("#completions img")].map((one) => one.src.split(";")[0]),
    charts: [...document.querySelectorAll("svg")].map((one) => [one.role, one.ariaLabel]),
  });
  document.body.replaceChildren();  // lone surrogates in completions cannot be dumped
  document.body.dataset.probe = result;
});
</script>"""
"""Script that tries every option of the loaded page and stores the results in the page."""


def _probe(tmp_path: Path, *runs: Path) -> dict[str, Any]:
    """Open the page of runs in a browser and return the results of the probe."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is not installed")
    write_report(runs, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("<head>", f"<head>{PROBE}"), encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    target = ("--dump-dom", f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}")

    begin = time.monotonic()
    done = subprocess.run([browser, *options, *target], capture_output=True, text=True, timeout=180)

    match = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert match, f"the page did not load within {time.monotonic() - begin:.0f} s: {done.stderr[-2000:]}"
    probe: dict[str, Any] = json.loads(match[1].replace("&quot;", '"').replace("&amp;", "&"))
    return probe


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_browser_opens_page_of_long_run_with_labeled_charts(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=90, completions=6, tokens=200, every=4)
    _with_images(run, 89, (300, 200), (20, 10))
    (run / "checkpoints" / "step_40").mkdir(parents=True)
    names_of(run).add("status", json.dumps({"state": "finished", "restart_steps": [30]}))

    probe = _probe(tmp_path, run)

    assert probe["lines"] == []
    assert probe["requests"] in ([], ["data:,"])
    assert probe["wide"] == [], "wider than a phone"
    assert probe["bold"] == 0, "model output is text, not HTML"
    assert probe["cards"] == 10 + 2
    axes = dict(probe["axes"])
    assert axes["Accuracy"][:8] == ["fraction", "step", "0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert axes["Length (tokens)"][:2] == ["tokens", "step"]
    assert any(title.startswith("eval/accuracy: held-out episodes") for title in probe["explained"])
    assert [text.partition(":")[0] for text in probe["extremes"]] == ["Best of step 89", "Worst of step 89"]
    assert probe["marks"] == 2 * 10
    assert probe["summary"][:2] == ["Model", "tiny"]
    assert probe["completions"] >= 40
    assert sorted(probe["pictures"]) == ["data:image/jpeg"] * 2 + ["data:image/png"] * 2
    assert probe["ms"] < 1000
    first, *_, last = (json.loads(line)["length/mean"] for line in (run / "metrics.jsonl").read_text().splitlines())
    assert {role for role, _ in probe["charts"]} == {"img"}
    labels = [label for _, label in probe["charts"]]
    assert f"Length (tokens): length/mean {first:.4g} at step 1, {last:.4g} at step 90" in labels
    assert all(re.search(r"\w .+ at step \d+, .+ at step \d", label) for label in labels)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_browser_opens_comparison_with_final_metrics_and_settings(tmp_path) -> None:
    runs = [make_run(tmp_path / name, actor={"lr": lr}) for name, lr in (("a", 1.0), ("b", 2.0))]

    probe = _probe(tmp_path, *runs)

    assert probe["lines"] == []
    text = probe["summary"]
    final, differing = text.index("Final metrics"), text.index("Differing settings")
    last = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert text[final + 1 : final + 4] == ["reward/mean", *(f"{last['reward/mean']:.4g}" for _ in runs)]
    assert text[differing + 1 :] == ["actor.lr", "1", "2"]
    assert len(probe["extremes"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_browser_charts_of_run_share_axis_of_steps(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, "eval/accuracy": 0.5, "gap/mean_abs": 1e-7}) + "\n")

    axes = dict(_probe(tmp_path, run)["axes"])

    assert len(axes) > 2
    assert all(texts[-4:] == ["0", "2", "4", "6"] for texts in axes.values()), axes
