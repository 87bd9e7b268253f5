"""Families of models through engine and server; see `families_sweep`."""

from pathlib import Path

import pytest
from families_sweep import families, page, sweep

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
WANTED = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "glm4", "deepseek_v3", "granite", "cohere", "gpt_neox"),
]
"""Families that may not be refused."""
IN_CI = ["llama", "qwen3_moe", "gemma2", "deepseek_v3"]
"""One family per kind of attention and of MLP; all families run nightly."""
REFUSED = ["falcon", "mamba"]
"""Rejected as of transformers 5.24, which lets the attention of gptj be replaced."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Results of the families that CI tries."""
    return dict(sweep([*IN_CI, *REFUSED], tmp_path_factory.mktemp("families")))


def test_a_family_goes_through_engine_export_server_and_publishing(tmp_path):
    ((_, results),) = sweep(["gemma3_text"], tmp_path, two_ranks=False)

    assert {part: result["status"] for part, result in results.items()} == dict.fromkeys(
        ("engine", "export", "server", "publish"), "ok"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_CI)
def test_a_family_gives_what_transformers_gives_on_each_row_alone(family, swept):
    results = swept[family]
    assert {result["status"] for result in results.values()} == {"ok"}, results


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_wrong_is_refused_by_both_in_a_sentence(family, swept):
    results = swept[family]
    assert {result["status"] for result in results.values()} == {"rejected"}, results
    assert "'rl_" not in str(results)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_family_is_right_or_refused(tmp_path, record_property):
    found = dict(sweep(families(), tmp_path))

    PAGE.write_text(page(found))
    tried = {name: results for name, results in found.items() if "build" not in results}
    wrong = {
        name: results for name, results in tried.items() if "wrong" in str([r["status"] for r in results.values()])
    }
    passed = [name for name, results in tried.items() if all(r["status"] == "ok" for r in results.values())]
    record_property("families that pass both, of those made", f"{len(passed)} of {len(tried)}")
    assert not wrong
    assert set(WANTED) <= set(passed)
    assert len(tried) > 100
    assert len(passed) >= 60
