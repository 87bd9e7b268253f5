"""Conformance suite for train engines. Subclass `TrainEngineConformance` and override `make_engine`.

Expected values come from `rl_contracts.testing.ReferenceTrainEngine`. The suite runs in one process. The tests of each
engine compare several ranks with one rank, on batches of `rl_contracts.testing.make_batch`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rl_contracts.batch.trajectory import UNIT_KEY, PackedBatch, pad_to, select
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import RENDEZVOUS_ROUTES, FinetuneSpec, SaveLoadMeta
from rl_contracts.engine import MAX_SKIPPED_STEPS, Stats, TokenOutputs, TrainEngine
from rl_contracts.errors import EngineError, ModelError
from rl_contracts.models.hub_names import hub_slices
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_contracts.weights import WeightReceiver, checksum, open_sender, with_rank

__all__ = ["TrainEngineConformance"]

OPTIMIZER = OptimizerConfig(
    lr=3e-3, weight_decay=0.1, eps=1e-4, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1, max_grad_norm=0.5
)
"""Optimizer settings that exercise every term of the step.

A large `eps` keeps rounding errors in gradients near 0 from becoming full steps.
"""
STEPS = 5
"""Total optimizer steps of the learning-rate schedule."""


def policy_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Return the sum of a clipped policy-gradient loss.

    Its statistics are a mean over tokens, a mean over sequences and a maximum.
    """
    mask = packed["loss_mask"]
    ratio = (outputs.logprobs - packed["logprobs"]).clamp(-1, 1).exp()
    loss = -(ratio * packed["advantages"])[mask].sum()
    logprobs = outputs.logprobs.detach()[mask]
    return loss, {
        "entropy": (outputs.entropy.detach()[mask].sum(), mask.sum()),
        "row_reward": (packed["rewards"].sum(), torch.tensor(packed.num_sequences)),
        "logprob/max": (logprobs.max() if len(logprobs) else torch.tensor(-math.inf), torch.tensor(1)),
    }


def pair_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Return the sum of a loss that compares the sequences of each unit, and the mean margin of the units."""
    sums = packed.sequence_sums(torch.where(packed["loss_mask"], outputs.logprobs, 0.0))
    margins = packed.unit_sums(torch.where(packed["rewards"] > 0, sums, -sums))
    unit_count = torch.tensor(float(packed.num_units), device=margins.device)
    return -torch.nn.functional.logsigmoid(margins).sum(), {"margin": (margins.detach().sum(), unit_count)}


def exploding_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Return a loss with non-finite gradients."""
    return outputs.logprobs.sum() * math.inf, {}


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """Return the denominator of `policy_loss`."""
    return batch["loss_mask"].sum()


def pairs(batch: TensorDict) -> torch.Tensor:
    """Return the denominator of `pair_loss`."""
    return (batch["rewards"] > 0).sum()


def by_hub_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return views of the parameters of a model by their checkpoint names. Each expert is a separate view."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    slices = hub_slices(model, parameters.items())
    return {view.name: view.slice_of(parameters[name]) for name, views in slices.items() for view in views}


def logprobs_of(engine: TrainEngine, batch: TensorDict) -> torch.Tensor:
    """Return the log-probs of a batch under the current weights of the engine, [B, T]."""
    return engine.forward(batch, lambda outputs, packed: outputs.logprobs)


class TrainEngineConformance:
    """Tests of the `TrainEngine` contract."""

    tolerance = 2e-5
    """Absolute and relative tolerance of log-probs and losses in float32. Gradient norms use ten times the value."""

    device = "cpu"
    """Value of `FinetuneSpec.device` for the tests."""

    def make_engine(self) -> TrainEngine:
        """Return an engine of one rank that is not initialized. Subclasses override it."""
        raise NotImplementedError("`make_engine` is not implemented: override it")

    @pytest.fixture
    def model_path(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        """Hugging Face model directory with a tokenizer. Override it to test another architecture."""
        return str(make_tiny_model(tmp_path_factory.mktemp("conformance-model"), hidden=32))

    @pytest.fixture
    def start(self, model_path: str) -> Iterator[Any]:
        """Factory of initialized engines, `start(optimizer=..., micro_batch_tokens=..., path=...)`; destroys them."""
        engines: list[TrainEngine] = []

        def start(
            optimizer: OptimizerConfig = OPTIMIZER, micro_batch_tokens: int = 64, path: str = model_path
        ) -> TrainEngine:
            engine = self.make_engine()
            engines.append(engine)
            micro_batch = MicroBatchConfig(micro_batch_tokens)
            spec = FinetuneSpec(path, STEPS, optimizer=optimizer, micro_batch=micro_batch, device=self.device)
            engine.initialize(spec)
            return engine

        yield start
        for engine in engines:
            engine.destroy()
            engine.destroy()  # may be called twice

    @pytest.fixture
    def reference(self, model_path: str) -> ReferenceTrainEngine:
        """Reference engine with the same model."""
        engine = ReferenceTrainEngine()
        engine.initialize(FinetuneSpec(model_path, STEPS, optimizer=OPTIMIZER))
        return engine

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Assert that log-probs agree within `tolerance`."""
        torch.testing.assert_close(actual, expected, atol=self.tolerance, rtol=self.tolerance)

    def assert_stats_close(self, actual: dict[str, float], expected: dict[str, float]) -> None:
        """Assert that two steps return the same metrics with values that agree within `tolerance`."""
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            rel = 10 * self.tolerance if name == "grad_norm" else self.tolerance
            assert actual[name] == pytest.approx(value, rel=rel, abs=self.tolerance), name

    # ---- forward

    def test_forward_matches_reference_in_order_of_the_batch(self, start: Any, reference: Any) -> None:
        batch = make_batch(7)

        for output in ("logprobs", "entropy"):
            actual = start().forward(batch, lambda outputs, packed, o=output: getattr(outputs, o))
            expected = reference.forward(batch, lambda outputs, packed, o=output: getattr(outputs, o))

            assert actual.device.type == "cpu"
            assert actual.dtype == torch.float32
            self.assert_close(actual, expected)

    def test_forward_is_causal_and_zero_at_first_token_and_padding(self, start: Any) -> None:
        batch, engine = make_batch(4, lengths=(8, 12)), start()
        changed = batch.clone()
        changed["input_ids"][:, 5] = (batch["input_ids"][:, 5] + 1) % 256

        before, after = logprobs_of(engine, batch), logprobs_of(engine, changed)

        assert (before[:, 0] == 0).all()
        assert (before[~batch["attention_mask"]] == 0).all()
        assert (before[:, 1:8] < 0).all()
        self.assert_close(after[:, :5], before[:, :5])
        assert ((after[:, 5] - before[:, 5]).abs() > 1e-3).all()
        assert ((after[:, 6] - before[:, 6]).abs() > 1e-3).all()

    def test_forward_divides_logits_by_temperature_of_each_sequence(self, start: Any) -> None:
        batch = select(make_batch(1, lengths=(10, 10)), [0, 0, 0])
        batch["temperature"] = torch.tensor([1.0, 0.5, 1e6])

        logprobs = logprobs_of(start(), batch)

        assert ((logprobs[0] - logprobs[1]).abs()[1:] > 1e-3).all()
        torch.testing.assert_close(logprobs[2, 1:], torch.full((9,), -math.log(259)), atol=1e-3, rtol=0)

    def test_forward_empty_batch_is_empty_and_oversized_sequence_raises(self, start: Any) -> None:
        batch, engine = make_batch(2, lengths=(20, 20)), start(micro_batch_tokens=20)

        assert logprobs_of(engine, batch[:0]).shape == (0, 20)
        with pytest.raises(EngineError):
            logprobs_of(start(micro_batch_tokens=19), batch)

    # ---- training

    def test_train_batch_matches_reference_over_several_steps(self, start: Any, reference: Any) -> None:
        engine = start()

        for step in range(STEPS):
            batch = make_batch(6, seed=step)
            metrics = engine.train_batch(batch, policy_loss, trained_tokens)
            self.assert_stats_close(metrics, reference.train_batch(batch, policy_loss, trained_tokens))

        probe = make_batch(4, seed=99)
        torch.testing.assert_close(logprobs_of(engine, probe), logprobs_of(reference, probe), atol=2e-4, rtol=1e-3)

    @pytest.mark.parametrize("split", ["one sequence each", "one micro-batch", "other order", "wider padding"])
    def test_train_batch_result_does_not_depend_on_the_split(self, start: Any, reference: Any, split: str) -> None:
        batch, size = make_batch(6, seed=3), 64
        if split == "one sequence each":
            size = batch["input_ids"].shape[1]
        elif split == "one micro-batch":
            size = 1 << 20
        elif split == "other order":
            batch = select(batch, [3, 1, 5, 0, 4, 2])
        else:
            batch = pad_to(batch, 77)

        metrics = start(micro_batch_tokens=size).train_batch(batch, policy_loss, trained_tokens)

        self.assert_stats_close(metrics, reference.train_batch(make_batch(6, seed=3), policy_loss, trained_tokens))

    @pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 2, 4]])
    def test_train_batch_keeps_each_unit_in_one_micro_batch(self, start: Any, reference: Any, order: list[int]) -> None:
        batch = make_batch(6, seed=5)
        batch[UNIT_KEY], batch["rewards"] = torch.tensor([4, 4, 9, 9, 2, 2]), torch.tensor([1.0, 0, 1, 0, 1, 0])
        longest_pair = int(batch["attention_mask"].sum(-1).view(3, 2).sum(1).max())

        metrics = start(micro_batch_tokens=longest_pair).train_batch(select(batch, order), pair_loss, pairs)

        self.assert_stats_close(metrics, reference.train_batch(batch, pair_loss, pairs))
        with pytest.raises(EngineError):
            start(micro_batch_tokens=longest_pair - 1).train_batch(batch, pair_loss, pairs)

    def test_train_batch_ignores_sequence_without_trained_tokens(self, start: Any, reference: Any) -> None:
        batch = make_batch(4, seed=6)
        batch["loss_mask"][2] = False
        without = select(batch, [0, 1, 3])

        metrics = start().train_batch(batch, policy_loss, trained_tokens)

        expected = reference.train_batch(without, policy_loss, trained_tokens)
        for name in ("loss", "grad_norm", "entropy", "logprob/max"):
            assert metrics[name] == pytest.approx(expected[name], rel=10 * self.tolerance, abs=self.tolerance), name

    def test_train_batch_updates_every_weight_like_the_reference(self, start: Any, reference: Any) -> None:
        engine, batch = start(), make_batch(6, seed=7)
        before = {name: value.clone() for name, value in by_hub_names(reference.model).items()}
        for trained in (engine, reference):
            trained.train_batch(batch, policy_loss, trained_tokens)

        updated = {name: tensor.clone() for name, tensor in engine.full_parameters()}

        for name, value in by_hub_names(reference.model).items():
            step = (value - before[name]).norm()
            assert (updated[name].cpu() - value).norm() <= 10 * self.tolerance * step, name

    def test_train_batch_zero_denominator_or_empty_batch_raises(self, start: Any) -> None:
        batch, engine = make_batch(3), start()
        masked = batch.clone()
        masked["loss_mask"][:] = False

        for invalid in (masked, batch[:0]):
            with pytest.raises(EngineError):
                engine.train_batch(invalid, policy_loss, trained_tokens)
            with pytest.raises(EngineError):
                engine.eval_batch(invalid, policy_loss, trained_tokens)

    def test_train_batch_skips_non_finite_gradients_up_to_the_limit(self, start: Any) -> None:
        batch, engine = make_batch(3), start()
        before = logprobs_of(engine, batch)

        assert engine.train_batch(batch, exploding_loss, trained_tokens)["applied"] == 0.0
        self.assert_close(logprobs_of(engine, batch), before)
        assert engine.train_batch(batch, policy_loss, trained_tokens)["applied"] == 1.0
        for _ in range(MAX_SKIPPED_STEPS):
            assert engine.train_batch(batch, exploding_loss, trained_tokens)["applied"] == 0.0
        with pytest.raises(EngineError):
            engine.train_batch(batch, exploding_loss, trained_tokens)

    def test_eval_batch_matches_loss_of_train_batch_and_changes_nothing(self, start: Any, reference: Any) -> None:
        batch, engine = make_batch(5), start()
        before = logprobs_of(engine, batch)

        evaluated = engine.eval_batch(batch, policy_loss, trained_tokens)

        assert torch.equal(logprobs_of(engine, batch), before)
        self.assert_stats_close(evaluated, reference.eval_batch(batch, policy_loss, trained_tokens))
        trained = engine.train_batch(batch, policy_loss, trained_tokens)
        assert evaluated["loss"] == pytest.approx(trained["loss"], abs=self.tolerance)

    def test_offload_then_onload_keeps_logprobs_and_training(self, start: Any) -> None:
        batch, engine = make_batch(3), start()
        engine.train_batch(batch, policy_loss, trained_tokens)
        before = logprobs_of(engine, batch)

        engine.offload()
        engine.onload()

        self.assert_close(logprobs_of(engine, batch), before)
        assert engine.train_batch(batch, policy_loss, trained_tokens)["applied"] == 1.0

    def test_destroy_repeated_runs_do_not_accumulate_threads(self, start: Any) -> None:
        def count_threads() -> int:
            engine = start()
            engine.train_batch(make_batch(3), policy_loss, trained_tokens)
            engine.destroy()
            return len(os.listdir("/proc/self/task"))  # includes native threads, for example of a process group

        if not Path("/proc/self/task").exists():
            pytest.skip("this system has no /proc, where the test counts threads")
        first = count_threads()
        assert [count_threads() for _ in range(3)][-1] <= first + 3  # a library may keep one group of three threads

    # ---- exporting weights, saving, loading

    def test_param_specs_match_checkpoint_and_order_of_full_parameters(self, start: Any, model_path: str) -> None:
        from safetensors.torch import load_file

        engine = start()
        specs = engine.param_specs()

        exported = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in engine.full_parameters()]

        assert exported == [(spec.name, spec.shape, False) for spec in specs]
        files = [load_file(file) for file in Path(model_path).glob("*.safetensors")]
        assert {spec.name: spec.shape for spec in specs} == {
            n: tuple(v.shape) for file in files for n, v in file.items()
        }
        assert all(isinstance(getattr(torch, spec.dtype), torch.dtype) for spec in specs)
        assert engine.param_specs() == specs

    def test_full_parameters_after_each_step_match_weights_of_forward(self, start: Any, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        batch, engine, exports = make_batch(3), start(), []
        for _ in range(2):
            engine.train_batch(batch, policy_loss, trained_tokens)

            exported = {name: tensor.clone() for name, tensor in engine.full_parameters()}

            model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            parameters = by_hub_names(model)
            for name, tensor in exported.items():
                parameters[name].copy_(tensor)
            self.assert_close(logprobs_of(_engine_of(model), batch), logprobs_of(engine, batch))
            exports.append(exported)
        assert any(not torch.equal(exports[0][name], exports[1][name]) for name in exports[0])

    @pytest.mark.parametrize("route", ["shm", "disk", "broadcast"])
    def test_full_parameters_sent_over_route_arrive_with_equal_checksums(
        self, start: Any, tmp_path: Path, route: str
    ) -> None:
        engine, receiver = start(), WeightReceiver()
        specs = engine.param_specs()
        targets = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
        location = "tcp://127.0.0.1:0?timeout=20" if route == "broadcast" else str(tmp_path)
        sender = open_sender(route, location)
        with ThreadPoolExecutor(1) as pool:
            for version in (1, 2):
                engine.train_batch(make_batch(3), policy_loss, trained_tokens)

                meta = sender.begin(version, specs)
                sending = pool.submit(sender.send, engine.full_parameters())
                if route not in RENDEZVOUS_ROUTES:
                    sending.result(20)
                checksums = receiver.receive(with_rank(meta, 1, 2) if route in RENDEZVOUS_ROUTES else meta, targets)

                assert sending.result(20) == checksums
                assert {name: checksum(tensor) for name, tensor in targets.items()} == checksums
                for name, tensor in engine.full_parameters():
                    assert torch.equal(targets[name], tensor.cpu().to(targets[name].dtype)), name
        receiver.close()
        sender.close()

    def test_save_hf_loads_with_transformers_and_tokenizer(self, start: Any, model_path: str, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        batch, engine, path = make_batch(3), start(), tmp_path / "deep" / "saved"
        engine.train_batch(batch, policy_loss, trained_tokens)

        engine.save(SaveLoadMeta(str(path), "hf", tokenizer_path=model_path))

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.assert_close(logprobs_of(_engine_of(model), batch), logprobs_of(engine, batch))
        assert AutoTokenizer.from_pretrained(path).chat_template
        assert [p.name for p in path.parent.iterdir()] == ["saved"]
        self.assert_close(logprobs_of(start(path=str(path)), batch), logprobs_of(engine, batch))

    def test_save_state_then_load_continues_exactly_with_version(self, start: Any, tmp_path: Path) -> None:
        first, path = start(), str(tmp_path / "state")
        for step in range(2):
            first.train_batch(make_batch(4, seed=step), policy_loss, trained_tokens)
        first.version = 17
        first.save(SaveLoadMeta(path, "state"))

        second = start()
        second.load(SaveLoadMeta(path, "state"))

        assert second.version == 17
        for step in range(2, 4):
            batch = make_batch(4, seed=step)
            expected = first.train_batch(batch, policy_loss, trained_tokens)
            assert second.train_batch(batch, policy_loss, trained_tokens) == expected

    @pytest.mark.parametrize("kind", ["state", "hf"])
    def test_snapshot_written_after_further_training_holds_earlier_state(
        self, start: Any, kind: str, tmp_path: Path
    ) -> None:
        first, meta = start(), SaveLoadMeta(str(tmp_path / "new"), kind)
        first.train_batch(make_batch(4), policy_loss, trained_tokens)
        probe = logprobs_of(first, make_batch(4, seed=9))

        write = first.snapshot(meta)
        if write is None:
            pytest.skip("this engine does not support snapshots")
        expected = first.train_batch(make_batch(4, seed=1), policy_loss, trained_tokens)
        with ThreadPoolExecutor(1) as pool:
            files = pool.submit(write).result(60)

        assert sorted(files) == sorted(file for file in (tmp_path / "new").rglob("*") if file.is_file())
        second = start()
        second.load(meta)
        self.assert_close(logprobs_of(second, make_batch(4, seed=9)), probe)
        if kind == "state":
            assert second.train_batch(make_batch(4, seed=1), policy_loss, trained_tokens) == expected

    def test_load_empty_directory_raises_model_error(self, start: Any, tmp_path: Path) -> None:
        engine = start()
        for kind in ("hf", "state"):
            with pytest.raises(ModelError):
                engine.load(SaveLoadMeta(str(tmp_path), kind))

    def test_initialize_directory_without_weights_raises_model_error(self, model_path: str, tmp_path: Path) -> None:
        config = Path(model_path, "config.json").read_text()
        (tmp_path / "config.json").write_text(config)

        for path in (tmp_path, tmp_path / "missing"):
            engine = self.make_engine()
            with pytest.raises(ModelError):
                engine.initialize(FinetuneSpec(str(path), total_steps=1, device=self.device))
            engine.destroy()


def _engine_of(model: torch.nn.Module) -> ReferenceTrainEngine:
    """Return a reference engine that computes with the weights of a model."""
    engine = ReferenceTrainEngine(model=model.eval())
    engine.initialize(FinetuneSpec("", total_steps=1))
    return engine
