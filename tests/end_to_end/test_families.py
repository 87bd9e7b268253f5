"""Sweep model families through train engine, export, server and publishing; see `families_sweep`."""

from pathlib import Path

import pytest
from families_sweep import families, page, sweep

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
REQUIRED = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "glm4", "deepseek_v3", "granite", "cohere", "gpt_neox"),
]
"""Families that must pass, not be rejected."""
IN_CI = ["llama", "qwen3_moe", "gemma2", "deepseek_v3"]
"""One family per kind of attention and of MLP; all families run nightly."""
REJECTED = ["falcon", "mamba"]
"""Families rejected as of transformers 5.24, which supports replacing the attention of gptj."""


@pytest.mark.slow
def test_some_families_match_transformers_and_others_are_rejected(tmp_path):
    results_by_family = dict(sweep([*IN_CI, *REJECTED], tmp_path))

    for name, results in results_by_family.items():
        status = "rejected" if name in REJECTED else "ok"
        assert {result["status"] for result in results.values()} == {status}, (name, results)
    assert {"engine", "export", "server", "publish"} <= results_by_family[IN_CI[0]].keys()
    assert all("'rl_" not in str(results_by_family[name]) for name in REJECTED)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_family_matches_transformers_or_is_rejected(tmp_path, record_property):
    results_by_family = dict(sweep(families(), tmp_path))

    PAGE.write_text(page(results_by_family))
    tested = {name: results for name, results in results_by_family.items() if "build" not in results}
    wrong = {
        name: results for name, results in tested.items() if "wrong" in str([r["status"] for r in results.values()])
    }
    passed = [name for name, results in tested.items() if all(r["status"] == "ok" for r in results.values())]
    record_property("families that pass all stages, of those with a tiny model", f"{len(passed)} of {len(tested)}")
    assert not wrong
    assert set(REQUIRED) <= set(passed)
    assert len(tested) > 100
    assert len(passed) >= 60
