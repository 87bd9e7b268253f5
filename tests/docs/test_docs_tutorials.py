"""Run the programs of docs/tutorials: with `--dry-run` for each commit, and with two steps in the nightly run.

infra/docs/reference.py generates their pages: docs/tutorials/1_gsm8k_sft.md, docs/tutorials/2_gsm8k_grpo.md,
docs/tutorials/3_ppo.md, docs/tutorials/4_hh_rlhf_rm.md, docs/tutorials/5_hh_rlhf_dpo.md,
docs/tutorials/6_multi_turn_math.md, docs/tutorials/7_math_agent.md, docs/tutorials/8_pretrained_model.md.
"""

import re
import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.py"))
SUMMARIES = {
    "1_gsm8k_sft": r"loss on unseen sums: \d+\.\d\d before, \d+\.\d\d after",
    "2_gsm8k_grpo": r"step 2: reward -?\d\.\d\d, staleness \d\.\d",
    "3_ppo": r"accuracy \d\.\d\d before, \d\.\d\d after\nexplained variance -?\d+\.\d\d, clipped \d",
    "4_hh_rlhf_rm": r"[+-]\d\.\d\d  '.*#### 15'\n[+-]\d\.\d\d  '.*#### 7'\n[+-]\d\.\d\d  '.*>>15'",
    "5_hh_rlhf_dpo": r"step 2: \d+% right, margin [+-]\d",
    "6_multi_turn_math": r"step 2: reward \d\.\d\d, turns \d\.\d\d",
    "7_math_agent": r"step 2: reward \d\.\d\d, calls \d\.\d\d",
    "8_pretrained_model": r"held-out accuracy: \d\.\d\d before, \d\.\d\d after",
}
"""Pattern of the last lines that each program prints."""


@pytest.fixture(
    params=[pytest.param(p, id=p.stem, marks=pytest.mark.nightly if "pretrained" in p.stem else ()) for p in PROGRAMS]
)
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Program of a tutorial, which runs in `tmp_path`. The pretrained model is there if the program needs it."""
    if "pretrained" in request.param.stem:
        (tmp_path / "runs" / "models").mkdir(parents=True)
        (tmp_path / "runs" / "models" / "smollm2").symlink_to(request.getfixturevalue("smollm2"))
    return request.param


def test_tutorials_are_numbered_and_cover_every_command() -> None:
    assert [program.stem.partition("_")[0] for program in PROGRAMS] == [str(i + 1) for i in range(len(PROGRAMS))]
    general = {"grpo", "sft"}  # the other commands are presets of these
    with_images = {"clevr-count-sft", "clevr-count-grpo", "geometry3k-grpo"}  # docs/howto/vision.md
    commands = {point.name for point in entry_points(group="rl.apps")} - general - with_images
    used = set(re.findall(r'main\("([\w-]+)", settings\)', "".join(p.read_text() for p in PROGRAMS)))
    assert commands == used - general


@pytest.mark.slow
def test_tutorial_dry_run_exits_0(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "--dry-run"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")

    assert ended.value.code == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_tutorial_prints_its_summary(program: Path, tmp_path: Path) -> None:
    command = (sys.executable, str(program), "total_steps=2")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SUMMARIES[program.stem], done.stdout), done.stdout
