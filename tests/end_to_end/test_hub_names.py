"""What is published and exported has the names and shapes of the checkpoint that the run began with, and the embedded
server serves it."""

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
"""What is kept beside parameters, and never published: no step changes it."""


def stored(path) -> dict[str, torch.Tensor]:
    found = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def as_in_memory(source: Path, target: Path) -> Path:
    """The same model with the names that transformers gives its parameters, experts in one tensor."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(target, save_original_format=False)
    return target


def trained(path: Path, dtype: str = "float32") -> tuple[FSDPEngine, dict[str, torch.Tensor]]:
    """An engine after a step, and the rows of its batch."""
    import numpy as np

    rows = [
        Trajectory(
            np.arange(3 + row, 17 + 2 * row) % 60,
            np.arange(14 + row) > 4,
            np.zeros(14 + row, np.float32),
            np.zeros(14 + row, np.int32),
        )
        for row in range(2)
    ]
    batch = stack(rows)
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(FinetuneSpec(str(path), 3, optimizer=OptimizerConfig(lr=1e-2), dtype=dtype))

    def loss(outputs, packed):
        return -outputs.logprobs[packed["loss_mask"]].sum(), {}

    engine.train_batch(batch, loss, lambda share: share["loss_mask"].sum())
    return engine, batch


def publish(engine: FSDPEngine, directory: Path, weights: ServedWeights, version: int = 1) -> WeightReceipt:
    sender = open_sender("shm", str(directory))
    meta = sender.begin(version, engine.param_specs())
    sent = WeightReceipt("trainer", version, sender.send(engine.full_parameters()))
    verify_receipt(sent, weights.stage(meta), "shm")
    weights.commit(version)
    return sent


def check_same(engine: FSDPEngine, batch, model) -> None:
    expected = engine.forward(batch, lambda outputs, packed: outputs.logprobs)
    for row, mask in enumerate(batch["attention_mask"]):
        found = torch.tensor(model.score(batch["input_ids"][row][mask].tolist(), 1.0))
        torch.testing.assert_close(found, expected[row][mask], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_publish_mixture_of_experts_has_the_checkpoints_names_and_the_server_says_the_same(family, tmp_path):
    path = make_family(tmp_path / "source", family)
    engine, batch = trained(path)
    model = load_model(EmbeddedEngineConfig(slots=2), ServeSpec(str(path), device="cpu"))
    weights = ServedWeights(model.model, str(tmp_path), "server", 0)

    sent = publish(engine, tmp_path / "weights", weights)

    kept = {name: tuple(value.shape) for name, value in stored(path).items() if not name.endswith(BUFFERS)}
    assert {spec.name: spec.shape for spec in engine.param_specs()} == kept
    assert sum(".experts." in name for name in kept) >= 3 * 4  # each of four experts has its own
    check_same(engine, batch, model)
    live = weights.receipt().checksums
    assert {name: live[name] for name in sent.checksums} == sent.checksums
    publish(engine, tmp_path / "weights", weights, 2)  # into the buffers that were served before
    check_same(engine, batch, model)
    engine.destroy()


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_export_has_the_key_set_of_a_checkpoint_with_or_without_an_expert_each(fused, dtype, tmp_path):
    hub = make_family(tmp_path / "hub", "qwen3_moe")
    path = as_in_memory(hub, tmp_path / "fused") if fused else hub
    engine, _ = trained(path, dtype)

    engine.save(SaveLoadMeta(str(tmp_path / "saved")))

    shapes = [{name: value.shape for name, value in stored(where).items()} for where in (path, tmp_path / "saved")]
    assert shapes[0] == shapes[1]
    assert any(name.endswith("experts.gate_up_proj") for name in shapes[0]) == fused
    assert {spec.name for spec in engine.param_specs()} == shapes[0].keys()
    engine.load(SaveLoadMeta(str(hub)))  # takes either
    engine.destroy()


@pytest.mark.slow
def test_server_of_split_experts_takes_a_trainers_whole_ones_and_refuses_a_part_of_them(tmp_path):
    hub = make_family(tmp_path / "hub", "qwen3_moe")
    engine, batch = trained(as_in_memory(hub, tmp_path / "fused"))
    model = load_model(EmbeddedEngineConfig(slots=2), ServeSpec(str(hub), device="cpu"))
    weights = ServedWeights(model.model, str(tmp_path), "server", 0)

    sent = publish(engine, tmp_path / "weights", weights)

    check_same(engine, batch, model)
    live = weights.receipt().checksums
    assert {name: live[name] for name in sent.checksums} == sent.checksums
    some = [(name, value) for name, value in stored(hub).items() if "experts.2.up_proj" not in name]
    meta, _ = put_weights(tmp_path / "weights", 2, some)
    with pytest.raises(WeightUpdateError, match=r"2 parameters were not sent.*experts\.gate_up_proj"):
        weights.stage(meta)
    engine.destroy()


@pytest.mark.nightly
async def test_server_process_takes_an_update_of_twelve_thousand_experts(tmp_path):
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
