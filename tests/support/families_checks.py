"""Compare the train engine and the embedded server with transformers on a tiny model of one family."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import GenerationConfig, MicroBatchConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec, SaveLoadMeta, ServeSpec, WeightUpdateMeta
from rl_contracts.errors import RLError
from rl_contracts.testing import put_weights
from rl_contracts.testing.families import VOCABULARY

Result = dict[str, str]
"""`status`: see `families_sweep`. `why`: the reason, or a note on a check that passed; may be absent."""
LENGTHS = (3, 19, 8, 9, 13, 6)
"""Tokens per sequence: below and above the attention window and the length at which RoPE changes."""
COMPLETIONS = ((2, 5), (7, 9), (12, 16), (3, 21), (9, 2), (5, 1))
"""Number of prompt tokens and of completion tokens, per request."""
TEMPERATURES = (0.7, 1.0, 1.3)
"""Temperatures of the sequences, in turn."""
LOGPROB_TOLERANCE = 2e-5
"""Maximum difference of a log-prob, in nats."""
GRADIENT_TOLERANCE = 1e-4
"""Maximum difference of a gradient, relative to the largest entry of the tensor."""
MIN_GRADIENT = 1e-6
"""Gradients below this fraction of the largest entry of all tensors are rounding errors.

For example, the softmax cancels the bias of the key projection, so the exact gradient of that bias is 0."""


def rows() -> list[Tensor]:
    """Return the token ids of each sequence."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def batch() -> Any:
    """Return the sequences as a batch with random advantages and different temperatures."""
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import Trajectory, stack

    result: TensorDict = stack(
        [
            Trajectory(
                input_ids=ids.numpy(),
                loss_mask=(torch.arange(len(ids)) >= len(ids) // 2).numpy(),
                logprobs=torch.zeros(len(ids)).numpy(),
                versions=torch.zeros(len(ids), dtype=torch.int32).numpy(),
                temperature=TEMPERATURES[row % 3],
                prompt_id=row,
                group_id=row // 2,
                episode_id=row,
            )
            for row, ids in enumerate(rows())
        ]
    )
    shape = result["input_ids"].shape
    result["advantages"] = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return result


def compute_loss(logprobs: Tensor, inputs: Any) -> Tensor:
    return -(logprobs * inputs["advantages"] * inputs["loss_mask"]).sum()


def loss_fn(outputs: Any, inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    return compute_loss(outputs.logprobs, inputs), {}


def loss_weight_fn(inputs: Any) -> Tensor:
    return inputs["loss_mask"].sum()


def load_reference(path: Path | str) -> Any:
    """Load a model of transformers in evaluation mode, in float32 and with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def reference_logprobs(model: Any, ids: Tensor, temperature: float) -> Tensor:
    """Return the log-probs [T] of one sequence; the first is 0."""
    logits = model(ids[None], use_cache=False).logits[0, :-1].float() / temperature
    return nn.functional.pad(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0], (1, 0))


def reference_results(path: Path) -> dict[str, Tensor]:
    """Return log-probs and gradients of transformers, with one forward pass per sequence.

    Some RoPE types change their frequencies for long sequences and keep that state, so each sequence starts from the
    original buffers.
    """
    full = batch()
    results = {"logprobs": torch.zeros(full["input_ids"].shape)}
    model = load_reference(path)
    pristine = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for row, ids in enumerate(rows()):
        for name, buffer in model.named_buffers():
            if buffer.shape == pristine[name].shape:
                buffer.data.copy_(pristine[name])
        _reset_rope(model)
        logprobs = reference_logprobs(model, ids, float(full["temperature"][row]))
        results["logprobs"][row, : len(ids)] = logprobs.detach()
        inputs = {name: full[name][row, : len(ids)] for name in ("advantages", "loss_mask")}
        (compute_loss(logprobs, inputs) / loss_weight_fn(full)).backward()
    return results | {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def _reset_rope(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "original_max_seq_len"):
            module.max_seq_len_cached = module.original_max_seq_len


def run_check(check: Callable[[], str | None]) -> Result:
    """Run a check and return its result; an error of this project counts as a rejection."""
    try:
        remark = check()
    except RLError as error:
        return {"status": "rejected", "why": str(error)}
    except AssertionError as error:
        return {"status": "wrong", "why": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "status": "wrong",
            "why": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",
        }
    return {"status": "ok"} | ({"why": remark} if remark else {})


def check_engine(path: Path, expected: dict[str, Tensor], results: dict[str, Result], name: str = "engine") -> None:
    """Compare log-probs, gradients and the exported model of the train engine with transformers.

    All ranks must call this function together.
    """
    with ExitStack() as cleanup:
        results[name] = run_check(lambda: _train(path, expected, cleanup, results))


def _train(path: Path, expected: dict[str, Tensor], cleanup: ExitStack, results: dict[str, Result]) -> None:
    from rl_contracts.batch.trajectory import select as select_rows
    from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
    from rl_engines_fsdp.ranks.sharding import whole

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    engine = FSDPEngine(FSDPEngineConfig(timeout_seconds=40), ParallelStrategy(ranks))
    spec = FinetuneSpec(
        str(path), 10, device="cpu", micro_batch=MicroBatchConfig(64), optimizer=OptimizerConfig(max_grad_norm=1e9)
    )
    engine.initialize(spec)
    cleanup.callback(engine.destroy)
    local_rows = list(range(engine.parallel.rank, len(LENGTHS), ranks))
    local_batch, longest = select_rows(batch(), local_rows), max(LENGTHS[row] for row in local_rows)
    logprobs = engine.forward(local_batch, lambda outputs, _: outputs.logprobs)
    logprob_error = _max_error(logprobs[:, :longest], expected["logprobs"][local_rows, :longest])
    named = engine._model.own_parameters()
    optimizer: Any = torch.optim.SGD([parameter for _, parameter in named], 1e-3)
    original_step, gradients = optimizer.step, {}

    def step() -> None:
        gradients.update({name: whole(p.grad).clone() for name, p in named if p.grad is not None})
        original_step()

    optimizer.step = step
    engine._optimizer = optimizer
    engine.train_batch(local_batch, loss_fn, loss_weight_fn)
    out = path.parent / f"export-{ranks}"
    after = engine.forward(local_batch, lambda outputs, _: outputs.logprobs)
    engine.save(SaveLoadMeta(str(out)))
    weights = {name: whole(parameter.detach()).clone() for name, parameter in named}
    if ranks == 1:
        meta, _ = put_weights(path.parent / "weights", 1, engine.full_parameters(), "disk")
        (path.parent / "published.json").write_text(json.dumps(meta.to_json()))
    if engine.parallel.rank == 0:
        exported = run_check(lambda: _reload(path, out, weights, local_rows, after[:, :longest]))
        previous = results.setdefault("export", exported)
        if previous["status"] == "ok":
            results["export"] = exported
    assert logprob_error <= LOGPROB_TOLERANCE, f"log-probs differ by {logprob_error:.2g} nats"
    _compare_gradients(gradients, {n.removeprefix("grad."): g for n, g in expected.items() if n.startswith("grad.")})


def _max_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, infinite if one value is NaN."""
    return (actual - expected).abs().nan_to_num(torch.inf).max().item()


def _compare_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        if name not in actual:
            assert not gradient.any(), f"{name} has no gradient, but transformers computes one"
            continue
        size, error = gradient.abs().max().item(), _max_error(actual[name], gradient)
        if size > MIN_GRADIENT * largest:
            assert error <= GRADIENT_TOLERANCE * size, (
                f"the gradient of {name} differs by {error / size:.2g} of its largest entry"
            )
        else:
            assert error <= MIN_GRADIENT * largest, f"the gradient of {name}, expected to be 0, differs by {error:.2g}"


def _reload(source: Path, out: Path, weights: dict[str, Tensor], local_rows: list[int], expected: Tensor) -> None:
    """Check that an export has the keys of the original checkpoint and that transformers loads the same model."""
    keys = [_keys(directory) for directory in (source, out)]
    assert keys[0] == keys[1], f"keys differ from those of the original checkpoint: {sorted(keys[0] ^ keys[1])[:3]}"
    model = load_reference(out)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), f"{name} differs after a reload"
    for index, row in enumerate(local_rows):
        _reset_rope(model)
        stateful = any(hasattr(module, "original_max_seq_len") for module in model.modules())
        fresh = load_reference(out) if stateful else model
        with torch.no_grad():
            reference = reference_logprobs(fresh, rows()[row], TEMPERATURES[row % 3])
        error = _max_error(reference, expected[index, : len(reference)])
        assert error <= LOGPROB_TOLERANCE, f"log-probs of the reloaded model differ by {error:.2g} nats"


def _keys(directory: Path) -> set[str]:
    from safetensors import safe_open

    keys: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            keys |= set(tensors.keys())
    return keys


def check_server(path: Path, results: dict[str, Result]) -> None:
    """Compare log-probs and scores of the embedded server with transformers, before and after a weight update."""
    results["server"] = run_check(lambda: _serve(path, results))


def _serve(path: Path, results: dict[str, Result]) -> str | None:
    from rl_inference import EmbeddedEngineConfig
    from rl_inference.embedded_server import loop as decode_loop
    from rl_inference.embedded_server.job import GenerationJob
    from rl_inference.embedded_server.model.loading import load_model
    from rl_inference.embedded_server.scoring import ScoreJob
    from rl_inference.embedded_server.weights import ServedWeights

    config = EmbeddedEngineConfig(max_sequences=4)
    model = load_model(config, ServeSpec(str(path), device="cpu"))
    errors: list[BaseException] = []
    weights = ServedWeights(model.model, str(path.parent), "sweep", version=0)
    decode_loop.PREFILL_TOKENS = 16  # so that prompts take several passes
    loop = decode_loop.DecodeLoop(model, weights, config.max_sequences, errors.append)
    loop.start()
    jobs, context_length = [], model.context_length
    generator = torch.Generator().manual_seed(3)
    for index, (prompt_tokens, completion_tokens) in enumerate(COMPLETIONS):
        prompt_length = min(prompt_tokens, context_length - 1)
        max_new_tokens = min(completion_tokens, context_length - prompt_length)
        generation = GenerationConfig(max_new_tokens=max_new_tokens, temperature=TEMPERATURES[index % 3])
        ids = torch.randint(3, VOCABULARY, (prompt_length,), generator=generator).tolist()
        jobs.append(GenerationJob(f"job-{index}", ids, generation, index, frozenset()))
        loop.submit(jobs[-1])
    try:
        for job in jobs:
            job.ended.result(60)
        assert not errors, f"the decode thread failed: {errors[0]!r}"
        for job in jobs:
            assert (job.finish_reason or {}).get("type") == "length", (
                f"finish reason {job.finish_reason}, expected length"
            )
            ids, start, temperature = torch.tensor(job.tokens), len(job.prompt), job.generation.temperature
            with torch.no_grad():
                reference = reference_logprobs(load_reference(path), ids, temperature)
            error = _max_error(torch.tensor(job.logprobs), reference[start:])
            assert error <= LOGPROB_TOLERANCE, (
                f"log-probs of a sequence of {len(ids)} tokens differ by {error:.2g} nats"
            )
            score = ScoreJob(job.tokens, temperature)
            loop.submit_score(score)
            scores, _ = score.done.result(60)
            error = _max_error(torch.tensor(scores), reference)
            assert error <= LOGPROB_TOLERANCE, f"scores of {len(ids)} tokens differ by {error:.2g} nats"
        if (path.parent / "published.json").exists():
            results["publish"] = run_check(lambda: _update(path.parent, loop, jobs[3].tokens))
    finally:
        loop.stop()
    text_config = model.model.config.get_text_config()
    longest: int = getattr(text_config, "max_position_embeddings", None) or context_length
    return f"up to {context_length} of {longest} tokens" if context_length < longest else None


def _update(directory: Path, loop: Any, ids: list[int]) -> None:
    """Load the weights that the train engine published, and compare the server's scores with transformers."""
    from rl_inference.embedded_server.scoring import ScoreJob

    meta = WeightUpdateMeta.from_json(json.loads((directory / "published.json").read_text()))
    loop.weights.stage(meta)
    loop.commit(1, recompute=True).result(60)
    score = ScoreJob(ids, 1.0)
    loop.submit_score(score)
    scores, version = score.done.result(60)
    with torch.no_grad():
        reference = reference_logprobs(load_reference(directory / "export-1"), torch.tensor(ids), 1.0)
    assert version == 1
    error = _max_error(torch.tensor(scores), reference)
    assert error <= LOGPROB_TOLERANCE, f"scores with the published weights differ by {error:.2g} nats"
