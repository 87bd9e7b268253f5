"""Load a model and create its decode thread, for a server or for `InProcessEngine`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_inference.backends.embedded.config import ServerOptions
from rl_inference.embedded_server.loop import DecodeLoop
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.weights import ServedWeights, restore


def load_decode_loop(options: ServerOptions, holder: str, on_crash: Callable[[BaseException], object]) -> DecodeLoop:
    """Load the model and the version that was committed last, and create the decode thread without starting it.

    Args:
        options: settings; `port`, `host` and `name` are not used.
        holder: name of the server in receipts.
        on_crash: see `DecodeLoop`.

    Raises:
        ModelError: see `load_model`.
        WeightUpdateError: see `restore`.
    """
    config, spec = options.config, options.spec
    if spec.cpus:
        torch.set_num_threads(spec.cpus)
    model = load_model(config, spec, options.sharing)
    weights = ServedWeights(model.model, spec.weights_dir, holder, spec.version, spec.model_path)
    restore(weights, spec.weights_dir)
    return DecodeLoop(model, weights, config.max_sequences, on_crash, spec.deterministic)
