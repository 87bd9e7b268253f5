"""Change the numeric core in many small ways, and count the changes that its tests find: mutation testing.

    uv run --group mutants infra/ci/mutants.py [--count 300] [--seed 0] [--jobs 2] [--area NAME] [--report FILE]

A mutant is the source with one operator, number, keyword or branch changed by Cosmic Ray. Mutants are drawn at random
from the files of `AREAS`. Each is tested in a copy of the working tree, with the tests of its area. A mutant with which
all tests pass survives: either a test is missing, or the change has no effect. Survivors without an effect are listed
in `equivalent_mutants.tsv` with the reason.

Prints the survivors as diffs, and a JSON line last: the number of mutants and of killed ones in each area.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.tsv")
FUNCTIONAL = "packages/rl-trainers/src/rl_trainers/algorithms/functional"
TIMEOUT = 300
"""Seconds for the tests of one mutant. A mutant that exceeds them is killed: it waits or repeats forever."""


@dataclass(frozen=True)
class Area:
    """Source files, and the tests that must find a change in them."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


def _trainers(*names: str) -> tuple[str, ...]:
    return tuple(f"packages/rl-trainers/tests/test_trainers_{name}.py" for name in names)


AREAS = {
    "losses": Area(
        (
            *(
                f"{FUNCTIONAL}/{name}.py"
                for name in (
                    "policy_losses",
                    "policy_terms",
                    "aggregation",
                    "correction",
                    "kl",
                    "value_and_preference_losses",
                )
            ),
            "packages/rl-trainers/src/rl_trainers/algorithms/objective.py",
        ),
        _trainers(
            "policy_losses", "functional", "corrections", "objective", "preference", "rewards", "actor", "algorithm"
        ),
    ),
    "advantages": Area(
        (
            f"{FUNCTIONAL}/advantages.py",
            f"{FUNCTIONAL}/reward_shaping.py",
            "packages/rl-trainers/src/rl_trainers/algorithms/credit.py",
        ),
        _trainers("advantages", "rewards", "functional", "actor", "algorithm"),
    ),
    "packing": Area(
        (
            "packages/rl-contracts/src/rl_contracts/batch/packing.py",
            "packages/rl-contracts/src/rl_contracts/models/micro_batches.py",
            "packages/rl-contracts/src/rl_contracts/models/token_logprobs.py",
        ),
        (
            "packages/rl-contracts/tests/test_contracts_packing.py",
            "packages/rl-contracts/tests/test_contracts_logprobs.py",
            "packages/rl-contracts/tests/test_contracts_redistribute.py",
            "packages/rl-contracts/tests/test_contracts_step_gate.py",
            "packages/rl-engines-fsdp/tests/test_fsdp_packed_forward.py",
            "packages/rl-engines-fsdp/tests/test_fsdp_invariance.py",
        ),
    ),
    "sharding": Area(
        (
            "packages/rl-contracts/src/rl_contracts/batch/redistribution.py",
            "packages/rl-contracts/src/rl_contracts/batch/sequence_exchange.py",
        ),
        (
            "packages/rl-contracts/tests/test_contracts_sharding.py",
            "packages/rl-contracts/tests/test_contracts_redistribute.py",
            "packages/rl-contracts/tests/test_contracts_parallel.py",
        ),
    ),
    "staleness": Area(
        ("packages/rl-workflows/src/rl_workflows/rollout/staleness.py",),
        (
            "packages/rl-workflows/tests/test_workflows_staleness.py",
            "packages/rl-workflows/tests/test_workflows_scheduler.py",
            "packages/rl-workflows/tests/test_workflows_runtime.py",
        ),
    ),
    "sampling": Area(
        ("packages/rl-inference/src/rl_inference/embedded_server/sampling.py",),
        (
            "packages/rl-inference/tests/test_inference_sampling.py",
            "packages/rl-inference/tests/test_inference_sampling_reference.py",
            "packages/rl-inference/tests/test_inference_decoding.py",
        ),
    ),
    "checksums": Area(
        (
            "packages/rl-contracts/src/rl_contracts/weights/checksums.py",
            "packages/rl-contracts/src/rl_contracts/weights/committed_record.py",
            "packages/rl-contracts/src/rl_contracts/weights/flat_layout.py",
        ),
        (
            "packages/rl-contracts/tests/test_contracts_weights.py",
            "packages/rl-contracts/tests/test_contracts_committed.py",
        ),
    ),
    "publisher": Area(
        ("packages/rl-trainers/src/rl_trainers/weight_sync/publisher.py",),
        _trainers("publishing", "publish_broadcast", "canary", "publish_ranks"),
    ),
    "rewards": Area(
        tuple(
            f"packages/rl-rewards/src/rl_rewards/{name}.py"
            for name in ("answer_forms", "extraction", "formatting", "gsm8k", "markup", "numbers")
        ),
        tuple(
            f"packages/rl-rewards/tests/test_rewards_{name}.py"
            for name in ("gsm8k", "formatting", "labeled", "properties", "reasoning", "symbolic")
        ),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """A file in which an operator of Cosmic Ray changes the `occurrence`-th place where it applies."""

    area: str
    path: str
    operator: str
    occurrence: int
    line: int
    column: int

    @property
    def key(self) -> str:
        """Columns of `equivalent_mutants.tsv` that identify the mutant. Other edits of the file do not change them."""
        text = (ROOT / self.path).read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        return f"{self.path}\t{self.operator}\t{text}"


def mutants_of(area: str, path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    nodes, ignored, mutants = list(ast_nodes(get_ast(text))), _ignored_lines(text), list[Mutant]()
    for name in sorted(operator_names()):
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        mutants += [
            Mutant(area, path, name, number, line, column)
            for number, (line, column) in enumerate(places)
            if line not in ignored
        ]
    return mutants


def _ignored_lines(text: str) -> set[int]:
    """Return the lines whose changes have no effect on results: annotations, imports and raised errors."""
    lines = set[int]()
    for node in ast.walk(ast.parse(text)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns, *(argument.annotation for argument in node.args.args + node.args.kwonlyargs)]
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Raise) or (
            isinstance(node, ast.AnnAssign) and node.value is None
        ):
            parts = [node]
        for part in filter(None, parts):
            lines |= {*range(part.lineno, part.end_lineno + 1)}  # type: ignore[attr-defined]
    return lines


def draw(areas: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants at random: at most one per place, and the same number from each area if there are enough."""
    generator, queues = random.Random(seed), list[list[Mutant]]()
    for area in areas:
        mutants = [mutant for path in AREAS[area].sources for mutant in mutants_of(area, path)]
        generator.shuffle(mutants)
        queues.append(list({(mutant.path, mutant.line, mutant.column): mutant for mutant in mutants}.values()))
    turns = [mutant for turn in zip_longest(*queues) for mutant in turn if mutant is not None]
    return turns[:count]


class Copies:
    """Copies of the working tree, one per job, in which mutants are tested."""

    def __init__(self, directory: Path, jobs: int) -> None:
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        self._free = SimpleQueue[Path]()
        for job in range(jobs):
            for name in filter(None, files.stdout.decode().split("\0")):
                target = directory / str(job) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
            self._free.put(directory / str(job))

    def test(self, area: str, mutant: Mutant | None = None) -> tuple[bool, str]:
        """Return whether the tests of an area pass with a mutant, or with the unchanged source, and their output."""
        tree = self._free.get()
        sources = ":".join(str(source) for source in (*tree.glob("packages/*/src"), tree / "apps/src"))
        options = f"-x -q -n0 --all -p no:cacheprovider --rootdir {tree}"
        command = (
            f"env -C {tree} PYTHONPATH={sources} {sys.executable} -m pytest {options} {' '.join(AREAS[area].tests)}"
        )
        try:
            with (
                nullcontext()
                if mutant is None
                else use_mutation(tree / mutant.path, get_operator(mutant.operator)(), mutant.occurrence)
            ):
                outcome, output = run_tests(command, TIMEOUT)
        finally:
            self._free.put(tree)
        return outcome == TestOutcome.SURVIVED, output


def main() -> None:
    """Draw the mutants, test them, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--area", action="append", choices=AREAS, help="draw only from this area; may be repeated")
    options = parser.parse_args()
    areas = options.area or list(AREAS)
    equivalent = {line.rpartition("\t")[0] for line in EQUIVALENT.read_text(encoding="utf-8").splitlines()}
    mutants = [mutant for mutant in draw(areas, options.count, options.seed) if mutant.key not in equivalent]
    killed, tested = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        copies = Copies(Path(directory), options.jobs)
        for area, (passed, output) in zip(areas, pool.map(copies.test, areas), strict=True):
            if not passed:
                sys.exit(f"tests of {area} fail without a mutant:\n{output[-2000:]}")
        tests = pool.map(copies.test, [mutant.area for mutant in mutants], mutants)
        for mutant, (survived, _) in zip(mutants, tests, strict=True):
            print(f"{tested.total()} of {len(mutants)} mutants tested", end="\r", file=sys.stderr)
            tested[mutant.area] += 1
            killed[mutant.area] += not survived
            if survived:
                print(f"survived: {mutant.key}\n{_difference(mutant)}", flush=True)
    share = killed.total() / tested.total()
    print(json.dumps({"mutants": tested.total(), "killed_share": round(share, 4), "tested": tested, "killed": killed}))


def _difference(mutant: Mutant) -> str:
    """Return the changed lines of a mutant."""
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence) or ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), mutant.path, f":{mutant.line}", "", "", 0, "")
    return "\n".join([*lines][2:])


if __name__ == "__main__":
    main()
