"""Every causal family of the installed transformers, tiny: through the train engine on one process and on two, and
through the embedded server, against transformers' own forward of each row alone.

    python tests/support/families_sweep.py llama qwen3       # some families; without names all of them
    python tests/support/families_sweep.py --log sweep.jsonl # a line per family, as they are done

Each comparison ends `ok`, `refused` (by an error of this project, which says why) or `wrong` (other numbers, or any
other error). A family that no tiny configuration is known for is `not made`, and says why.
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
"""Parameters of a tiny model, at most."""


def families() -> list[str]:
    """All causal families, by `model_type`, and the variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def sweep(names: Iterable[str], scratch: Path, two: bool = True) -> Iterator[tuple[str, dict[str, Result]]]:
    """The results of each family, in turn; without `two`, of this process alone."""
    ranks = RankPair() if two else None
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
            raise ValueError("transformers computes nan of it")
    except Exception as error:
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        return {"made": {"status": "not made", "why": why}}
    torch.save(expected, directory / "expected.pt")
    results: dict[str, Result] = {}
    if ranks is not None:
        ranks.submit(path)
    check_engine(path, expected, results)
    check_server(path, results)
    if ranks is None:
        return results
    both = ranks.result()
    if results.get("export", {}).get("status", "ok") == "ok" and "export" in both:
        results["export"] = both["export"]
    return results | {"engine d2": both["engine d2"]}


def _without_paths(results: dict[str, Result], directory: Path) -> dict[str, Result]:
    for result in results.values():
        why = re.sub(rf"(model )?{re.escape(str(directory))}[^:\s]*: ", "", result.get("why", ""))
        if why:
            result["why"] = " ".join(why.split())
    return results


HEAD = """# Families of models

What engine and embedded server make of every causal family of transformers {version}, each as a tiny random model
with the windows, rope and dropout of its default configuration, and of some further configurations. `ok`: in
float32, log-probs of each row are within 2e-5 nats, and gradients within 1e-4 of a tensor's largest entry, of what
transformers gives on that row alone in evaluation mode. *Engine d2* is two processes. *Export*: a saved directory
has the keys of its source, and transformers reloads it equal. *Publish*: with what the engine published after a
step, the server scores as transformers does with the export. What is refused is refused when the model is loaded,
for the reason below. `pytest --nightly tests/end_to_end/test_families.py` writes this page.

{passed} families pass engine and server, {refused} are refused by one or both, {unmade} could not be made so small.

| family | engine | engine d2 | export | server | publish | remarks, and why refused |
|---|---|---|---|---|---|---|
"""


def page(found: dict[str, dict[str, Result]]) -> str:
    """The results as docs/families.md has them."""
    import transformers

    made = {name: results for name, results in found.items() if "made" not in results}
    passed = [name for name, results in made.items() if all(result["status"] == "ok" for result in results.values())]
    counts = {"passed": len(passed), "refused": len(made) - len(passed), "unmade": len(found) - len(made)}
    lines = [HEAD.format(version=transformers.__version__, **counts)]
    for name, results in made.items():
        cells = [results.get(part, {}).get("status", "") for part in CHECKS]
        told = {part: results[part]["why"] for part in CHECKS if results.get(part, {}).get("why")}
        if told.get("engine") and told["engine"] in told.get("engine d2", ""):
            del told["engine d2"]
        why = " ".join(f"*{part}:* {text}" for part, text in told.items())
        lines.append(f"| {name} | {' | '.join(cells)} | {_cell(why)} |\n")
    unmade = [f"- {name}: {_cell(results['made']['why'])}\n" for name, results in found.items() if "made" in results]
    return "".join([*lines, "\n## Not made\n\n" if unmade else "", *unmade])


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
            line = json.dumps({"family": name} | results)
            print(line, flush=True)
            if arguments.log:
                with arguments.log.open("a") as log:
                    log.write(line + "\n")


if __name__ == "__main__":
    main()
