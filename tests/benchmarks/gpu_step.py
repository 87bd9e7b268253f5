"""Measure one GPU: training steps, a GRPO run that publishes by CUDA IPC, and the tests marked `gpu`.

    PYTHONPATH=$(printf '%s:' packages/*/src apps/src) python tests/benchmarks/gpu_step.py

The run takes at most `--seconds` (480). It needs the sources of this repository but no installed package of it. Each
result is one JSON line that is printed at once, so an interrupted run keeps its results. Every line has `part`, `gpu`,
`commit`, `torch`, `transformers` and `seconds`. A part or combination that did not run has `skipped`, `out_of_memory`
or `failed` instead of results. The exit code is 1 if a line has `failed`. Parts:

- a: `gpu_step_train.py`, a line per model, `compile` and gradient checkpointing. Needs tensordict.
- b: `gsm8k-grpo` in bfloat16 with embedded server and trainer on one GPU. The first line has completions per second,
  the `fraction` of the step time per stage (stages may overlap) and the log-prob gap. The second line has the seconds
  to publish the same model and the seconds to copy as many bytes on the device.
- c: the outcomes of the tests marked `gpu`. With `--device cpu` the tests are only collected.

`--tiny --device cpu` runs all of the code in about a minute. On a CPU, part b publishes by `shm`, and `compile` uses
the backend `eager`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from gpu_step_train import BUDGET_SPENT, lines, outcome, timed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET_FRACTIONS = {"a": 0.55, "b": 0.25, "c": 0.2}
"""Fraction of the time budget per part; the budget of parts that are not selected goes to the others."""
MODULES = {
    "a": "numpy safetensors tensordict torch transformers",
    "b": "aiohttp huggingface_hub hydra jinja2 msgspec numba omegaconf psutil rich tensordict uvloop yaml",
    "c": "hypothesis pytest pytest_asyncio pytest_timeout tensordict",
}
"""Modules that each part imports."""
GAPS = ("gap/mean_abs", "gap/max_abs", "gap/fresh_mean_abs", "gap/fresh_max_abs")
"""Log-prob gap metrics in nats: for scores after an update, and (`fresh`) for log-probs recorded during sampling."""

Lines = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """Settings of a part."""

    device: str
    tiny: bool
    deadline: float
    """Time of `time.monotonic` after which no measurement starts."""

    @property
    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


# ---- part a


def training(options: Options) -> Lines:
    """Yield the lines of part a."""
    yield from lines(options.device, options.tiny, options.deadline)


# ---- part b


def make_model(directory: Path, options: Options) -> Path:
    """Write a random model of the width and depth of Qwen2.5-1.5B, with a small vocabulary and its tokenizer."""
    import torch

    from rl_apps.embedded.prepare import ModelShape, ScratchRecipe, prepare_from_scratch
    from rl_datasets.word_problems import WordProblems

    sizes = (32, 1, 4, 32, 96) if options.tiny else (1536, 28, 12, 128, 8960)
    shape = ModelShape(*sizes, max_length=1024)
    texts = [row["messages"][0]["content"] for row in WordProblems(seed=1, size=2048)]
    with torch.device(options.device):
        path = prepare_from_scratch(texts, 1, ScratchRecipe(shape=shape), directory)
    if options.device == "cuda":
        torch.cuda.empty_cache()  # other processes share the device
    return path


def grpo_run(model: Path, directory: Path, options: Options, route: str) -> dict[str, Any]:
    """Run `gsm8k-grpo` with server and trainer on one device; return its rates, stages and log-prob gap."""
    import grpo_step

    sizes = {"prompts": 2, "group": 4} if options.tiny else {}
    job = grpo_step.Job("uniform", str(model), *((1, 2) if options.tiny else (2, 6)), **sizes)
    grpo_step.DEADLINE = max(options.remaining, 1.0)
    settings = {
        "allocation": "'embedded:d1|fsdp:d1'",
        "cluster.device": options.device,
        "publish.route": route,
        "actor.dtype": "bfloat16",
        "rollout.server.dtype": "bfloat16",
    }
    measurements = grpo_step.run_rl(job, directory, settings)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["step"] > job.warmup]
    step = statistics.mean(record["time/step"] for record in records)
    stages = sorted({name for record in records for name in record if name.startswith("time/")} - {"time/step"})
    mean = {name: statistics.mean(record.get(name) or 0.0 for record in records) for name in stages}
    gaps = {name: [r[name] for r in records if r.get(name) is not None] for name in GAPS}
    return {
        "route": route,
        **grpo_step.rates({key: value for key, value in measurements.items() if key != "step"}),
        "seconds_per_step": round(step, 4),
        "fraction": {name.removeprefix("time/"): round(value / step, 4) for name, value in mean.items()},
        "gap": {name.removeprefix("gap/"): max(values, default=None) for name, values in gaps.items()},
    }


def copy_seconds(size: int, device: str) -> float:
    """Return the median seconds of a copy of `size` bytes on the device."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = [timed(partial(target.copy_, source), device) for _ in range(7)]
    return statistics.median(seconds[2:])


def publish(model: Path, directory: Path, options: Options, route: str) -> dict[str, Any]:
    """Publish the model from an engine in this process to a server on the same device, and copy as many bytes."""
    import weight_publish

    directory.mkdir()
    with ExitStack() as stack:
        run = weight_publish.Run(stack, model, directory, route, options.device, "bfloat16")
        rounds = [run.publish() for _ in range(3 if options.tiny else 7)][2:]
        size = sum(2 * prod(spec.shape) for spec in run.engine.param_specs())
        copy = copy_seconds(size, options.device)
    seconds = statistics.median(one["total"] for one in rounds)
    return {
        "route": route,
        "bytes": size,
        "publish_s": round(seconds, 5),
        "paused_s": round(statistics.median(one["paused"] for one in rounds), 5),
        "copy_s": round(copy, 6),
        "ratio": round(seconds / copy, 2),
    }


def end_to_end(options: Options) -> Lines:
    """Yield the two lines of part b."""
    route = "ipc" if options.device == "cuda" else "shm"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = make_model(directory / "models", options)
        for name, measure in (("run", grpo_run), ("publish", publish)):
            try:
                spent = options.remaining <= 0
                fields = BUDGET_SPENT if spent else measure(model, directory / name, options, route)
            except (Exception, SystemExit) as error:  # the imported benchmarks raise SystemExit
                fields = outcome(error)
            yield {"measured": name} | fields


# ---- part c


def gpu_tests(options: Options) -> Lines:
    """Yield the line of part c: outcomes of the tests marked `gpu` that finished in time."""
    files = [path for folder in ("packages", "tests") for path in sorted((ROOT / folder).rglob("test_*.py"))]
    marked = [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += ["--collect-only", "-q"] if options.device == "cpu" else ["--nightly", "-v", "--color=no"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *marked], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(max(options.remaining, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        log.seek(0)
        text = log.read()
    if options.device == "cpu":
        yield {"collected": len(re.findall(r"^\S+::", text, re.MULTILINE)), "exit_code": code}
        return
    ended = re.findall(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)", text, re.MULTILINE)
    yield {
        "tests": Counter(result.lower() for _, result in ended),
        "failed_tests": [name for name, result in ended if result in ("FAILED", "ERROR")],
        "exit_code": code,
        "timed_out": code is None,
        "end": text[-300:],
    }


# ---- all parts

PARTS: dict[str, Callable[[Options], Lines]] = {"a": training, "b": end_to_end, "c": gpu_tests}


def environment_fields(device: str) -> dict[str, Any]:
    """Return the fields that every line has."""
    import torch
    import transformers

    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        commit = ""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "commit": commit or None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def run_parts(parts: dict[str, Callable[[], Lines]], common: dict[str, Any]) -> int:
    """Print a line for each result of each part; return 1 if a measurement failed, else 0."""
    code = 0
    for part, run in parts.items():
        begin = time.perf_counter()

        def show(fields: dict[str, Any], part: str = part) -> None:
            nonlocal begin, code
            code = 1 if "failed" in fields else code
            line = {"part": part, **common, "seconds": round(time.perf_counter() - begin, 2), **fields}
            print(json.dumps(line), flush=True)
            begin = time.perf_counter()

        try:
            for fields in run():
                show(fields)
        except (Exception, SystemExit) as error:
            show(outcome(error))
    return code


def run_in_budget(part: str, options: Options) -> Lines:
    """Yield the lines of a part, or the reason why it does not start."""
    missing = [name for name in MODULES[part].split() if importlib.util.find_spec(name) is None]
    if missing:
        yield {"skipped": f"not installed: {', '.join(missing)}"}
    elif options.remaining <= 0:
        yield BUDGET_SPENT
    else:
        yield from PARTS[part](options)


def declare_entry_points(directory: Path) -> None:
    """Make the entry points of the sources visible to this process and its children if they are not installed."""
    if importlib.metadata.entry_points(group="rl.apps"):
        return
    declared: dict[str, dict[str, str]] = {}
    for file in (*ROOT.glob("packages/*/pyproject.toml"), ROOT / "apps" / "pyproject.toml"):
        for group, names in tomllib.loads(file.read_text())["project"].get("entry-points", {}).items():
            declared.setdefault(group, {}).update(names)
    info = directory / "rl_sources-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-sources\nVersion: 0\n")
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in declared.items()]
    (info / "entry_points.txt").write_text("\n".join(sections))
    sys.path.append(str(directory))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(directory)]))


def main() -> int:
    """Parse the options and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes; only checks that it runs")
    parser.add_argument("--part", choices=[*PARTS], action="append", help="only this part; may be repeated")
    parser.add_argument("--seconds", type=float, default=480.0, help="time budget of all parts")
    arguments = parser.parse_args()
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu_step.py: --device cuda needs a CUDA device, but torch finds none; use --device cpu.")
    chosen = [part for part in PARTS if part in (arguments.part or PARTS)]
    total, deadline, parts = sum(BUDGET_FRACTIONS[part] for part in chosen), time.monotonic(), {}
    for part in chosen:
        deadline += arguments.seconds * BUDGET_FRACTIONS[part] / total
        parts[part] = partial(run_in_budget, part, Options(arguments.device, arguments.tiny, deadline))
    with tempfile.TemporaryDirectory() as directory:
        declare_entry_points(Path(directory))
        return run_parts(parts, environment_fields(arguments.device))


if __name__ == "__main__":
    raise SystemExit(main())
