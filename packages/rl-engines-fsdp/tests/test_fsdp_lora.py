"""Low-rank adapters: training, publishing, saving and loading."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsdp_toys import (
    EPS,
    logprobs_of,
    loss_fn,
    loss_weight_fn,
    make_batch,
    make_classifier,
    make_engine,
    make_model,
    value_loss_fn,
    values_of,
    weights_of,
)
from safetensors.torch import load_file

from rl_contracts.config import OptimizerConfig
from rl_contracts.data import AdapterSpec, SaveLoadMeta
from rl_contracts.errors import ConfigError, ModelError, WeightUpdateError
from rl_contracts.testing.processes import run_ranks
from rl_contracts.weights.adapters import BaseWeights, merged
from rl_engines_fsdp.config import LoRAConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")

LORA = LoRAConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def trained_engine(path, steps=3, **settings):
    engine = make_engine(path, lora=settings.pop("lora", LORA), **settings)
    for seed in range(steps):
        engine.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn)
    return engine


def plain_loss(model, batch):
    """Compute the loss of a batch with a plain forward pass per sequence."""
    loss = torch.zeros(())
    for index in range(len(batch)):
        length = int(batch["attention_mask"][index].sum())
        ids = batch["input_ids"][index, :length]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / batch["temperature"][index]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        loss = loss - (logprobs * batch["advantages"][index, 1:length] * batch["loss_mask"][index, 1:length]).sum()
    return loss / batch["loss_mask"].sum()


def test_adapter_updates_equal_plain_peft_and_torch(model_path, record_property):
    """Updates include warm-up, clipping and weight decay. The matrix products are large enough for oneDNN."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, eps=EPS, max_grad_norm=0.1)
    engine = make_engine(model_path, micro_batch=512, lora=LoRAConfig(rank=16, alpha=32.0), optimizer=settings)
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_path), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    )
    engine_adapters = {
        f"base_model.model.{name}": value for name, value in engine._model.own_parameters() if ".lora_" in name
    }
    peft_adapters = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    assert engine_adapters.keys() == peft_adapters.keys()
    for name, value in engine_adapters.items():
        peft_adapters[name].data.copy_(value.detach())
    start = {name: value.detach().clone() for name, value in engine_adapters.items()}
    assert not any(value.any() for name, value in start.items() if ".lora_B." in name)  # no effect before a step
    optimizer = torch.optim.AdamW(peft_adapters.values(), betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)

    for step in range(6):
        batch = make_batch(rows=40, seed=step)
        result = engine.train_batch(batch, loss_fn, loss_weight_fn)
        optimizer.zero_grad()
        plain_loss(plain, batch).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(peft_adapters.values(), 0.1))
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > 0.1  # gradients were clipped

    largest_difference = max(
        float((engine_adapters[name] - peft_adapters[name]).detach().abs().max()) for name in engine_adapters
    )
    record_property("largest difference of an adapter entry after six steps", f"{largest_difference:.1e}")
    for name, value in engine_adapters.items():
        torch.testing.assert_close(value, peft_adapters[name], atol=1e-5, rtol=1e-4)
        assert (value - start[name]).abs().max() > 1e-3, name


def test_target_modules_restrict_adapted_layers(model_path):
    engine = make_engine(model_path, lora=LoRAConfig(rank=2, target_modules=["layers.1.self_attn.q_proj", "v_proj"]))

    layers = ("layers.1.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj")
    assert set(engine._model.adapters()) == {f"model.{layer}.weight" for layer in layers}


@pytest.mark.slow
def test_full_parameters_are_merged_under_hugging_face_names(model_path, tmp_path):
    from transformers import AutoModelForCausalLM

    engine, batch = trained_engine(model_path), make_batch()

    published = {name: tensor.clone() for name, tensor in engine.full_parameters()}

    assert [(name, tuple(value.shape)) for name, value in published.items()] == [
        (spec.name, spec.shape) for spec in engine.param_specs()
    ]
    server_model = AutoModelForCausalLM.from_pretrained(model_path)
    report = server_model.load_state_dict(published, strict=False)
    assert report.missing_keys == ["lm_head.weight"]  # tied weights are sent once
    assert not report.unexpected_keys
    server_model.save_pretrained(tmp_path / "served")
    served = make_engine(str(tmp_path / "served")).forward(batch, logprobs_of)
    torch.testing.assert_close(served, engine.forward(batch, logprobs_of), atol=2e-5, rtol=1e-5)
    base = make_engine(model_path).forward(batch, logprobs_of)
    assert (served - base).abs().max() > 1e-2
    engine.destroy()


def test_adapter_parameters_merge_to_full_parameters(model_path):
    engine = trained_engine(model_path, steps=1)

    adapter, base = engine.adapter(), BaseWeights(Path(model_path))
    matrices = {name: tensor.clone() for name, tensor in engine.adapter_parameters()}

    assert [(spec.name, spec.shape, spec.dtype) for spec in engine.adapter_specs()] == [
        (name, tuple(tensor.shape), "float32") for name, tensor in matrices.items()
    ]
    base.check(adapter)  # the checksums are still those of the directory
    full_weights = weights_of(engine)
    assert adapter.base.keys() == full_weights.keys() > adapter.scales.keys()
    assert (len(matrices), len(adapter.scales), set(adapter.scales.values())) == (28, 14, {2.0})
    for name, scale in adapter.scales.items():
        merged_weight = merged(base[name], *(matrices[matrix_name] for matrix_name in adapter.matrices(name)), scale)
        assert torch.equal(merged_weight, full_weights[name])
        assert not torch.equal(merged_weight, base[name])
    assert all(torch.equal(base[name], full_weights[name]) for name in adapter.base.keys() - adapter.scales.keys())


def test_adapter_after_loading_another_base_fails_base_check(model_path, tmp_path):
    engine = make_engine(model_path, lora=LORA)
    engine.adapter()

    engine.load(SaveLoadMeta(make_model(tmp_path, seed=1)))

    with pytest.raises(WeightUpdateError, match="differs from the trainer's base model"):
        BaseWeights(Path(model_path)).check(engine.adapter())


def test_adapter_without_lora_or_with_scalar_head_is_none_or_rejected(model_path, tmp_path):
    plain = make_engine(model_path)

    assert (plain.adapter(), plain.adapter_specs(), plain.without_adapter()) == (None, (), None)
    with pytest.raises(ModelError, match="requires lora"):
        plain.save(SaveLoadMeta(str(tmp_path / "new"), kind="adapter"))
    assert make_engine(make_classifier(tmp_path / "model"), lora=LORA, head="score").adapter() is None


def test_without_adapter_computes_with_base_weights(model_path):
    engine, batch = trained_engine(model_path), make_batch()
    trained = engine.forward(batch, logprobs_of)

    with engine.without_adapter():
        without = engine.forward(batch, logprobs_of)

    torch.testing.assert_close(without, make_engine(model_path).forward(batch, logprobs_of), atol=1e-6, rtol=1e-6)
    assert torch.equal(engine.forward(batch, logprobs_of), trained)
    assert (trained - without).abs().max() > 1e-2


def test_save_adapter_loads_with_peft_on_the_base_model(model_path, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine, batch = trained_engine(model_path), make_batch()

    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))

    base = AutoModelForCausalLM.from_pretrained(model_path)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected = engine.forward(batch, logprobs_of)
    actual = make_engine(str(tmp_path / "merged")).forward(batch, logprobs_of)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == (model_path, 4, 8.0)


@pytest.mark.slow
def test_load_adapter_with_other_settings_names_the_setting(model_path, tmp_path):
    trained_engine(model_path, steps=0).save(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))
    meta = SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter")

    with pytest.raises(ModelError, match=r"\(4, 16\.0\), found \(4, 8\.0\)"):
        make_engine(model_path, lora=LoRAConfig(4, 16.0)).load(meta)
    with pytest.raises(ModelError, match=r"lora\.target_modules"):
        make_engine(model_path, lora=LoRAConfig(4, 8.0, ["q_proj"])).load(meta)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        make_engine(model_path, lora=LORA).load(SaveLoadMeta(model_path, kind="adapter"))


@pytest.mark.slow
def test_critic_with_lora_trains_head_and_adapter_loads_with_peft(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    path, batch = make_classifier(tmp_path / "base"), make_batch()
    engine = make_engine(path, lora=LORA, head="score")
    before = weights_of(engine)["score.weight"]
    for _ in range(2):
        engine.train_batch(batch, value_loss_fn, loss_weight_fn)
    assert not torch.equal(weights_of(engine)["score.weight"], before)

    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))

    base = AutoModelForSequenceClassification.from_pretrained(path)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids = batch["input_ids"][0][batch["attention_mask"][0]]
    with torch.no_grad():
        actual = model(input_ids=ids[None]).logits[0, 0]
    expected = engine.forward(batch, values_of)[0, len(ids) - 1]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["lm_head"], r"lora\.target_modules"),
        (["embed_tokens"], r"lora\.target_modules"),
        (["q_proj", "v_porj"], "found v_porj"),
    ],
)
def test_target_modules_that_cannot_be_adapted_are_rejected(modules, message, tmp_path):
    path = make_model(tmp_path, "Llama")

    with pytest.raises(ConfigError, match=message):
        make_engine(path, lora=LoRAConfig(target_modules=modules))


def test_lora_without_peft_names_the_extra(model_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(ConfigError, match=r"rl-engines-fsdp\[lora\]"):
        make_engine(model_path, lora=LORA)


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": 0.0}], ids=["rank", "alpha"])
def test_lora_config_with_invalid_value_names_the_field(settings):
    with pytest.raises(ConfigError, match=f"lora.{next(iter(settings))}"):
        LoRAConfig(**settings)


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_adapters_on_two_ranks_train_and_save_as_on_one_rank(model_path, tmp_path):
    engine = make_engine(model_path, lora=LORA)
    engine.save(SaveLoadMeta(str(tmp_path / "start"), kind="adapter"))
    expected = [engine.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn) for seed in range(3)]

    run_ranks(Path(__file__).with_name("fsdp_lora_ranks.py"), [model_path, str(tmp_path)], 2)

    for rank in range(2):
        report = json.loads((tmp_path / f"report-{rank}.json").read_text())
        for actual, step in zip(report["steps"], expected, strict=True):
            assert actual == pytest.approx(step, rel=2e-5)
        assert report["after loading"] == report["after saving"]
        assert report["adapter"]["scales"]
    weights = weights_of(engine)
    published = load_file(tmp_path / "published.safetensors")
    assert published.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(published[name], value, atol=3e-6, rtol=1e-5)
    engine.load(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))
    for name, value in weights_of(engine).items():
        torch.testing.assert_close(published[name], value, atol=1e-6, rtol=1e-5)
    saved = weights_of(make_engine(str(tmp_path / "hf")))
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    adapter_only, adapter = load_file(tmp_path / "adapter-only.safetensors"), AdapterSpec(**report["adapter"])
    base = BaseWeights(Path(model_path))
    base.check(adapter)
    for name, scale in adapter.scales.items():
        merged_weight = merged(
            base[name], *(adapter_only[matrix_name] for matrix_name in adapter.matrices(name)), scale
        )
        torch.testing.assert_close(merged_weight, published[name], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_load_state_with_another_alpha_is_rejected(model_path, tmp_path):
    state = SaveLoadMeta(str(tmp_path / "state"), kind="state")
    trained_engine(model_path).save(state)

    with pytest.raises(ModelError, match="alpha"):
        make_engine(model_path, lora=replace(LORA, alpha=2 * LORA.alpha)).load(state)
