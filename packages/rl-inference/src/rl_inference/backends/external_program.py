"""What the servers have in common that are programs of others: what they refuse, and the job that starts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_contracts.config import require
from rl_contracts.data import ServeSpec
from rl_contracts.scheduler import JobSpec


def on_cpu(spec: ServeSpec) -> bool:
    """Whether the servers of a run have no GPU."""
    return spec.device == "cpu" or not spec.gpus


def check_program(kind: str, config: Any, spec: ServeSpec, own: Sequence[str]) -> None:
    """Refuse what none of these servers can do, or our way of updating them.

    Args:
        kind: the backend in `allocation`.
        config: settings of the servers.
        own: arguments that are set by other settings, or must be as they are.

    Raises:
        ConfigError: names the setting.
    """
    split = spec.strategy
    require(
        split.pipeline == split.context == split.expert == 1,
        "allocation",
        f"{kind}:d{split.data}t{split.tensor} (one server is split by tensors alone)",
        f"{kind}:{split}",
    )
    embedded = "embedded servers, which give the same bits"
    require(not spec.deterministic, f"deterministic with allocation={kind}", embedded, True)
    require(not (config.quantization and on_cpu(spec)), "server.quantization", "none on CPUs", config.quantization)
    taken = overridden_arguments(config.arguments, own)
    require(
        not taken,
        "server.arguments",
        f"none of {', '.join(own)}: they follow from other settings, or the run relies on them",
        ", ".join(taken),
    )


def program_job(config: Any, spec: ServeSpec, command: Sequence[str], environment: Mapping[str, str]) -> JobSpec:
    """The servers of a run: role `rollout`, ready when the first tokens were made.

    Args:
        config: settings of the servers, which pass `ServerConfig.check`.
        command: program and arguments; `config.arguments` come after them.
        environment: beside what all of them are told.

    Raises:
        ConfigError: no model, or what these servers cannot do.
    """
    config.check(spec)
    require(bool(spec.model_path), "model_path", "a model directory", spec.model_path)
    variables = {
        "RL_WEIGHTS_DIR": str(Path(spec.weights_dir).resolve()) if spec.weights_dir else "",
        "RL_WEIGHT_VERSION": str(spec.version),
        "RL_SERVER_NAME": "rollout-{index}",
    }
    if Path(spec.model_path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return JobSpec(
        role="rollout",
        command=(*command, *config.arguments),
        count=spec.strategy.data,
        cpus=max(spec.cpus, 1),
        gpus=spec.gpus,
        env={**variables, **environment},
        needs_port=True,
        ready_path="/health",
        ready_timeout=config.ready_timeout,
        remedy=(
            f"Can it serve {spec.model_path} in {config.dtype} on this machine? Its log says why not. Choose another "
            "model, other settings of rollout.server, or other servers (allocation=embedded:...)."
        ),
    )


def overridden_arguments(arguments: Iterable[str], own: Iterable[str]) -> list[str]:
    """Those of `arguments` that name one of `own`, as command lines are read: with `_` for `-`, with a value after `=`,
    or cut short."""
    own = tuple(own)

    def named(text: str) -> bool:
        name = text.partition("=")[0].replace("_", "-")
        return name in own or (name.startswith("--") and any(each.startswith(name) for each in own))

    return [text for text in arguments if named(text)]
