"""Tests of the registry with a temporary distribution that has entry points."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from rl_contracts import registry
from rl_contracts.config import ComponentConfig, field_docstrings
from rl_contracts.errors import ConfigError, RLError

GROUP = "rl.rewards"
ENTRY_POINTS = """[rl.rewards]
fixture_good = fixture_rewards:good_reward_fn
fixture_nested = fixture_rewards:Rewards.nested
fixture_gone = fixture_rewards:gone
fixture_no_module = fixture_missing_module:x

[rl.train_engines]
fixture_engine = fixture_rewards:Engine
fixture_bare = fixture_rewards:Rewards
fixture_odd = fixture_rewards:Odd
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a third-party package with entry points, in the layout of an installer."""
    (tmp_path / "fixture_rewards.py").write_text(
        "from dataclasses import dataclass\n"
        "def good_reward_fn(): return 1.0\nclass Rewards:\n    nested = staticmethod(good_reward_fn)\n"
        "class Engine: pass\n@dataclass\nclass EngineConfig:\n    depth: int = 3\n"
        "class Odd: pass\nOddConfig = {'depth': 3}\n"
    )
    info = tmp_path / "fixture_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fixture-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("fixture_rewards", None)


@pytest.mark.parametrize("name", ["fixture_good", "fixture_nested", "fixture_rewards:good_reward_fn"])
def test_load_name_or_dotted_path_returns_object(name: str) -> None:
    assert registry.load(GROUP, name)() == 1.0


def test_load_unknown_name_lists_installed_names_and_package() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.load(GROUP, "fixture_goood")

    message = str(caught.value)
    assert "rl.rewards: unknown name 'fixture_goood'; did you mean 'fixture_good'? Installed: " in message
    assert "fixture_nested" in message
    missing = "a package that registers it" if importlib.util.find_spec("rl_rewards") else "rl-rewards"
    assert f"Install {missing}, or " in message


def test_load_project_engine_not_installed_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "available", lambda group: {"fsdp": "rl_engines_fsdp.engine:FSDPEngine"})
    assert "Install rl-engines-megatron, or " in registry.unknown_name_error("megatron", "rl.train_engines")


@dataclass
class _RewardConfig(ComponentConfig):
    group: ClassVar[str] = GROUP
    setting: ClassVar[str] = "reward"


def test_require_installed_reports_unknown_names_without_importing() -> None:
    registry.require_installed(_RewardConfig("fixture_good+fixture_no_module+my_module:f"))
    registry.require_installed(_RewardConfig("none"))
    with pytest.raises(ConfigError, match="did you mean 'fixture_good'"):
        registry.require_installed(_RewardConfig("fixture_nested+fixture_god"))


def test_load_from_unknown_group_reports_nothing_installed() -> None:
    with pytest.raises(ConfigError, match=r"unknown name 'x'\. Installed: nothing\. Install a package"):
        registry.load("rl.fixture_group", "x")


@pytest.mark.parametrize("name", ["fixture_gone", "fixture_no_module", ":x", "fixture_rewards:"])
def test_load_failed_import_raises_with_cause(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r}.* cannot be imported") as caught:
        registry.load(GROUP, name)

    assert isinstance(caught.value, RLError)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["fixture_engine", "fixture_rewards:Engine"])
def test_settings_returns_dataclass_in_module_of_class(name: str) -> None:
    assert registry.settings("rl.train_engines", name)().depth == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fixture_bare", "'fixture_bare' refers to 'fixture_rewards:RewardsConfig', which cannot be imported"),
        (
            "fixture_odd",
            "'fixture_rewards:OddConfig' must be the settings dataclass of 'fixture_odd'; found {'depth': 3}",
        ),
        ("fixture_engin", "did you mean 'fixture_engine'"),
    ],
)
def test_settings_missing_or_invalid_names_expected_class(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        registry.settings("rl.train_engines", name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    return (", r"SyntaxError: .*\({file}:2\)"),
        ("import os\n\nos.no_such_thing()", r"AttributeError: .*\({file}:3\)"),
        (
            "import module_that_is_nowhere",
            r"No module named 'module_that_is_nowhere' \({file}:1\)\. Searched",
        ),
    ],
)
def test_load_module_that_raises_reports_file_and_line(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / f"broken_{abs(hash(text))}.py"
    file.write_text(text)

    with pytest.raises(ConfigError, match=expected.replace("{file}", re.escape(str(file)))):
        registry.load(GROUP, f"{file.stem}:f")


def test_load_file_without_package_imports_neighboring_modules(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "fixture_beside.py").write_text("ONE = 1\n")
    text = "from dataclasses import dataclass\nfrom fixture_beside import ONE\n"
    settings = '@dataclass\nclass PartConfig:\n    """Settings."""\n    one: int = ONE\n    """A number."""\n'
    (tmp_path / "parts" / "math.py").write_text(f"{text}class Part:\n    one = ONE\n{settings}")

    assert registry.load("rl.rewards", "parts/math.py:Part.one") == 1
    assert registry.load("rl.rewards", "./parts/math.py:Part") is registry.load("rl.rewards", "parts/math.py:Part")
    assert field_docstrings(registry.settings("rl.rewards", "parts/math.py:Part")) == {"one": "A number."}
    with pytest.raises(ConfigError, match=r"expected FILE.py:NAME, found 'parts/math.py'"):
        registry.load("rl.rewards", "parts/math.py")
    with pytest.raises(ConfigError, match=r"gone.py:f' cannot be imported: FileNotFoundError"):
        registry.load("rl.rewards", "gone.py:f")


def test_load_sigterm_during_import_exits_process(tmp_path, monkeypatch):
    (tmp_path / "slow_part.py").write_text("raise SystemExit(128 + 15)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="143"):
        registry.load("rl.rewards", "slow_part.py:reward")
