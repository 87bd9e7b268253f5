"""Detection rate and false alarms of the log-prob gap gate, with a trainer and the math of servers in one process.

The gate identifies a server that serves the previous version at lr 1e-6, and raises no alarm for correct servers.
"""

import asyncio
import logging
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import Trajectory, stack
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec, ServeSpec, WeightReceipt
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.inference import Capabilities
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.weights import checksum
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_inference.backends.embedded.config import EmbeddedEngineConfig
from rl_inference.embedded_server.model.loading import load_model
from rl_trainers import GapConfig, GapGate, PolicyActor
from rl_trainers.algorithms.config import AlgorithmConfig

SERVERS = 4
RATES = (1e-6, 1e-5, 1e-4, 1e-3)


class Servers:
    """Client of servers without checksums. Each server has separate weights and computes like the embedded server.

    Args:
        path: Hugging Face model directory.
        dtype: data type of the served weights.
        late: index of a server that serves the previous version after each commit.
        stays: whether the late server instead keeps its first weights forever.
        mixed: whether every other server uses different kernels, as on another device.
        count: number of servers.
    """

    capabilities = Capabilities(checksums=False)

    def __init__(self, path, dtype, late=None, stays=False, mixed=True, count=SERVERS):
        slots = load_model(EmbeddedEngineConfig(dtype=dtype, max_sequences=1), ServeSpec(str(path)))
        self.dtype, self.late, self.stays, self.mixed = getattr(torch, dtype), late, stays, mixed
        eager = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype, attn_implementation="eager").eval()
        self.models = [slots.model, eager]
        self.score_functions = [slots.score, self._eager]
        self.servers = [f"http://server-{number}" for number in range(count)]
        self.weights, self.newest = [None] * count, None

    def commit(self, engine):
        previous, self.newest = self.newest, {n: v.to(self.dtype, copy=True) for n, v in engine.full_parameters()}
        for number, served in enumerate(self.weights):
            is_behind = number == self.late and previous is not None
            self.weights[number] = self.newest if not is_behind else served if self.stays else previous
        return WeightReceipt("trainer", engine.version, {name: checksum(v) for name, v in self.newest.items()})

    async def score(self, input_ids, temperature=1.0, server=None):
        number = self.servers.index(server or self.servers[0])
        return await asyncio.to_thread(self._score, number, input_ids, temperature)

    @torch.no_grad()
    def _score(self, number, input_ids, temperature):
        kind = number % 2 if self.mixed else 0
        for name, parameter in self.models[kind].named_parameters():
            parameter.data.copy_(self.weights[number][name])
        return self.score_functions[kind](input_ids, temperature)

    def _eager(self, input_ids, temperature):
        ids = torch.tensor(input_ids)
        logits = self.models[1](input_ids=ids[None]).logits[0, :-1].float() / temperature
        return [0.0, *torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].tolist()]

    async def score_previous_weights(self, input_ids, temperature=1.0):
        raise InferenceError("these servers store no previous weights")

    async def live_receipts(self, server=None):
        raise InferenceError("these servers have no checksums")


class Run:
    """Updates of a policy on random completions, each published to servers and checked by the gate."""

    def __init__(self, path, loop, dtype, lr, **servers):
        self.rng, self.metrics = np.random.default_rng(0), []
        self.engine = FSDPEngine(FSDPEngineConfig(serve_dtype=dtype))
        optimizer = OptimizerConfig(lr=lr, weight_decay=0.0)
        self.engine.initialize(FinetuneSpec(str(path), 10_000, optimizer=optimizer, device="cpu"))
        self.servers = Servers(path, dtype, **servers)
        self.servers.commit(self.engine)
        self.gate = GapGate(self.engine, self.servers, loop, GapConfig(), trained="float32", served=dtype)
        self.actor = PolicyActor(self.engine, AlgorithmConfig())

    def steps(self, count):
        for _ in range(count):
            self.metrics.append({})  # also counts a step that raises
            self.metrics[-1] |= self._step()

    def _step(self):
        batch = self._batch()
        batch["logprobs"] = self.engine.forward(batch, lambda outputs, _: outputs.logprobs) * batch["loss_mask"]
        self.actor.prepare(batch)
        self.gate.before_update(batch)
        self.actor.update(batch)
        receipt = self.servers.commit(self.engine)
        return self.gate.after_commit(receipt)

    def _batch(self):
        """Two completions of 16 to 32 tokens per prompt, with rewards 0 and 1, for four prompts."""
        trajectories = []
        for group in range(4):
            prompt = self.rng.integers(5, 200, 12)
            for sample in range(2):
                ids = np.concatenate([prompt, self.rng.integers(5, 200, self.rng.integers(16, 33))])
                generated = np.arange(len(ids)) >= len(prompt)
                versions = np.where(generated, self.engine.version, -1).astype(np.int32)
                trajectory = Trajectory(ids, generated, np.zeros(len(ids), np.float32), versions, reward=float(sample))
                trajectory.prompt_id = trajectory.group_id = group
                trajectory.episode_id = sample
                trajectories.append(trajectory)
        return shard_batch(stack(trajectories), self.engine.parallel)


@pytest.fixture(autouse=True)
def stop_at_first_failure(monkeypatch):
    monkeypatch.setattr("rl_trainers.weight_sync.gap.alarm.PATIENCE", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=64)


@pytest.fixture(scope="module")
def loop():
    with LoopThread("servers") as loop:
        yield loop


def _alarm(run, max_checks, record_property):
    """Return the alarm about the late server, after at most `max_checks` checks of each server."""
    count = len(run.servers.servers)
    with pytest.raises(WeightUpdateError) as error:
        run.steps(max_checks * count)
    run.engine.destroy()
    record_property("checks of the server until the alarm", math.ceil(len(run.metrics) / count))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, pytest.param(SERVERS - 1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("dtype", "max_checks"), [("float32", 3), ("bfloat16", 20)])
def test_gap_server_with_previous_version_is_identified_at_lr_1e_6(
    model, loop, dtype, max_checks, late, record_property
):
    run = Run(model, loop, dtype, 1e-6, late=late, mixed=False)
    message = _alarm(run, max_checks, record_property)
    assert f"scores of http://server-{late}, closer to the log-probs before the update" in message


@pytest.mark.slow
@pytest.mark.parametrize(("late", "count"), [(0, 1), (SERVERS - 1, SERVERS)])
def test_gap_bfloat16_server_without_updates_is_identified(model, loop, late, count, record_property):
    run = Run(model, loop, "bfloat16", 1e-6, late=late, stays=True, count=count)
    message = _alarm(run, 3, record_property)
    assert f"scores of http://server-{late}, bitwise identical" in message
    assert "Likely cause: weights not received" in message


class ExactLogprobs:
    """Replacement of the gate that records changes of the exact log-probs and the error of a server."""

    def __init__(self, run):
        self.run, self.changes, self.noise = run, [], []

    def _exact(self, batch):
        with self.run.engine.as_served():
            return self.run.engine.forward(batch, lambda outputs, _: outputs.logprobs)

    def before_update(self, batch):
        self.batch, self.before = batch, self._exact(batch)

    def after_commit(self, receipt):
        generated, after = self.batch["versions"] >= 0, self._exact(self.batch)
        self.changes.append((after - self.before)[generated])
        for sequence, exact, mask in zip(self.batch, after, generated, strict=True):
            ids = sequence["input_ids"][: int(sequence["attention_mask"].sum())].tolist()
            scores = torch.tensor(self.run.servers._score(1, ids, 1.0))
            self.noise.append((scores - exact[: len(ids)])[mask[: len(ids)]])
        return {}


@pytest.mark.nightly
def test_twenty_checks_cannot_identify_late_bfloat16_server_by_distance(model, loop, record_property):
    """The detection limit of any test, from the lemma of Neyman and Pearson (1933) for independent normal noise.

    With n tokens and a known change, the hypotheses are sqrt(n) |change| / |noise| standard deviations apart. The
    threshold of the gate is 5.5. A detection probability of 95% adds 1.6, so a test needs 7.
    """
    run = Run(model, loop, "bfloat16", 1e-6)
    run.gate = ExactLogprobs(run)
    run.steps(40)
    run.engine.destroy()
    change, noise = (torch.cat(values).square().mean().sqrt().item() for values in (run.gate.changes, run.gate.noise))
    tokens = 20 * len(torch.cat(run.gate.changes)) / 40 / 2  # the gate scores 4 of the 8 sequences
    deviations = math.sqrt(tokens) * change / noise
    record_property("change and noise in nats", f"{change:.2g}, {noise:.2g}")
    record_property("standard deviations between the hypotheses after 20 checks", f"{deviations:.2f}")
    assert 0 < deviations < 7


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gap_thousand_correct_updates_raise_no_alarm(model, loop, dtype, caplog, record_property):
    metrics = []
    with caplog.at_level(logging.WARNING, logger="rl.trainers.gap"):
        for lr in RATES:
            run = Run(model, loop, dtype, lr)
            run.steps(1000 // len(RATES))
            run.engine.destroy()
            metrics += run.metrics
    z = [step["gap/lag"] for step in metrics if step["gap/lag"] is not None]
    gaps = [step["gap/mean_abs"] for step in metrics]
    alarms = [record.getMessage() for record in caplog.records if "disagree" in record.getMessage()]
    record_property("evidence of lag, largest z of 1,000 updates (alarm above 5.5)", f"{max(z):.2f} of {len(z)} checks")
    record_property("mean difference in nats, largest of 1,000 updates", f"{max(gaps):.2g}")
    record_property("warnings attributed to rounding", sum("Likely cause: dtype" in alarm for alarm in alarms))
    assert not [alarm for alarm in alarms if "Likely cause: dtype" not in alarm]
    assert len(gaps) == 1000
