"""`rl plan`: predict memory, batch counts, tokens per second and the best device split of a config on a cluster."""

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
    Rates,
    Sourced,
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
"""Default standard deviation of the logarithm of completion lengths."""
SHOWN = 6
"""Maximum number of splits in the printed table."""
ALWAYS = (
    "an episode is one completion with as many tokens as all turns of the episode together",
    "the lengths of the completions of a group are independent",
    "the speed of the trainer is proportional to its devices and the same for every batch",
)
"""Assumptions of every plan."""


@dataclass(frozen=True)
class Plan:
    """Results of a plan."""

    setup: Setup
    outcome: Outcome
    arithmetic: dict[str, float]
    memory: dict[str, dict[str, float]]
    """Bytes by component, for a trainer rank and for a device of a server."""
    device_memory: float
    """Memory of a device in bytes; 0 if unknown."""
    rates: dict[str, Sourced]
    candidates: list[Candidate]
    devices: int
    """Number of devices of the splits that were tried."""


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
        reference: name or dotted path of the app.
        settings: settings of the app, as on its command line. `cluster.nodes` and `cluster.devices` describe the
            cluster whose splits are tried.
        gpu: name of a GPU, whose data sheet gives the rates that are not measured.
        memory: memory of a device in bytes; 0 for the value of the data sheet.
        rates: file of rates, which override measured and assumed ones.
        run_of: directory of a run to measure rates from. The plan uses the settings of this run, overridden by
            `settings`.
        splits: whether to try other splits of the devices.

    Raises:
        ConfigError: the settings cannot be planned, or a rate is unknown.
        DataError: see `measured_steps` and `measured_servers`.
        ModelError: see `read_sizes`.
    """
    run, sizes = _describe_run(reference, settings, run_of)
    config, layout = run.config, run.layout
    assert layout.rollout is not None
    memory = memory or (DEVICES[gpu].memory if gpu in DEVICES else 0.0)
    given_rates = {} if rates is None else read_rates(rates)
    known_rates, lengths = _combine_rates(run, sizes, gpu, memory, given_rates, _measure_rates(reference, run_of))
    setup = _setup(run, known_rates, lengths)
    if run_of is not None and "decode_seconds" not in given_rates:
        known_rates |= measured_servers(run_of, _setup(_describe_run(reference, (), run_of)[0], known_rates, lengths))
        setup = _setup(run, known_rates, lengths)
    arithmetic = _arithmetic(config, setup)
    micro_batches = int(arithmetic["micro-batches per update"])
    memory_parts = {"trainer rank": trainer_memory(run, sizes, micro_batches, setup.replicas)}
    if memory:
        memory_parts["server device"] = server_memory(run, sizes, memory)
    devices = _devices(run)
    servers, replica = layout.rollout.strategy.model_size, layout.actor.strategy.model_size

    def fits(replicas: int) -> bool:
        needed = sum(trainer_memory(run, sizes, micro_batches, replicas).values())
        return not memory or needed <= memory

    candidates = search(setup, devices, servers, replica, fits) if splits else []
    return Plan(setup, simulate(setup), arithmetic, memory_parts, memory, known_rates, candidates, devices)


def _describe_run(reference: str, settings: Sequence[str], run_of: Path | None) -> tuple[Run[GRPOConfig], ModelSizes]:
    """Return the run that the settings describe and the sizes of its model; start and load nothing."""
    app: App = registry.load("rl.apps", reference)
    require(app.servers == "required", "rl plan", "an app that trains on completions, such as gsm8k-grpo", app.name)
    config = app.config(settings, None if run_of is None else run_of / "config.yaml")
    layout = layout_of(config.allocation, app.servers)
    run = Run(config, layout, run_directory(config.run_dir, config.experiment, config.trial), config.cluster.device)
    return run, read_sizes(run, app.form, app.lessons)


def _measure_rates(reference: str, run_of: Path | None) -> tuple[dict[str, Sourced], tuple[int, ...]]:
    if run_of is None:
        return {}, ()
    require((run_of / "config.yaml").is_file(), "--run", "a run directory with a config.yaml file", str(run_of))
    app: App = registry.load("rl.apps", reference)
    actor = layout_of(app.config((), run_of / "config.yaml").allocation, app.servers).actor
    rates, lengths = measured_rates(run_of, actor.strategy.world_size)
    return rates | {"decode_seconds": Sourced(0.01, "")}, lengths


def _combine_rates(
    run: Run[GRPOConfig],
    sizes: ModelSizes,
    gpu: str,
    memory: float,
    given_rates: dict[str, Sourced],
    measured: tuple[dict[str, Sourced], tuple[int, ...]],
) -> tuple[dict[str, Sourced], tuple[int, ...]]:
    """Return all rates and the completion lengths. A given rate overrides a measured, an assumed and a default one."""
    assert run.layout.rollout is not None
    rates, lengths = _defaults(run.config), measured[1]
    if gpu:
        bytes_each, split = served_bytes(run), run.layout.rollout.strategy.model_size
        weights, cache = bytes_each * sizes.parameters, bytes_each * sizes.cache_per_token
        rates |= assumed(gpu, sizes.parameters, weights, cache, split)
    rates |= measured[0] | given_rates
    if not lengths or {"answer_tokens", "answer_sigma"} & given_rates.keys():
        longest = run.config.rollout.generation.max_new_tokens
        lengths = lognormal_lengths(rates["answer_tokens"].value, rates["answer_sigma"].value, longest)
    else:
        del rates["answer_sigma"]  # measured lengths replace the assumed distribution
    context = tokens_in_flight(rates["prompt_tokens"].value, lengths)
    rates.setdefault("max_running", _max_running(run, sizes, memory, context))
    return rates, lengths


def _defaults(config: GRPOConfig) -> dict[str, Sourced]:
    """Return the default rates."""
    longest = config.rollout.generation.max_new_tokens
    return {
        "prompt_tokens": Sourced(256, "assumed"),
        "answer_tokens": Sourced(longest / 2, "assumed: half of rollout.generation.max_new_tokens"),
        "answer_sigma": Sourced(SIGMA, "assumed"),
        "episode_seconds": Sourced(0.0, "assumed"),
        "publish_seconds": Sourced(5.0, "assumed"),
        "other_seconds": Sourced(1.0, "assumed"),
        "rejected_fraction": Sourced(0.0, "assumed"),
    }


def _max_running(run: Run[GRPOConfig], sizes: ModelSizes, memory: float, context: float) -> Sourced:
    """Return how many completions one server can run at once: the limit of its settings or of its memory."""
    assert run.layout.rollout is not None
    configured, split = run.config.rollout.server.max_concurrent_completions(), run.layout.rollout.strategy.model_size
    limits = [Sourced(configured, "rollout.server")] if configured else []
    if memory:
        room = server_memory(run, sizes, memory)["keys and values"] * split
        fits = room / (sizes.cache_per_token * served_bytes(run) * context)
        require(
            fits >= 1,
            "memory of a server",
            f"enough for the weights and one completion of {context:.0f} tokens",
            memory,
        )
        limits.append(Sourced(math.floor(fits), f"memory, with a mean of {context:.0f} tokens per running completion"))
    return min(limits, key=lambda limit: limit.value, default=Sourced(1 << 20, "assumed: no limit"))


def _setup(run: Run[GRPOConfig], known_rates: dict[str, Sourced], lengths: tuple[int, ...]) -> Setup:
    """Return the set-up to simulate.

    Raises:
        ConfigError: a rate is unknown or not positive.
    """
    missing = [name for name in NEEDED if name not in known_rates and name not in ("answer_tokens", "answer_sigma")]
    if missing:
        raise ConfigError(
            f"rl plan: expected {', '.join(f'{name} ({NEEDED[name]})' for name in missing)}, found none. Set them "
            "in --rates FILE, measure them in a run with --run RUN, or assume them with --gpu NAME."
        )
    values = {name: rate.value for name, rate in known_rates.items() if name not in ("answer_tokens", "answer_sigma")}
    for name in ("prefill_tokens_per_s", "train_tokens_per_s", "max_running"):
        require(values[name] > 0, name, "more than 0", values[name])
    rates = Rates(lengths=lengths, **values)
    decode = rates.decode_seconds + rates.decode_seconds_per_completion
    require(decode > 0, "decode_seconds + decode_seconds_per_completion", "more than 0", decode)
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
    """Return the number of devices of the cluster in the settings, or else of the allocation."""
    cluster, layout = run.config.cluster, run.layout
    assert layout.rollout is not None
    per_role = [layout.actor.world_size, layout.rollout.world_size]
    needed = max(per_role) if layout.shared else sum(per_role)
    available = max(cluster.nodes, 1) * cluster.devices or needed
    require(available >= needed, "cluster.nodes * cluster.devices", f"at least {needed}, for the allocation", available)
    return available


def _arithmetic(config: GRPOConfig, setup: Setup) -> dict[str, float]:
    """Return the counts of one step."""
    sequences, tokens = setup.batch_size * setup.group_size, setup.rates.tokens_per_completion
    update_tokens = sequences * tokens / config.actor.minibatches / setup.replicas
    concurrent = setup.max_concurrent
    return {
        "prompts per step": setup.batch_size,
        "completions per prompt": setup.group_size,
        "sequences per step": sequences,
        "tokens per step": sequences * tokens,
        "updates per step": config.actor.minibatches,
        "tokens per update and replica": update_tokens,
        "micro-batches per update": math.ceil(update_tokens / config.actor.micro_batch.max_tokens),
        "maximum completions in flight": setup.in_flight,
        "maximum running completions": min(setup.in_flight, (concurrent or math.inf) * setup.group_size),
        "completions that servers can run": setup.servers * setup.rates.max_running,
        "replicas": setup.replicas,
        "prompts per step and replica": setup.batch_size // setup.replicas,
    }


# ---- output


def page(result: Plan) -> str:
    """Return the plan as text for the terminal."""
    return "\n".join(
        [
            "A step",
            *(f"  {name:<36}{value:>14,.0f}" for name, value in result.arithmetic.items()),
            *_memory_lines(result),
            *_rate_lines(result),
            *_split_lines(result),
            "Assumptions",
            *_assumption_lines(result),
        ]
    )


def _memory_lines(result: Plan) -> Iterator[str]:
    for owner, parts in result.memory.items():
        total, available = sum(parts.values()), result.device_memory
        limit = f" of {available / GIB:.1f}" if available else ""
        yield f"Memory of a {owner}" + (f": {total / GIB:.2f} GiB{limit}" if parts else ": no estimate by its engine")
        yield from (f"  {name:<36}{size / GIB:>11.3f} GiB" for name, size in parts.items())
        if available and total > available:
            yield f"  !! exceeds the memory by {(total - available) / GIB:.1f} GiB"


def _rate_lines(result: Plan) -> Iterator[str]:
    outcome, setup = result.outcome, result.setup
    yield (
        f"Simulated: {setup.servers} servers, {setup.trainer_devices:g} trainer devices, max_staleness "
        f"{setup.max_staleness}, {outcome.most_in_flight:,} completions in flight"
    )
    for name, value in (
        ("step", f"{outcome.step_seconds:.2f} s"),
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
    if not result.candidates:
        yield f"Splits of {result.devices} devices: none has enough memory for the trainer, or --no-splits is set"
        return
    best = preferred(result.candidates)
    yield f"Splits of {result.devices} devices ({len(result.candidates)} tried)"
    yield "  servers  trainer devices  max_staleness   tokens/s  simulated at  limit"
    shown = result.candidates[:SHOWN]
    for candidate in shown if best in shown else [*shown[:-1], best]:
        setup, mark = candidate.setup, "*" if candidate is best else " "
        yield (
            f"{mark} {setup.servers:>7}  {setup.trainer_devices:>15g}  {setup.max_staleness:>13}  "
            f"{candidate.tokens_per_s:>9,.0f}  {f'1/{candidate.size}':>12}  {candidate.outcome.limit}"
        )
    yield "  * least staleness within 2 % of the fastest split"


def _assumption_lines(result: Plan) -> Iterator[str]:
    for name, rate in result.rates.items():
        unit = NEEDED[name].split(",")[0]
        yield f"  {name:<36}{rate.value:>14,.6g} {unit:<20}{rate.source}"
    yield from (f"  {text}" for text in ALWAYS)


def line(result: Plan) -> str:
    """Return the plan as one line of JSON."""

    def row(setup: Setup, outcome: Outcome, size: int = 1) -> dict[str, Any]:
        metrics = {name: value for name, value in asdict(outcome).items() if size == 1 or not name.endswith("tokens")}
        return {
            "servers": setup.servers,
            "trainer_devices": setup.trainer_devices,
            "replicas": setup.replicas,
            "max_staleness": setup.max_staleness,
            **metrics,
            "tokens_per_s": outcome.tokens_per_s * size,
            "limit": outcome.limit,
            "simulated_at": f"1/{size}",
        }

    return to_json(
        {
            "arithmetic": result.arithmetic,
            "memory": result.memory,
            "simulated": row(result.setup, result.outcome),
            "best": row(*_fields(preferred(result.candidates))) if result.candidates else None,
            "candidates": [row(*_fields(candidate)) for candidate in result.candidates],
            "assumptions": {name: asdict(rate) for name, rate in result.rates.items()} | {"always": ALWAYS},
        }
    )


def _fields(candidate: Candidate) -> tuple[Setup, Outcome, int]:
    return candidate.setup, candidate.outcome, candidate.size
