"""Output of `rl plan`: text for the terminal, or one line of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rl_apps.plan.advice import Advice
from rl_apps.plan.estimate import Case
from rl_apps.plan.memory import GIB, SERVER_DEVICE, TRAINER_RANK, DeviceMemory
from rl_apps.plan.planner import Plan
from rl_apps.plan.rates import NEEDED
from rl_apps.plan.search import Candidate, preferred
from rl_apps.plan.simulation import Outcome, Setup
from rl_apps.plan.splits import LeftOut
from rl_apps.preflight.warnings import WARNING
from rl_apps.settings.dtypes import describe_dtypes, warn_float32
from rl_contracts.runtime.json_lines import to_json

SHOWN = 6
"""Maximum number of splits in the printed table."""
ALWAYS = (
    "an episode is one completion with as many tokens as all turns of the episode together",
    "the lengths of the completions of a group are independent",
    "the speed of the trainer is proportional to its devices and the same for every batch",
)
"""Assumptions of every plan."""
OFFLOAD = "actor.engine.offload takes no time: copies between GPU and host, and the optimizer step on the CPU"
"""Assumption of a plan with offload and without a measured speed of the trainer."""


def page(result: Plan) -> str:
    """Return the plan as text for the terminal."""
    return "\n".join(
        [
            f"Plan of: {result.inputs.command()}",
            *_dtypes(result),
            "A step",
            *(f"  {name:<36}{value:>14,.0f}" for name, value in result.case.counts.items()),
            *_limit_lines(result),
            *_memory_lines(result),
            *_advice_lines(result),
            *_outcome_lines(result),
            *_split_lines(result),
            "Assumptions",
            *_assumption_lines(result),
        ]
    )


def _dtypes(result: Plan) -> list[str]:
    run = result.case.run
    warnings = (WARNING + sentence for sentence in warn_float32(run.config, run.device == "cuda"))
    return [f"Dtype: {describe_dtypes(run.config)}", *warnings]


def _limit_lines(result: Plan) -> Iterator[str]:
    limits = result.case.limits
    least = min(limits, key=lambda name: limits[name])
    yield f"Concurrent completions: at most {limits[least]:,.0f}, limited by {least}"
    yield from (f"  {name:<48}{number:>8,.0f}" for name, number in limits.items() if name != least)


def _memory_lines(result: Plan) -> Iterator[str]:
    for memory in result.case.memory:
        limit = f" of {memory.available / GIB:.1f}" if memory.available else ""
        total = f"{memory.total / GIB:.2f} GiB{limit}" if memory.parts else "no estimate by its engine"
        yield f"Memory of a {memory.owner}: {total}"
        if memory.owner in (TRAINER_RANK, SERVER_DEVICE):
            yield from (f"  {name:<36}{size / GIB:>11.3f} GiB" for name, size in memory.parts.items())
        if not memory.fits:
            yield f"  !! exceeds the memory by {(memory.total - memory.available) / GIB:.1f} GiB"


def _advice_lines(result: Plan) -> Iterator[str]:
    if (advice := result.advice) is None:
        return
    if advice.case is None:
        yield "Advice: no change was found with which it fits; use a smaller model or GPUs with more memory"
        return
    few = f"{advice.devices} devices of this memory are enough" if advice.devices else "the smallest change that fits"
    yield f"Advice: {few}"
    yield f"  {' '.join(_quoted(text) for text in advice.settings)}"
    after = {memory.owner: memory for memory in advice.case.memory}
    for memory in result.case.too_large:
        yield f"  {memory.owner}: {memory.total / GIB:.1f} GiB before, {_after(after.get(memory.owner))} after"


def _quoted(text: str) -> str:
    return f"'{text}'" if "|" in text else text


def _after(memory: DeviceMemory | None) -> str:
    return f"{memory.total / GIB:.1f} of {memory.available / GIB:.1f} GiB" if memory else "none"


def _outcome_lines(result: Plan) -> Iterator[str]:
    if (outcome := result.outcome) is None:
        return
    setup = result.case.setup
    yield (
        f"Simulated: {setup.servers} servers, {setup.trainer_devices:g} trainer devices, max_staleness "
        f"{setup.max_staleness}, {outcome.most_in_flight:,} completions in flight"
    )
    for name, value in (
        ("step", f"{outcome.step_seconds:.2f} s, limited by {outcome.limit}"),
        ("  waiting for a batch", f"{outcome.wait_seconds:.2f} s"),
        ("  training", f"{outcome.train_seconds:.2f} s"),
        ("  publishing", f"{outcome.publish_seconds:.2f} s"),
        ("generated", f"{outcome.generated_tokens / outcome.step_seconds:,.0f} tokens/s"),
        ("trained, in training time", f"{outcome.trained_tokens / outcome.train_seconds:,.0f} tokens/s"),
        ("trained, in total time", f"{outcome.tokens_per_s:,.0f} tokens/s"),
        ("servers busy", f"{outcome.servers_busy:.0%}, {outcome.running:.1f} completions each"),
        ("staleness, mean", f"{outcome.staleness:.1f} versions"),
    ):
        yield f"  {name:<36}{value}"


def _split_lines(result: Plan) -> Iterator[str]:
    if not (result.candidates or result.splits.left_out):
        return
    plural = "s" if result.devices > 1 else ""
    yield f"Splits of {result.devices} device{plural} ({len(result.candidates)} simulated)"
    if result.candidates:
        best = preferred(result.candidates)
        shown = result.candidates[:SHOWN]
        width = max(len(candidate.allocation) for candidate in result.candidates)
        yield f"  {'allocation':<{width}}  max_staleness   tokens/s  simulated at  limit"
        for candidate in shown if best in shown else [*shown[:-1], best]:
            mark = "*" if candidate is best else " "
            yield (
                f"{mark} {candidate.allocation:<{width}}  {candidate.setup.max_staleness:>13}  "
                f"{candidate.tokens_per_s:>9,.0f}  {f'1/{candidate.size}':>12}  {candidate.outcome.limit}"
            )
        yield f"  * least staleness within 2 % of the fastest split: {result.command}"
    yield from (f"  left out: {text}" for text in _reasons(result.splits.left_out))
    if skipped := len(result.splits.cases) - len({candidate.allocation for candidate in result.candidates}):
        yield f"  not simulated: {skipped} splits between those that were"


def _reasons(left_out: list[LeftOut]) -> Iterator[str]:
    """Yield one line for each kind of reason."""
    groups: dict[tuple[str, str, bool], list[LeftOut]] = {}
    for split in left_out:
        owner = split.memory.owner if split.memory else ""
        groups.setdefault((split.kind, owner, "|" in split.allocation), []).append(split)
    for (kind, _, shared), splits in groups.items():
        trainers = "all devices shared" if shared else f"trainer devices {_ranges(splits)}"
        yield f"{trainers}: {splits[0].reason if len(splits) == 1 else _summary(kind, splits)}"


def _ranges(splits: list[LeftOut]) -> str:
    """Return the numbers of trainer devices of splits, for example `1-3, 5`."""
    numbers = [split.trainer_devices for split in splits]
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True))


def _summary(kind: str, splits: list[LeftOut]) -> str:
    """Return one reason for several splits of the same kind."""
    memories = [split.memory for split in splits if split.memory]
    if memories:
        needed = [memory.total / GIB for memory in memories]
        most = memories[0].available / GIB
        return f"a {memories[0].owner} needs {min(needed):.1f} to {max(needed):.1f} of {most:.1f} GiB"
    if kind == "batch":
        return "their replicas do not divide " + splits[0].reason.split(" do not divide ")[1]
    return splits[0].reason


def _assumption_lines(result: Plan) -> Iterator[str]:
    for name, rate in result.case.rates.items():
        unit = NEEDED[name].split(",")[0]
        yield f"  {name:<36}{rate.value:>14,.6g} {unit:<20}{rate.source}"
    yield from (f"  {text}" for text in _always(result.case))


def _always(case: Case) -> tuple[str, ...]:
    is_assumed = case.rates["train_tokens_per_s"].source.startswith("assumed")
    return (*ALWAYS, OFFLOAD) if is_assumed and getattr(case.run.config.actor.engine, "offload", False) else ALWAYS


def line(result: Plan) -> str:
    """Return the plan as one line of JSON."""
    case, advice, limits = result.case, result.advice, result.case.limits
    return to_json(
        {
            "command": result.inputs.command(),
            "dtypes": _dtypes(result),
            "allocation": case.allocation,
            "fits": not case.too_large,
            "advice": advice and _advice(advice),
            "arithmetic": case.counts,
            "limits": limits,
            "limited_by": min(limits, key=lambda name: limits[name]),
            "memory": _parts(case),
            "simulated": result.outcome and _row(case.allocation, case.setup, result.outcome),
            "best": _candidate(preferred(result.candidates)) if result.candidates else None,
            "best_command": result.command,
            "candidates": [_candidate(candidate) for candidate in result.candidates],
            "left_out": [{"allocation": split.allocation, "reason": split.reason} for split in result.splits.left_out],
            "assumptions": {name: asdict(rate) for name, rate in case.rates.items()} | {"always": _always(case)},
        }
    )


def _advice(advice: Advice) -> dict[str, Any]:
    return {"settings": advice.settings, "devices": advice.devices, "memory": _parts(advice.case)}


def _parts(case: Case | None) -> dict[str, dict[str, float]]:
    return {memory.owner: memory.parts for memory in case.memory} if case else {}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return _row(candidate.allocation, candidate.setup, candidate.outcome, candidate.size)


def _row(allocation: str, setup: Setup, outcome: Outcome, size: int = 1) -> dict[str, Any]:
    metrics = {name: value for name, value in asdict(outcome).items() if size == 1 or not name.endswith("tokens")}
    return {
        "allocation": allocation,
        "servers": setup.servers,
        "trainer_devices": setup.trainer_devices,
        "replicas": setup.replicas,
        "max_staleness": setup.max_staleness,
        **metrics,
        "tokens_per_s": outcome.tokens_per_s * size,
        "limit": outcome.limit,
        "simulated_at": f"1/{size}",
    }
