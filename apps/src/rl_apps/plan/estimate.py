"""Estimate one layout of a run: rates, counts of a step, limits of concurrent completions, and memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from rl_apps.plan.calibration import measured_rates, measured_servers
from rl_apps.plan.inputs import Inputs
from rl_apps.plan.memory import (
    DeviceMemory,
    read_sizes,
    served_bytes,
    server_memory,
    server_weights,
    shared_memory,
    trainer_memory,
)
from rl_apps.plan.rates import (
    DERIVED,
    FLOPS_PER_TOKEN,
    FLOPS_RECOMPUTED,
    NEEDED,
    Rates,
    Sourced,
    assumed,
    assumed_publish,
    lognormal_lengths,
    tokens_in_flight,
)
from rl_apps.plan.simulation import Setup
from rl_apps.preflight.checks import SERVED_BYTES, check_batch
from rl_apps.run.app import Run
from rl_apps.run.components import serve_spec
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.device_layout import Layout
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.models.sizes import ModelSizes

SIGMA = 0.6
"""Default standard deviation of the logarithm of completion lengths."""


@dataclass(frozen=True)
class Case:
    """One layout with its settings, estimated without a simulation."""

    run: Run[GRPOConfig]
    rates: dict[str, Sourced]
    setup: Setup
    counts: dict[str, float]
    """Counts of one step."""
    limits: dict[str, float]
    """Maximum number of concurrent completions, by the setting or device that limits it."""
    memory: list[DeviceMemory]

    @property
    def too_large(self) -> list[DeviceMemory]:
        """Devices whose memory is too small."""
        return [memory for memory in self.memory if not memory.fits]

    @property
    def allocation(self) -> str:
        """Allocation of the layout."""
        layout = self.run.layout
        assert layout.rollout is not None
        return f"{layout.rollout}{'|' if layout.shared else '+'}{layout.actor}"


@dataclass(frozen=True)
class Estimator:
    """Estimates layouts of the run of a plan."""

    inputs: Inputs
    sizes: ModelSizes
    directories: Mapping[str, str]
    """Directory of the model by its path."""
    measured: dict[str, Sourced] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    """Measured completion lengths; empty if there are none."""
    _configs: dict[str, GRPOConfig] = field(default_factory=dict, repr=False)
    """Composed settings by the allocation that replaces the one of the user; composing is slow."""

    def with_settings(self, *changes: str) -> Estimator:
        """Return the estimator of the same run with other settings."""
        return replace(self, inputs=self.inputs.with_settings(*changes), _configs={})

    def run(self, changes: Sequence[str] = (), layout: Layout | None = None) -> Run[GRPOConfig]:
        """Return the run with other settings, in another layout.

        Raises:
            ConfigError: the settings are invalid.
        """
        allocation = next((text for text in changes if text.startswith("allocation=")), "")
        if allocation not in self._configs:
            self._configs[allocation] = self.inputs.config(*filter(None, [allocation]))
        config = copy.deepcopy(self._configs[allocation])
        for path, _, value in (text.partition("=") for text in changes if text != allocation):
            config = _with_value(config, path, yaml.safe_load(value))
        config.model.directories |= self.directories
        run = self.inputs.run(config)
        return run if layout is None else replace(run, layout=layout)

    def case(self, changes: Sequence[str] = (), layout: Layout | None = None) -> Case:
        """Estimate the run with other settings, in another layout.

        Raises:
            ConfigError: the settings are invalid, the engine rejects the layout, or a rate is unknown.
        """
        run = self.run(changes, layout)
        _check_layout(run)
        rates, lengths = self._rates(run)
        counts = _counts(run, rates["prompt_tokens"].value + sum(lengths) / len(lengths))
        trainer = trainer_memory(run, self.sizes, int(counts["micro-batches per update"]), self.inputs.memory)
        speed = rates.pop("publish_gb_per_s", None)
        rates.setdefault(
            "publish_seconds", assumed_publish(_published_bytes(run, self.sizes, trainer), _route(run), speed)
        )
        context = tokens_in_flight(rates["prompt_tokens"].value, lengths)
        limits = self._limits(run, context)
        rates.setdefault("max_running", _max_running(run, limits, context))
        return Case(run, rates, _setup(run, rates, lengths), counts, limits, self._memory(run, trainer, context))

    def _rates(self, run: Run[GRPOConfig]) -> tuple[dict[str, Sourced], tuple[int, ...]]:
        """Return the rates, except `max_running` and `publish_seconds`, and the completion lengths.

        A given rate overrides a measured, an assumed and a default one.
        """
        assert run.layout.rollout is not None
        given, lengths, gpu = self.inputs.rates, self.lengths, self.inputs.gpu
        rates = _defaults(run.config)
        if gpu:
            bytes_each, split = served_bytes(run), run.layout.rollout.strategy.model_size
            weights, cache = bytes_each * self.sizes.parameters, bytes_each * self.sizes.cache_per_token
            recomputes = getattr(run.config.actor.engine, "gradient_checkpointing", False)
            flops = FLOPS_PER_TOKEN + FLOPS_RECOMPUTED * recomputes
            rates |= assumed(gpu, self.sizes.active_parameters, weights, cache, split, flops)
        rates |= self.measured | given
        if not lengths or {"answer_tokens", "answer_sigma"} & given.keys():
            longest = run.config.rollout.generation.max_new_tokens
            lengths = lognormal_lengths(rates["answer_tokens"].value, rates["answer_sigma"].value, longest)
        else:
            del rates["answer_sigma"]  # measured lengths replace the assumed distribution
        return rates, lengths

    def _limits(self, run: Run[GRPOConfig], context: float) -> dict[str, float]:
        """Return the maximum number of concurrent completions by what limits it."""
        assert run.layout.rollout is not None
        rollout, servers = run.config.rollout, run.layout.rollout.strategy.data
        limits: dict[str, float] = {
            "rollout.max_staleness and data.batch_size": (rollout.max_staleness + 1)
            * run.config.data.batch_size
            * rollout.group_size
        }
        if rollout.max_concurrent is not None:
            limits["rollout.max_concurrent"] = rollout.max_concurrent * rollout.group_size
        if each := rollout.server.max_concurrent_completions(self.inputs.gpu or run.device, self.inputs.memory):
            limits["rollout.server.max_sequences"] = each * servers
        if self.inputs.memory:
            room = rollout.server.cache_bytes(self.inputs.memory, server_weights(run, self.sizes))
            limits["the KV cache"] = servers * math.floor(room / self._completion_bytes(run, context))
        return limits

    def _completion_bytes(self, run: Run[GRPOConfig], context: float) -> float:
        """Return the bytes of the KV cache of one running completion on each device of its server."""
        assert run.layout.rollout is not None
        return self.sizes.cache_per_token * served_bytes(run) * context / run.layout.rollout.strategy.model_size

    def _memory(self, run: Run[GRPOConfig], trainer: DeviceMemory, context: float) -> list[DeviceMemory]:
        device = self.inputs.memory
        if not device:
            return [trainer]
        server = server_memory(run, self.sizes, self._completion_bytes(run, context), device)
        shared = shared_memory(run, self.sizes, trainer, server, device) if run.layout.shared else []
        return [trainer, server, *shared]


def estimator_of(inputs: Inputs) -> Estimator:
    """Read the sizes of the model, and measure the rates of the run in the inputs.

    Raises:
        ConfigError, DataError, ModelError: see `measured_steps`, `measured_servers` and `read_sizes`.
    """
    run = inputs.run(inputs.config())
    sizes = read_sizes(run, inputs.app.form, inputs.app.lessons)
    estimator = Estimator(inputs, sizes, dict(run.config.model.directories))
    if inputs.run_of is None:
        return estimator
    original = Estimator(replace(inputs, settings=(), file=inputs.run_of / "config.yaml"), sizes, estimator.directories)
    measured, lengths = measured_rates(inputs.run_of, original.run().layout.actor.world_size)
    if "decode_seconds" not in inputs.rates:
        original = replace(original, measured=measured | {"decode_seconds": Sourced(0.01, "")}, lengths=lengths)
        measured |= measured_servers(inputs.run_of, original.case().setup)
    return replace(estimator, measured=measured, lengths=lengths)


def _with_value[T](settings: T, path: str, value: object) -> T:
    """Return settings with another value, which the config classes check.

    Raises:
        ConfigError: there is no such setting, or the value is invalid.
    """
    name, _, rest = path.partition(".")
    if not hasattr(settings, name):
        raise ConfigError(f"unknown setting {name!r}")
    changed = _with_value(getattr(settings, name), rest, value) if rest else value
    return replace(settings, **{name: changed})  # type: ignore[type-var]


def _defaults(config: GRPOConfig) -> dict[str, Sourced]:
    """Return the default rates."""
    longest = config.rollout.generation.max_new_tokens
    return {
        "prompt_tokens": Sourced(256, "assumed"),
        "answer_tokens": Sourced(longest / 2, "assumed: half of rollout.generation.max_new_tokens"),
        "answer_sigma": Sourced(SIGMA, "assumed"),
        "episode_seconds": Sourced(0.0, "assumed"),
        "other_seconds": Sourced(1.0, "assumed"),
        "rejected_fraction": Sourced(0.0, "assumed"),
    }


def _max_running(run: Run[GRPOConfig], limits: Mapping[str, float], context: float) -> Sourced:
    """Return the number of completions that one server can run: the limit of its settings or of its memory."""
    assert run.layout.rollout is not None
    sources = {
        "rollout.server.max_sequences": "rollout.server.max_sequences",
        "the KV cache": f"memory, with a mean of {context:.0f} tokens per running completion",
    }
    servers = run.layout.rollout.strategy.data
    each = [Sourced(limits[name] / servers, source) for name, source in sources.items() if name in limits]
    least = min(each, key=lambda limit: limit.value, default=Sourced(1 << 20, "assumed: no limit"))
    return least if least.value >= 1 else Sourced(1.0, "one completion, although the memory is too small")


def _setup(run: Run[GRPOConfig], known_rates: dict[str, Sourced], lengths: tuple[int, ...]) -> Setup:
    """Return the set-up to simulate.

    Raises:
        ConfigError: a rate is unknown or not positive.
    """
    values: dict[str, Any] = {name: rate.value for name, rate in known_rates.items() if name not in DERIVED}
    if missing := [name for name in NEEDED if name not in values and name not in DERIVED]:
        raise ConfigError(
            f"rl plan: expected the rates {', '.join(missing)}, found none; set them in --rates FILE, measure them "
            "with --run RUN, or assume them with --gpu NAME."
        )
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


def _check_layout(run: Run[GRPOConfig]) -> None:
    """Reject a layout that the engine, the servers or the batch do not support.

    Raises:
        ConfigError: with the reason.
    """
    config, strategy = run.config, run.layout.actor.strategy
    check_batch(config.data.batch_size, config.rollout.group_size, config.actor.minibatches, strategy.data)
    config.actor.engine.check(strategy, replace(config.finetune_spec(), device=run.device))
    config.rollout.server.check(serve_spec(run))


def _counts(run: Run[GRPOConfig], tokens: float) -> dict[str, float]:
    """Return the counts of one step, with this mean number of tokens of a sequence."""
    config, replicas = run.config, run.layout.actor.strategy.data
    sequences = config.data.batch_size * config.rollout.group_size
    update_tokens = sequences * tokens / config.actor.minibatches / replicas
    return {
        "prompts per step": config.data.batch_size,
        "completions per prompt": config.rollout.group_size,
        "sequences per step": sequences,
        "tokens per step": sequences * tokens,
        "updates per step": config.actor.minibatches,
        "tokens per update and replica": update_tokens,
        "micro-batches per update": math.ceil(update_tokens / config.actor.micro_batch.max_tokens),
        "replicas": replicas,
        "prompts per step and replica": config.data.batch_size // replicas,
    }


def _published_bytes(run: Run[GRPOConfig], sizes: ModelSizes, trainer: DeviceMemory) -> float:
    """Return the bytes of an update: all weights, or the adapters alone."""
    config = run.config
    size = SERVED_BYTES[getattr(config.actor.engine, "serve_dtype", "") or config.actor.dtype] * sizes.parameters
    if getattr(config.actor.engine, "lora", None) is None or config.publish.adapter == "never":
        return size
    parameters, adapters = trainer.parts.get("parameters", 0.0), trainer.parts.get("gradients", 0.0)
    return size * adapters / parameters if parameters else size


def _route(run: Run[GRPOConfig]) -> str:
    """Return the publish route; see `rl_apps.preflight.checks.choose_route`."""
    config, servers = run.config, run.layout.rollout
    assert servers is not None
    if config.publish.route != "auto":
        return config.publish.route
    if config.cluster.nodes <= 1:
        return "shm"
    return "disk" if servers.strategy.data == 1 else "broadcast"
