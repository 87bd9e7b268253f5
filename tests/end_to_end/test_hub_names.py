"""Published and exported weights have the names and shapes of the initial checkpoint, and the embedded server loads
them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rl_contracts.batch.trajectory import Trajectory, stack
from rl_contracts.config import ClientConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec, SaveLoadMeta, ServeSpec, WeightReceipt
from rl_contracts.errors import WeightUpdateError
from rl_contracts.testing import put_weights
from rl_contracts.testing.families import make_family
from rl_contracts.weights import open_sender, verify_receipt
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_inference import EmbeddedEngine
from rl_inference.backends.embedded.config import EmbeddedEngineConfig
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.weights import ServedWeights
from rl_inference.testing import ServerProcess

FAMILIES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "deepseek_v3"))]
BUFFERS = ("e_score_correction_bias",)
"""Suffixes of buffers in checkpoints. No step changes a buffer, so publishing does not send them."""


def stored(path) -> dict[str, torch.Tensor]:
    """Load the tensors of a Hugging Face directory."""
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def save_fused(source: Path, target: Path) -> Path:
    """Save a model under the parameter names of transformers, with all experts in one tensor."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(target, save_original_format=False)
    return target


def train(path: Path, dtype: str = "float32") -> tuple[FSDPEngine, dict[str, torch.Tensor]]:
    """Take one step and return the engine with its batch."""
    import numpy as np

    trajectories = [
        Trajectory(
            np.arange(3 + i, 17 + 2 * i) % 60,
            np.arange(14 + i) > 4,
            np.zeros(14 + i, np.float32),
            np.zeros(14 + i, np.int32),
        )
        for i in range(2)
    ]
    batch = stack(trajectories)
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(FinetuneSpec(str(path), 3, optimizer=OptimizerConfig(lr=1e-2), dtype=dtype))

    def loss(outputs, packed):
        return -outputs.logprobs[packed["loss_mask"]].sum(), {}

    engine.train_batch(batch, loss, lambda batch: batch["loss_mask"].sum())
    return engine, batch


def publish(engine: FSDPEngine, directory: Path, weights: ServedWeights, version: int = 1) -> WeightReceipt:
    sender = open_sender("shm", str(directory))
    meta = sender.begin(version, engine.param_specs())
    sent = WeightReceipt("trainer", version, sender.send(engine.full_parameters()))
    verify_receipt(sent, weights.stage(meta), "shm")
    weights.commit(version)
    return sent


def check_scores(engine: FSDPEngine, batch, model) -> None:
    """Check that the server model computes the log-probs of the engine."""
    expected = engine.forward(batch, lambda outputs, packed: outputs.logprobs)
    for index, mask in enumerate(batch["attention_mask"]):
        scores = torch.tensor(model.score(batch["input_ids"][index][mask].tolist(), 1.0))
        torch.testing.assert_close(scores, expected[index][mask], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_publish_moe_has_checkpoint_names_and_server_scores_match(family, tmp_path):
    path = make_family(tmp_path / "source", family)
    engine, batch = train(path)
    model = load_model(EmbeddedEngineConfig(max_sequences=2), ServeSpec(str(path), device="cpu"))
    weights = ServedWeights(model.model, str(tmp_path), "server", 0)

    sent = publish(engine, tmp_path / "weights", weights)

    shapes = {name: tuple(value.shape) for name, value in stored(path).items() if not name.endswith(BUFFERS)}
    assert {spec.name: spec.shape for spec in engine.param_specs()} == shapes
    assert sum(".experts." in name for name in shapes) >= 3 * 4  # three tensors for each of four experts
    check_scores(engine, batch, model)
    live = weights.receipt().checksums
    assert {name: live[name] for name in sent.checksums} == sent.checksums
    publish(engine, tmp_path / "weights", weights, 2)  # into the buffers of the previous version
    check_scores(engine, batch, model)
    engine.destroy()


@pytest.mark.parametrize(
    ("fused", "dtype"), [(False, "float32"), pytest.param(True, "bfloat16", marks=pytest.mark.slow)]
)
def test_export_has_names_of_checkpoint_with_fused_or_split_experts(fused, dtype, tmp_path):
    hub = make_family(tmp_path / "hub", "qwen3_moe")
    path = save_fused(hub, tmp_path / "fused") if fused else hub
    engine, _ = train(path, dtype)

    engine.save(SaveLoadMeta(str(tmp_path / "saved")))

    shapes = [{name: value.shape for name, value in stored(source).items()} for source in (path, tmp_path / "saved")]
    assert shapes[0] == shapes[1]
    assert any(name.endswith("experts.gate_up_proj") for name in shapes[0]) == fused
    assert {spec.name for spec in engine.param_specs()} == shapes[0].keys()
    engine.load(SaveLoadMeta(str(hub)))  # fused and split checkpoints
    engine.destroy()


@pytest.mark.slow
def test_server_with_split_experts_loads_fused_and_rejects_incomplete(tmp_path):
    hub = make_family(tmp_path / "hub", "qwen3_moe")
    engine, batch = train(save_fused(hub, tmp_path / "fused"))
    model = load_model(EmbeddedEngineConfig(max_sequences=2), ServeSpec(str(hub), device="cpu"))
    weights = ServedWeights(model.model, str(tmp_path), "server", 0)

    sent = publish(engine, tmp_path / "weights", weights)

    check_scores(engine, batch, model)
    live = weights.receipt().checksums
    assert {name: live[name] for name in sent.checksums} == sent.checksums
    incomplete = [(name, value) for name, value in stored(hub).items() if "experts.2.up_proj" not in name]
    meta, _ = put_weights(tmp_path / "weights", 2, incomplete)
    with pytest.raises(WeightUpdateError, match=r"2 parameters were not sent.*experts\.gate_up_proj"):
        weights.stage(meta)
    engine.destroy()


@pytest.mark.nightly
async def test_server_process_loads_update_of_twelve_thousand_tensors(tmp_path):
    path = make_family(tmp_path / "hub", "qwen3_moe", num_local_experts=2048)
    named = [(name, value) for name, value in stored(path).items() if not name.endswith(BUFFERS)]
    assert len(named) > 12_000
    with ServerProcess(path, tmp_path / "server.log", options={"weights_dir": tmp_path / "weights"}) as server:
        engine = EmbeddedEngine(client=ClientConfig())
        engine.initialize([server.address])
        meta, sent = put_weights(tmp_path / "weights", 1, named)

        for receipt in await engine.stage_weights(meta):
            verify_receipt(sent, receipt, "shm")
        await engine.commit_weights(1)

        live = (await engine.live_receipts(None))[0]
        assert live.version == 1
        assert {name: live.checksums[name] for name in sent.checksums} == sent.checksums
        await engine.destroy()
