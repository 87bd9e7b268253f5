"""Compare the gradients of a step for several settings with the gradients for the first. Runs on each of two ranks.

Arguments: a model, and a list of settings as JSON.
"""

import json
import sys

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.conformance.train_engine import trained_tokens
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing import make_batch
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig

RATE = 1024.0
"""Learning rate at which the change of a weight gives its gradient with a small rounding error."""


def nll(outputs, packed):
    return -outputs.logprobs[packed["loss_mask"]].sum(), {}


def gradients(model, settings):
    """Return the gradients of the whole parameters of all ranks by name."""
    engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(pipeline=2))
    optimizer = OptimizerConfig(name="sgd", lr=RATE, weight_decay=0.0, max_grad_norm=0.0)
    spec = FinetuneSpec(model, 1, device="cpu", optimizer=optimizer, micro_batch=MicroBatchConfig(48))
    engine.initialize(spec)
    before = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    engine.train_batch(make_batch(6, vocab_size=97), nll, trained_tokens)
    local_gradients = {name: (before[name] - tensor) / RATE for name, tensor in engine.full_parameters()}
    all_gradients = {
        name: tensor
        for part in engine.parallel.gather_tensors(local_gradients, all_ranks=True)
        for name, tensor in part.items()
    }
    engine.destroy()
    return all_gradients


def main(model: str, variants: list) -> None:
    expected = gradients(model, variants[0])
    for settings in variants[1:]:
        actual = gradients(model, settings)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.any(), name
            assert (actual[name] - gradient).abs().max() < 1e-5 * gradient.abs().max(), (settings, name)
        print("as the first:", json.dumps(settings))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
