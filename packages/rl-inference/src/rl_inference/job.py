"""The servers of a config, as a launcher starts them."""

from __future__ import annotations

import sys
from pathlib import Path

from rl_contracts.errors import ConfigError
from rl_contracts.scheduler import JobSpec
from rl_inference.config import InferenceConfig


def server_job(config: InferenceConfig) -> JobSpec:
    """Role `rollout`, ready when `/health` answers 200.

    Raises:
        ConfigError: no model.
    """
    if not config.model_path:
        raise ConfigError("inference.model_path: expected a model directory, found nothing.")
    options = {
        "model": config.model_path,
        "host": "{host}",
        "port": "{port}",
        "name": "rollout-{index}",
        "device": config.device,
        "dtype": config.dtype,
        "slots": config.slots,
        "context-length": config.context_length,
        "prefill-tokens": config.prefill_tokens,
        "max-waiting": config.max_waiting,
        "threads": config.cpus,
        "weights-dir": str(Path(config.weights_dir).resolve()) if config.weights_dir else "",
        "version": config.version,
        "deterministic": str(config.deterministic).lower(),
        "compile": str(config.compile).lower(),
    }
    return JobSpec(
        role="rollout",
        command=(
            config.python or sys.executable,
            "-m",
            "rl_inference.server",
            *(text for name, value in options.items() for text in (f"--{name}", str(value))),
        ),
        count=config.servers,
        cpus=config.cpus,
        gpus=1 if config.device.startswith("cuda") else 0,
        needs_port=True,
        ready_path="/health",
        ready_timeout=config.ready_timeout,
    )
