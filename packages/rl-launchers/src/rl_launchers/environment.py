"""What a worker finds in its environment and its command line."""

from __future__ import annotations

from collections.abc import Mapping

from rl_contracts.errors import ConfigError
from rl_contracts.scheduler import JobSpec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Threads of numeric libraries. Unset, every worker would start one per core of the machine."""

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # the last lines before a SIGKILL are in the log
    "PYTHONFAULTHANDLER": "1",  # so is the stack of a crash in native code
}


def fill_in(text: str, index: int, host: str, port: int | None) -> str:
    """Replace `{index}`, `{host}` and `{port}`; all other braces stay as they are.

    Raises:
        ConfigError: `{port}` in a role whose workers have none.
    """
    if "{port}" in text and port is None:
        raise ConfigError(f"{text!r} asks for a port, but the role has none. Set needs_port=True in its JobSpec.")
    return text.replace("{index}", str(index)).replace("{host}", host).replace("{port}", str(port))


def worker_environment(
    spec: JobSpec,
    inherited: Mapping[str, str],
    index: int,
    host: str,
    port: int | None,
    master_port: int | None,
    gpus: list[str] | None,
) -> dict[str, str]:
    """The whole environment of one worker; later sources win.

    Thread shares and other defaults, the inherited variables, torchrun's (`spmd` roles), devices, `spec.env`.

    Args:
        spec: the role.
        inherited: the launcher's environment.
        index: of the worker in its role.
        host: address of this machine.
        port: the worker's own.
        master_port: of the role's rendezvous; None where the role is not `spmd`.
        gpus: devices that the worker may see; None leaves that as it is.
    """
    threads = {name: str(spec.cpus) for name in THREAD_VARIABLES}
    environment = {**DEFAULTS, **threads, **inherited}
    if spec.spmd:
        environment |= {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(spec.count),
            "LOCAL_WORLD_SIZE": str(spec.count),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(master_port),
        }
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment | {name: fill_in(value, index, host, port) for name, value in spec.env.items()}
