"""`rl doctor`: each fault is planted and told with its remedy; a command takes a step."""

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


def full(_: Any) -> Usage:
    return Usage(2**40, 2**40, 0)


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError("planted")


PLANTED = {
    "memory": (doctor, "MEMORY", 2**60, "smaller model"),
    "/dev/shm": (shutil, "disk_usage", full, "publish.route=disk"),
    "disk": (shutil, "disk_usage", full, "run_dir"),
    "clock": (doctor, "SKEW", -1.0, "NTP"),
    "runs": (doctor.tempfile, "NamedTemporaryFile", refuse, "run_dir"),
    "open files": (resource, "getrlimit", lambda _: (256, 1024), "ulimit -n 1024"),
    "ports": (socket, "create_server", refuse, "loopback"),
    "host name": (socket, "getaddrinfo", refuse, "/etc/hosts"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_fault_of_the_machine_is_told_with_its_remedy(what, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "devices", lambda: doctor.Finding("devices", "not looked at here"))
    before = {found.what: found for found in doctor.machine(tmp_path / "runs")}
    where, name, fault, remedy = PLANTED[what]
    monkeypatch.setattr(where, name, fault)

    assert doctor.doctor("", (), tmp_path / "runs") == 1
    said = capsys.readouterr().out.splitlines()
    [at] = [index for index, line in enumerate(said) if line.startswith(f"!!  {what} ")]
    assert remedy in said[at + 1]
    assert what not in before or not before[what].remedy


def test_gpus_that_torch_does_not_see_are_told(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "install a torch" in doctor.devices().remedy
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.devices().remedy == ""


def test_doctor_gpus_that_the_launcher_counts_otherwise_are_a_fault(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    found = doctor.devices()
    assert "1 GPU, " in found.said
    assert "2 for the launcher" in found.said
    assert "CUDA_VISIBLE_DEVICES" in found.remedy


def test_doctor_proxies_are_named_without_their_values(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    assert "http_proxy" in doctor.proxies().said
    assert "secret" not in doctor.proxies().said


def test_well_machine_has_no_fault_and_nothing_is_left(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "DISK", 1)
    monkeypatch.setattr(doctor, "SHARED", 1)
    monkeypatch.setattr(doctor, "MEMORY", 1)
    monkeypatch.setattr(doctor, "FILES", 1)
    assert main.main(["doctor", "--directory", str(tmp_path / "a" / "b")]) == 0
    said = capsys.readouterr().out
    assert "nothing is wrong" in said
    assert "!!" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "code"), [("algorithm=nothing-like-it", ""), ("rollout.reward=nothing_like_it:f", "exit code 2")]
)
def test_trial_of_a_command_that_is_refused_says_what_it_said(setting, code):
    [found] = doctor.trial("gsm8k-grpo", [setting])
    assert code in found.said
    assert "like" in found.said
    assert found.remedy


@pytest.mark.nightly
def test_trial_of_a_command_takes_a_step_and_compares_servers_with_trainers(tmp_path: Path):
    model = prepare_from_scratch(["What is 1 + 2? #### 3"], 1, cache_dir=tmp_path)
    step, gap = doctor.trial("gsm8k-grpo", [f"model.path={model}", "recipe=embedded"])
    assert (step.remedy, gap.remedy) == ("", "")
    assert "one step of 1 trainer(s)" in step.said
    assert "differ by" in gap.said
