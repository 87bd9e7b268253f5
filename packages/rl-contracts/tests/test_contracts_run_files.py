"""Files of a run directory."""

from rl_contracts.runtime.run_files import STAGE_FILE, StageFile, read_stage, report_progress
from rl_contracts.testing.waiting import wait_until


def test_stage_file_shows_stage_and_progress_until_block_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_contracts.runtime.run_files.WRITE_SECONDS", 0.01)
    (tmp_path / STAGE_FILE).write_text('{"stage": "train"}')  # of a killed trainer
    file = StageFile(tmp_path, ranks=2)
    assert read_stage(tmp_path) is None

    with file.show("evaluate"):
        wait_until(lambda: (read_stage(tmp_path) or {}).get("stage") == "evaluate", 30)
        report_progress(3, 8)
        wait_until(lambda: read_stage(tmp_path)["progress"] == [6, 16], 30)
    report_progress(4, 8)

    assert [*tmp_path.iterdir()] == []


def test_stage_file_in_missing_directory_is_ignored(tmp_path):
    with StageFile(tmp_path / "missing").show("train"):
        report_progress(1, 2)
    assert read_stage(tmp_path / "missing") is None
