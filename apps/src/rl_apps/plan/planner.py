"""`rl plan`: what a config would do on a cluster: memory, batch arithmetic, tokens per second, the best split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_apps.plan.calibration import measured_rates, measured_servers
from rl_apps.plan.memory import read_sizes, served_bytes, server_memory, trainer_memory
from rl_apps.plan.rates import (
    DEVICES,
    NEEDED,
    Known,
    Rates,
    assumed,
    lognormal_lengths,
    read_rates,
    tokens_in_flight,
)
from rl_apps.plan.search import Candidate, preferred, search
from rl_apps.plan.simulation import Outcome, Setup, simulate
from rl_apps.run.app import App, Run
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.device_layout import layout_of, run_directory
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.models.sizes import ModelSizes
from rl_contracts.runtime.json_lines import to_json

GIB = 2**30
SIGMA = 0.6
"""Of the logarithm of lengths, where nothing says it."""
SHOWN = 6
"""Splits in the table."""
ALWAYS = (
    "an episode is one answer, of as many tokens as all its turns have",
    "lengths of the answers of a group are independent",
    "speed of a trainer is proportional to its devices, and the same for every batch",
)
"""What is assumed of every run."""


@dataclass(frozen=True)
class Plan:
    """What was found."""

    setup: Setup
    outcome: Outcome
    arithmetic: dict[str, float]
    memory: dict[str, dict[str, float]]
    """Bytes by part, of a rank of the trainer and of a device of a server."""
    device_memory: float
    """Bytes; 0: not known."""
    rates: dict[str, Known]
    candidates: list[Candidate]
    devices: int
    """That splits were tried for."""


def plan(
    reference: str,
    settings: Sequence[str],
    gpu: str = "",
    memory: float = 0.0,
    rates: Path | None = None,
    run_of: Path | None = None,
    splits: bool = True,
) -> Plan:
    """Plan a run.

    Args:
        reference: app, by name or dotted path.
        settings: of it, as its command takes them; `cluster.nodes` and `cluster.devices` are what splits are tried for.
        gpu: name of a data sheet, for what nobody measured.
        memory: bytes of a device; 0: what its data sheet says.
        rates: file of given rates.
        run_of: a run that measured others; its settings are those of the plan, but for what `settings` says.
        splits: whether others are tried.

    Raises:
        ConfigError: the settings cannot be planned, or a rate is not known.
        DataError, ModelError: see `measured_steps` and `read_sizes`.
    """
    run, sizes = _described(reference, settings, run_of)
    config, layout = run.config, run.layout
    assert layout.rollout is not None
    memory = memory or (DEVICES[gpu].memory if gpu in DEVICES else 0.0)
    given = {} if rates is None else read_rates(rates)
    known, lengths = _known(run, sizes, gpu, memory, given, _measured(reference, run_of))
    setup = _setup(run, known, lengths)
    if run_of is not None and "decode_seconds" not in given:
        known |= measured_servers(run_of, _setup(_described(reference, (), run_of)[0], known, lengths))
        setup = _setup(run, known, lengths)
    arithmetic = _arithmetic(config, setup)
    micro_batches = int(arithmetic["micro-batches of an update"])
    parts = {"trainer rank": trainer_memory(run, sizes, micro_batches, setup.replicas)}
    if memory:
        parts["server device"] = server_memory(run, sizes, memory)
    devices = _devices(run)
    servers, replica = layout.rollout.strategy.model_size, layout.actor.strategy.model_size

    def fits(replicas: int) -> bool:
        held = sum(trainer_memory(run, sizes, micro_batches, replicas).values())
        return not memory or held <= memory

    found = search(setup, devices, servers, replica, fits) if splits else []
    return Plan(setup, simulate(setup), arithmetic, parts, memory, known, found, devices)


def _described(reference: str, settings: Sequence[str], run_of: Path | None) -> tuple[Run[GRPOConfig], ModelSizes]:
    """The run that settings describe, and the sizes of its model; nothing is started or loaded."""
    app: App = registry.load("rl.apps", reference)
    require(app.servers == "required", "rl plan", "an app that learns from answers, such as gsm8k-grpo", app.name)
    config = app.config(settings, None if run_of is None else run_of / "config.yaml")
    layout = layout_of(config.allocation, app.servers)
    run = Run(config, layout, run_directory(config.run_dir, config.experiment, config.trial), config.cluster.device)
    return run, read_sizes(run, app.form, app.lessons)


def _measured(reference: str, run_of: Path | None) -> tuple[dict[str, Known], tuple[int, ...]]:
    if run_of is None:
        return {}, ()
    require((run_of / "config.yaml").is_file(), "--run", "the directory of a run, with its config.yaml", str(run_of))
    app: App = registry.load("rl.apps", reference)
    actor = layout_of(app.config((), run_of / "config.yaml").allocation, app.servers).actor
    known, lengths = measured_rates(run_of, actor.strategy.world_size)
    return known | {"decode_seconds": Known(0.01, "")}, lengths


def _known(
    run: Run[GRPOConfig],
    sizes: ModelSizes,
    gpu: str,
    memory: float,
    given: dict[str, Known],
    measured: tuple[dict[str, Known], tuple[int, ...]],
) -> tuple[dict[str, Known], tuple[int, ...]]:
    """All rates, each from where it is known best, and the lengths of answers."""
    assert run.layout.rollout is not None
    known, lengths = _defaults(run.config), measured[1]
    if gpu:
        bytes_each, split = served_bytes(run), run.layout.rollout.strategy.model_size
        weights, cache = bytes_each * sizes.parameters, bytes_each * sizes.cache_per_token
        known |= assumed(gpu, sizes.parameters, weights, cache, split)
    known |= measured[0] | given
    if not lengths or {"answer_tokens", "answer_sigma"} & given.keys():
        longest = run.config.rollout.generation.max_new_tokens
        lengths = lognormal_lengths(known["answer_tokens"].value, known["answer_sigma"].value, longest)
    else:
        del known["answer_sigma"]  # they are as measured
    held = tokens_in_flight(known["prompt_tokens"].value, lengths)
    known.setdefault("max_running", _at_once(run, sizes, memory, held))
    return known, lengths


def _defaults(config: GRPOConfig) -> dict[str, Known]:
    """What is assumed where nothing else is said."""
    longest = config.rollout.generation.max_new_tokens
    return {
        "prompt_tokens": Known(256, "assumed"),
        "answer_tokens": Known(longest / 2, "assumed: half of rollout.generation.max_new_tokens"),
        "answer_sigma": Known(SIGMA, "assumed"),
        "episode_seconds": Known(0.0, "assumed"),
        "publish_seconds": Known(5.0, "assumed"),
        "other_seconds": Known(1.0, "assumed"),
        "rejected_fraction": Known(0.0, "assumed"),
    }


def _at_once(run: Run[GRPOConfig], sizes: ModelSizes, memory: float, held: float) -> Known:
    """Answers of one server at the same time: what it is told, or what its memory holds."""
    assert run.layout.rollout is not None
    told, split = run.config.rollout.server.max_concurrent_completions(), run.layout.rollout.strategy.model_size
    limits = [Known(told, "rollout.server")] if told else []
    if memory:
        room = server_memory(run, sizes, memory)["keys and values"] * split
        fits = room / (sizes.cache_per_token * served_bytes(run) * held)
        require(fits >= 1, "memory of a server", f"room for an answer of {held:.0f} tokens beside the weights", memory)
        limits.append(Known(math.floor(fits), f"memory: {held:.0f} tokens an answer, mean while it is written"))
    return min(limits, key=lambda limit: limit.value, default=Known(1 << 20, "assumed: no limit"))


def _setup(run: Run[GRPOConfig], known: dict[str, Known], lengths: tuple[int, ...]) -> Setup:
    """What is simulated.

    Raises:
        ConfigError: a rate is not known.
    """
    missing = [name for name in NEEDED if name not in known and name not in ("answer_tokens", "answer_sigma")]
    if missing:
        raise ConfigError(
            f"rl plan: expected {', '.join(f'{name} ({NEEDED[name]})' for name in missing)}, found none. Give them in "
            "--rates FILE, take them from a run with --run RUN, or let them be assumed with --gpu NAME."
        )
    value = {name: rate.value for name, rate in known.items() if name not in ("answer_tokens", "answer_sigma")}
    for name in ("prefill_tokens_per_s", "train_tokens_per_s", "max_running"):
        require(value[name] > 0, name, "more than 0", value[name])
    rates = Rates(lengths=lengths, **value)
    decode = rates.decode_seconds + rates.decode_seconds_per_answer
    require(decode > 0, "decode_seconds + decode_seconds_per_answer", "more than 0", decode)
    config, layout = run.config, run.layout
    assert layout.rollout is not None
    return Setup(
        rates,
        config.data.batch_size,
        config.rollout.group_size,
        config.rollout.max_staleness,
        layout.rollout.strategy.data,
        layout.actor.strategy.data,
        layout.actor.world_size,
        config.rollout.max_concurrent,
        config.rollout.generation.max_new_tokens,
        config.rollout.interrupt,
        layout.shared,
    )


def _devices(run: Run[GRPOConfig]) -> int:
    """Of the cluster that is described, or else of the allocation."""
    cluster, layout = run.config.cluster, run.layout
    assert layout.rollout is not None
    used = [layout.actor.world_size, layout.rollout.world_size]
    needed = max(used) if layout.shared else sum(used)
    there = max(cluster.nodes, 1) * cluster.devices or needed
    require(there >= needed, "cluster.nodes * cluster.devices", f"at least {needed}, for the allocation", there)
    return there


def _arithmetic(config: GRPOConfig, setup: Setup) -> dict[str, float]:
    """Counts of one step."""
    rows, tokens = setup.batch_size * setup.group_size, setup.rates.tokens_per_answer
    of_update = rows * tokens / config.actor.minibatches / setup.replicas
    concurrent = setup.max_concurrent
    return {
        "prompts of a step": setup.batch_size,
        "answers of a prompt": setup.group_size,
        "rows of a step": rows,
        "tokens of a step": rows * tokens,
        "updates of a step": config.actor.minibatches,
        "tokens of an update on a replica": of_update,
        "micro-batches of an update": math.ceil(of_update / config.actor.micro_batch.max_tokens),
        "answers in flight at most": setup.in_flight,
        "answers that run at most": min(setup.in_flight, (concurrent or math.inf) * setup.group_size),
        "answers that servers can run": setup.servers * setup.rates.max_running,
        "replicas, each with a rollout head": setup.replicas,
        "prompts of a step on a replica": setup.batch_size // setup.replicas,
    }


# ---- what is shown


def page(found: Plan) -> str:
    """The plan for people."""
    return "\n".join(
        [
            "A step",
            *(f"  {name:<36}{value:>14,.0f}" for name, value in found.arithmetic.items()),
            *_memory_lines(found),
            *_rate_lines(found),
            *_split_lines(found),
            "Assumptions",
            *_assumption_lines(found),
        ]
    )


def _memory_lines(found: Plan) -> Iterator[str]:
    for what, parts in found.memory.items():
        total, room = sum(parts.values()), found.device_memory
        of = f" of {room / GIB:.1f}" if room else ""
        yield f"Memory of a {what}" + (f": {total / GIB:.2f} GiB{of}" if parts else ": its engine does not say")
        yield from (f"  {name:<36}{size / GIB:>11.3f} GiB" for name, size in parts.items())
        if room and total > room:
            yield f"  !! more than there is, by {(total - room) / GIB:.1f} GiB"


def _rate_lines(found: Plan) -> Iterator[str]:
    outcome, setup = found.outcome, found.setup
    yield (
        f"Simulated: {setup.servers} servers, {setup.trainer_devices:g} trainer devices, max_staleness "
        f"{setup.max_staleness}, {outcome.most_in_flight:,} answers in flight"
    )
    for name, value in (
        ("step", f"{outcome.step_seconds:.2f} s"),
        ("  waiting for a batch", f"{outcome.wait_seconds:.2f} s"),
        ("  training", f"{outcome.train_seconds:.2f} s"),
        ("  publishing", f"{outcome.publish_seconds:.2f} s"),
        ("generated", f"{outcome.generated_tokens / outcome.step_seconds:,.0f} tokens/s"),
        ("trained on, while it trains", f"{outcome.trained_tokens / outcome.train_seconds:,.0f} tokens/s"),
        ("trained on, of all time", f"{outcome.tokens_per_s:,.0f} tokens/s"),
        ("servers busy", f"{outcome.servers_busy:.0%}, {outcome.running:.1f} answers each"),
        ("staleness, mean", f"{outcome.staleness:.1f} versions"),
    ):
        yield f"  {name:<36}{value}"


def _split_lines(found: Plan) -> Iterator[str]:
    if not found.candidates:
        yield f"Splits of {found.devices} devices: none holds the trainer, or --no-splits left them out"
        return
    best = preferred(found.candidates)
    yield f"Splits of {found.devices} devices ({len(found.candidates)} tried)"
    yield "  servers  trainer devices  max_staleness   tokens/s  simulated at  limit"
    shown = found.candidates[:SHOWN]
    for each in shown if best in shown else [*shown[:-1], best]:
        setup, mark = each.setup, "*" if each is best else " "
        yield (
            f"{mark} {setup.servers:>7}  {setup.trainer_devices:>15g}  {setup.max_staleness:>13}  "
            f"{each.tokens_per_s:>9,.0f}  {f'1/{each.size}':>12}  {each.outcome.limit}"
        )
    yield "  * the least staleness that is within 2 % of the fastest"


def _assumption_lines(found: Plan) -> Iterator[str]:
    for name, rate in found.rates.items():
        unit = NEEDED[name].split(",")[0]
        yield f"  {name:<36}{rate.value:>14,.6g} {unit:<20}{rate.source}"
    yield from (f"  {text}" for text in ALWAYS)


def line(found: Plan) -> str:
    """The plan for programs: one JSON object."""

    def row(setup: Setup, outcome: Outcome, size: int = 1) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(outcome).items() if size == 1 or not name.endswith("tokens")}
        return {
            "servers": setup.servers,
            "trainer_devices": setup.trainer_devices,
            "replicas": setup.replicas,
            "max_staleness": setup.max_staleness,
            **figures,
            "tokens_per_s": outcome.tokens_per_s * size,
            "limit": outcome.limit,
            "simulated_at": f"1/{size}",
        }

    return to_json(
        {
            "arithmetic": found.arithmetic,
            "memory": found.memory,
            "simulated": row(found.setup, found.outcome),
            "best": row(*_fields(preferred(found.candidates))) if found.candidates else None,
            "candidates": [row(*_fields(each)) for each in found.candidates],
            "assumptions": {name: asdict(rate) for name, rate in found.rates.items()} | {"always": ALWAYS},
        }
    )


def _fields(candidate: Candidate) -> tuple[Setup, Outcome, int]:
    return candidate.setup, candidate.outcome, candidate.size
