"""Compare engine and server with transformers on a tiny model of every causal family.

    python tests/support/families_sweep.py llama qwen3        # some families; all families without names
    python tests/support/families_sweep.py --log sweep.jsonl  # one line per family

The train engine runs on one process and on two, and the embedded server serves the model. The reference is the forward
pass of transformers for each sequence alone. A check is `ok`, `rejected` (an error of this project states the reason)
or `wrong` (different numbers or another error). A family without a known tiny configuration is `not built`.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from families_checks import Result, check_engine, check_server, reference_results
from families_ranks import RankPair

from rl_contracts.testing.families import VARIANTS, make_family

CHECKS = ("engine", "engine d2", "export", "server", "publish")
MAX_PARAMETERS = 7_000_000
"""Maximum number of parameters of a tiny model."""


def families() -> list[str]:
    """Return the `model_type` of all causal families, and the variants of this project."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def sweep(names: Iterable[str], scratch: Path, two_ranks: bool = True) -> Iterator[tuple[str, dict[str, Result]]]:
    """Yield the results of each family. Without `two_ranks`, the engine runs only in this process."""
    ranks = RankPair() if two_ranks else None
    try:
        for name in names:
            directory = scratch / name.replace(",", "").replace(" ", "-")
            yield name, _without_paths(_one_family(name, directory, ranks), directory)
            shutil.rmtree(directory, ignore_errors=True)
            gc.collect()
    finally:
        if ranks is not None:
            ranks.close()


def _one_family(name: str, directory: Path, ranks: RankPair | None) -> dict[str, Result]:
    path = directory / "model"
    try:
        family, settings = VARIANTS.get(name, (name, {}))
        make_family(path, family, largest=MAX_PARAMETERS, **settings)
        expected = reference_results(path)
        if not all(tensor.isfinite().all() for tensor in expected.values()):
            raise ValueError("transformers computes NaN")
    except Exception as error:
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        return {"build": {"status": "not built", "why": why}}
    torch.save(expected, directory / "expected.pt")
    results: dict[str, Result] = {}
    if ranks is not None:
        ranks.submit(path)
    check_engine(path, expected, results)
    check_server(path, results)
    if ranks is None:
        return results
    rank_results = ranks.result()
    if results.get("export", {}).get("status", "ok") == "ok" and "export" in rank_results:
        results["export"] = rank_results["export"]
    return results | {"engine d2": rank_results["engine d2"]}


def _without_paths(results: dict[str, Result], directory: Path) -> dict[str, Result]:
    for result in results.values():
        why = re.sub(rf"(model )?{re.escape(str(directory))}[^:\s]*: ", "", result.get("why", ""))
        if why:
            result["why"] = " ".join(why.split())
    return results


HEADER = """# Model families

This page lists which causal families of transformers {version} the train engine and the embedded server support. Each
family is tested as a tiny random model with the attention windows, RoPE and dropout of its default configuration. Some
families are also tested with other configurations.

| column | `ok` means |
|---|---|
| engine | Log-probs and gradients match those of transformers on each sequence alone. |
| engine d2 | The same on two processes. |
| export | The saved directory has the keys of its source, and transformers loads the same weights from it. |
| server | Log-probs of completions and scores match those of transformers. |
| publish | After a training step, the server's scores with the published weights match transformers on the export. |

In float32, log-probs match if they differ by at most 2e-5 nats, and gradients if they differ by at most 1e-4 of the
tensor's largest entry. Engine and server reject a model while they load it; the last column has the reason.
`pytest --nightly tests/end_to_end/test_families.py` writes this page.

{passed} families pass all checks, the engine or the server rejects {rejected}, and {unbuilt} have no tiny model.

| family | engine | engine d2 | export | server | publish | remark or reason |
|---|---|---|---|---|---|---|
"""


def page(results_by_family: dict[str, dict[str, Result]]) -> str:
    """Return the text of docs/families.md."""
    import transformers

    built = {name: results for name, results in results_by_family.items() if "build" not in results}
    passed = [name for name, results in built.items() if all(result["status"] == "ok" for result in results.values())]
    unbuilt = {name: results["build"]["why"] for name, results in results_by_family.items() if "build" in results}
    counts = {"passed": len(passed), "rejected": len(built) - len(passed), "unbuilt": len(unbuilt)}
    lines = [HEADER.format(version=transformers.__version__, **counts)]
    for name, results in built.items():
        cells = [results.get(check, {}).get("status", "") for check in CHECKS]
        reasons = {check: results[check]["why"] for check in CHECKS if results.get(check, {}).get("why")}
        if reasons.get("engine") and reasons["engine"] in reasons.get("engine d2", ""):
            del reasons["engine d2"]
        why = " ".join(f"*{check}:* {text}" for check, text in reasons.items())
        lines.append(f"| {name} | {' | '.join(cells)} | {_cell(why)} |\n")
    if unbuilt:
        lines += [
            "\n## Families without a tiny model\n\n",
            *(f"- {name}: {_cell(why)}\n" for name, why in unbuilt.items()),
        ]
    return "".join(lines)


def _cell(text: str) -> str:
    for character in "|<>":
        text = text.replace(character, "\\" + character)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--log", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for name, results in sweep(arguments.families or families(), Path(scratch)):
            record = json.dumps({"family": name} | results)
            print(record, flush=True)
            if arguments.log:
                with arguments.log.open("a") as log:
                    log.write(record + "\n")


if __name__ == "__main__":
    main()
