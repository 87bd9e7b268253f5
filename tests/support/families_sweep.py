"""Compare engine and server with transformers on a tiny model of every causal family.

    python tests/support/families_sweep.py llama qwen3        # these families
    python tests/support/families_sweep.py --log sweep.jsonl  # all families, one JSON line each

The train engine runs on one process and on two, and the embedded server serves the model. The reference is
transformers with one sequence per forward pass. The status of a check is one of:

- `ok`: the results match.
- `rejected`: an error of this project states why the model is not supported.
- `wrong`: the results differ, or another error occurred.
- `not built`: no tiny model of the family can be built, or transformers fails on it.
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
from families_checks import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    Result,
    check_engine,
    check_server,
    reference_results,
)
from families_ranks import RankPair

from rl_contracts.testing.families import VARIANTS, make_family

CHECKS = ("engine", "engine d2", "export", "server", "publish")
MAX_PARAMETERS = 7_000_000
"""Maximum number of parameters of a tiny model."""


def families() -> list[str]:
    """Return the `model_type` of all causal families, and the variants of this project."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def sweep(names: Iterable[str], scratch: Path) -> Iterator[tuple[str, dict[str, Result]]]:
    """Yield the results of each family."""
    ranks = RankPair()
    try:
        for name in names:
            directory = scratch / name.replace(",", "").replace(" ", "-")
            yield name, _without_paths(_one_family(name, directory, ranks), directory)
            shutil.rmtree(directory, ignore_errors=True)
            gc.collect()
    finally:
        ranks.close()


def _one_family(name: str, directory: Path, ranks: RankPair) -> dict[str, Result]:
    path = directory / "model"
    try:
        family, settings = VARIANTS.get(name, (name, {}))
        make_family(path, family, largest=MAX_PARAMETERS, **settings)
        expected = reference_results(path)
        if not all(tensor.isfinite().all() for tensor in expected.values()):
            raise ValueError("transformers computes infinite or NaN values")
    except Exception as error:
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        return {"build": {"status": "not built", "why": why}}
    torch.save(expected, directory / "expected.pt")
    results: dict[str, Result] = {}
    ranks.submit(path)
    check_engine(path, expected, results)
    check_server(path, results)
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

The causal language models of transformers {version} with the FSDP engine and the embedded server, one tiny random model
per family: {passed} pass all tests. Engine, server or both reject the other {rejected} when they load the model.

| column | test |
|---|---|
| engine, engine d2 | Log-probs and gradients on one and on two processes equal those of transformers. |
| export | A saved checkpoint has the same keys as the original one, and transformers loads the same weights from it. |
| server | Log-probs of completions and scores equal those of transformers. |
| publish | After a weight update, scores of the server equal those of transformers with the exported weights. |

transformers computes each sequence separately, in float32. Log-probs may differ by {logprobs} nats, and gradients by
{gradients} of a tensor's largest entry.

| note | meaning |
|---|---|
| layers: X | The model has layers of type X. Packed sequences and decode slots need full or sliding attention. |
| fixed attention | transformers cannot replace the attention function of this model. |
| attention mask | The model needs an attention mask, or attention that is not causal. |
| mixed sequences | The layers mix tokens of different packed sequences. |
| other numbers | The results differ from those of transformers. |
| architecture | The model is not a decoder with a linear vocabulary projection. |
| up to N of M tokens | The server limits the context to N tokens, because RoPE changes at that length. |

| family | engine | engine d2 | export | server | publish | note |
|---|---|---|---|---|---|---|
"""
NOTES = {
    r"has layers of type \[(.*?)\]": r"layers: \1",
    r"does not (?:allow|let) its attention": "fixed attention",
    r"this model also needs|its own mask or bias": "attention mask",
    r"the layers mix packed sequences": "mixed sequences",
    r"packed sequences differ by|computes other log-probs": "other numbers",
    r"expected a decoder and a linear": "architecture",
}
"""Note on the page for each pattern of an error that rejects a model."""


def page(results_by_family: dict[str, dict[str, Result]]) -> str:
    """Return the text of docs/families.md."""
    import transformers

    built = {name: results for name, results in results_by_family.items() if "build" not in results}
    passed = [name for name, results in built.items() if all(result["status"] == "ok" for result in results.values())]
    values = {
        "version": transformers.__version__,
        "passed": len(passed),
        "rejected": len(built) - len(passed),
        "logprobs": LOGPROB_TOLERANCE,
        "gradients": GRADIENT_TOLERANCE,
    }
    lines = [HEADER.format(**values)]
    for name, results in built.items():
        cells = [results.get(check, {}).get("status", "") for check in CHECKS]
        notes = {check: _note(results[check]["why"]) for check in CHECKS if results.get(check, {}).get("why")}
        if notes.get("engine d2") == notes.get("engine"):
            notes.pop("engine d2", None)
        if len(set(notes.values())) == 1 and len(notes) > 1:
            notes = {" and ".join(notes): next(iter(notes.values()))}
        text = "; ".join(f"{check}: {note}" for check, note in notes.items())
        lines.append(f"| {name} | {' | '.join(cells)} | {_cell(text)} |\n")
    unbuilt = [name for name, results in results_by_family.items() if "build" in results]
    rest = "\nNo tiny model could be built for: " + ", ".join(f"`{name}`" for name in unbuilt) + ".\n"
    return "".join([*lines, rest if unbuilt else ""])


def _note(error: str) -> str:
    """Return the note for an error, or the start of the error if no pattern matches."""
    for pattern, note in NOTES.items():
        if match := re.search(pattern, error):
            return match.expand(note).replace("'", "")
    return textwrap.shorten(error, 80)


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
