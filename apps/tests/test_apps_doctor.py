"""`rl doctor`: each injected fault is reported with its remedy; the trial of a command takes a step."""

from __future__ import annotations

import resource
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from rl_apps.cli import doctor, main
from rl_apps.embedded.prepare import prepare_from_scratch

Usage = namedtuple("Usage", ["total", "used", "free"])


def full_disk(_: Any) -> Usage:
    return Usage(2**40, 2**40, 0)


def raise_os_error(*_: Any, **__: Any) -> Any:
    raise OSError("injected fault")


FAULTS = {
    "memory": (doctor, "MEMORY", 2**60, "smaller model"),
    "/dev/shm": (shutil, "disk_usage", full_disk, "publish.route=disk"),
    "disk": (shutil, "disk_usage", full_disk, "run_dir"),
    "clock": (doctor, "SKEW", -1.0, "NTP"),
    "runs": (doctor.tempfile, "NamedTemporaryFile", raise_os_error, "run_dir"),
    "open files": (resource, "getrlimit", lambda _: (256, 1024), "ulimit -n 1024"),
    "ports": (socket, "create_server", raise_os_error, "loopback"),
    "host name": (socket, "getaddrinfo", raise_os_error, "/etc/hosts"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_doctor_reports_machine_fault_with_remedy(what, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "devices", lambda: doctor.Finding("devices", "not checked in this test"))
    before = {finding.what: finding for finding in doctor.machine(tmp_path / "runs")}
    target, name, fault, remedy = FAULTS[what]
    monkeypatch.setattr(target, name, fault)

    assert doctor.doctor("", (), tmp_path / "runs") == 1
    lines = capsys.readouterr().out.splitlines()
    [at] = [index for index, line in enumerate(lines) if line.startswith(f"!!  {what} ")]
    assert remedy in lines[at + 1]
    assert what not in before or not before[what].remedy


def test_doctor_gpus_invisible_to_torch_are_a_fault(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "install a torch" in doctor.devices().remedy
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.devices().remedy == ""


def test_doctor_different_gpu_counts_are_a_fault(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    finding = doctor.devices()
    assert "1 GPU, " in finding.message
    assert "launcher finds 2" in finding.message
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


def test_doctor_proxies_are_named_without_their_values(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    assert "http_proxy" in doctor.proxies().message
    assert "secret" not in doctor.proxies().message


def test_doctor_on_healthy_machine_reports_no_fault_and_no_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "DISK", 1)
    monkeypatch.setattr(doctor, "SHARED", 1)
    monkeypatch.setattr(doctor, "MEMORY", 1)
    monkeypatch.setattr(doctor, "FILES", 1)
    assert main.main(["doctor", "--directory", str(tmp_path / "a" / "b")]) == 0
    output = capsys.readouterr().out
    assert "no faults" in output
    assert "!!" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "code"), [("algorithm=nothing-like-it", ""), ("rollout.reward=nothing_like_it:f", "exit code 2")]
)
def test_doctor_trial_of_invalid_command_shows_its_message(setting, code):
    [finding] = doctor.trial("gsm8k-grpo", [setting])
    assert code in finding.message
    assert "like" in finding.message
    assert finding.remedy


@pytest.mark.nightly
def test_doctor_trial_takes_a_step_and_reports_log_prob_gap(tmp_path: Path):
    model = prepare_from_scratch(["What is 1 + 2? #### 3"], 1, cache_dir=tmp_path)
    step, gap = doctor.trial("gsm8k-grpo", [f"model.path={model}", "recipe=embedded"])
    assert (step.remedy, gap.remedy) == ("", "")
    assert "one step of 1 trainer(s)" in step.message
    assert "differ by" in gap.message
