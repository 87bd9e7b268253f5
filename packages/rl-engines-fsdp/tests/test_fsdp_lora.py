"""Adapters of low rank: what learns, what leaves the engine, and what is kept."""

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


def test_adapters_before_the_first_step_change_nothing(model_path):
    batch = make_batch()

    found = make_engine(model_path, lora=LORA).forward(batch, logprobs_of)

    torch.testing.assert_close(found, make_engine(model_path).forward(batch, logprobs_of), atol=1e-6, rtol=1e-6)


def test_train_batch_changes_adapters_alone(model_path):
    engine = make_engine(model_path, lora=LORA)
    before = {name: value.detach().clone() for name, value in engine._model.own_parameters()}

    engine.train_batch(make_batch(), loss_fn, loss_weight_fn)
    engine.train_batch(make_batch(), loss_fn, loss_weight_fn)

    changed = {name for name, value in engine._model.own_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 2 * 2 * 7  # A and B of seven layers in each of two blocks


def plain_loss(model, batch):
    """The engine's loss of a batch by a plain forward pass of each row."""
    loss = torch.zeros(())
    for row in range(len(batch)):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / batch["temperature"][row]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        loss = loss - (logprobs * batch["advantages"][row, 1:length] * batch["loss_mask"][row, 1:length]).sum()
    return loss / batch["loss_mask"].sum()


def test_updates_of_adapters_equal_those_of_plain_peft_and_torch(model_path, record_property):
    """Warm-up, clipping and weight decay among them; the products are large enough for every library that may make
    them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, eps=EPS, max_grad_norm=0.1)
    engine = make_engine(model_path, micro_batch=512, lora=LoRAConfig(rank=16, alpha=32.0), optimizer=settings)
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_path), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    )
    ours = {f"base_model.model.{name}": value for name, value in engine._model.own_parameters() if ".lora_" in name}
    theirs = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        theirs[name].data.copy_(value.detach())
    start = {name: value.detach().clone() for name, value in ours.items()}
    optimizer = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)

    for step in range(6):
        batch = make_batch(rows=40, seed=step)
        found = engine.train_batch(batch, loss_fn, loss_weight_fn)
        optimizer.zero_grad()
        plain_loss(plain, batch).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.values(), 0.1))
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > 0.1  # so gradients were clipped

    far = max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours)
    record_property("largest difference of an adapter's entry after six steps", f"{far:.1e}")
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-4)
        assert (value - start[name]).abs().max() > 1e-3, name


def test_train_batch_with_named_modules_adapts_those_alone(model_path):
    engine = make_engine(model_path, lora=LoRAConfig(rank=2, target_modules=["q_proj", "v_proj"]))

    assert {name.split(".")[-2] for name in engine._model.adapters()} == {"q_proj", "v_proj"}


@pytest.mark.slow
def test_full_parameters_are_merged_weights_under_hugging_face_names(model_path, tmp_path):
    from transformers import AutoModelForCausalLM

    engine, batch = trained_engine(model_path), make_batch()

    received = {name: tensor.clone() for name, tensor in engine.full_parameters()}

    assert [(name, tuple(value.shape)) for name, value in received.items()] == [
        (spec.name, spec.shape) for spec in engine.param_specs()
    ]
    server = AutoModelForCausalLM.from_pretrained(model_path)
    report = server.load_state_dict(received, strict=False)
    assert report.missing_keys == ["lm_head.weight"]  # tied: sent once
    assert not report.unexpected_keys
    server.save_pretrained(tmp_path / "served")
    served = make_engine(str(tmp_path / "served")).forward(batch, logprobs_of)
    torch.testing.assert_close(served, engine.forward(batch, logprobs_of), atol=2e-5, rtol=1e-5)
    base = make_engine(model_path).forward(batch, logprobs_of)
    assert (served - base).abs().max() > 1e-2
    engine.destroy()


def test_adapter_and_its_matrices_make_the_merged_weights_of_the_models_directory(model_path):
    engine = trained_engine(model_path, steps=1)

    adapter, base = engine.adapter(), BaseWeights(Path(model_path))
    sent = {name: tensor.clone() for name, tensor in engine.adapter_parameters()}

    assert [(spec.name, spec.shape, spec.dtype) for spec in engine.adapter_specs()] == [
        (name, tuple(tensor.shape), "float32") for name, tensor in sent.items()
    ]
    base.check(adapter)  # the directory's, also after a step
    whole = weights_of(engine)
    assert adapter.base.keys() == whole.keys() > adapter.scales.keys()
    assert (len(sent), len(adapter.scales), set(adapter.scales.values())) == (28, 14, {2.0})
    for name, scale in adapter.scales.items():
        made = merged(base[name], *(sent[each] for each in adapter.matrices(name)), scale)
        assert torch.equal(made, whole[name])
        assert not torch.equal(made, base[name])
    assert all(torch.equal(base[name], whole[name]) for name in adapter.base.keys() - adapter.scales.keys())


def test_adapter_of_an_engine_that_loaded_another_base_is_refused_by_the_first_one(model_path, tmp_path):
    engine = make_engine(model_path, lora=LORA)
    engine.adapter()

    engine.load(SaveLoadMeta(make_model(tmp_path, seed=1)))

    with pytest.raises(WeightUpdateError, match="is not the one that the trainer adapts"):
        BaseWeights(Path(model_path)).check(engine.adapter())


def test_engine_without_lora_or_with_a_scalar_head_has_no_adapter_to_publish(model_path, tmp_path):
    plain = make_engine(model_path)

    assert (plain.adapter(), plain.adapter_specs(), plain.without_adapter()) == (None, (), None)
    assert make_engine(make_classifier(tmp_path), lora=LORA, head="score").adapter() is None


def test_without_adapter_computes_with_the_base_for_the_time_of_a_block(model_path):
    engine, batch = trained_engine(model_path), make_batch()
    after = engine.forward(batch, logprobs_of)

    with engine.without_adapter():
        found = engine.forward(batch, logprobs_of)

    torch.testing.assert_close(found, make_engine(model_path).forward(batch, logprobs_of), atol=1e-6, rtol=1e-6)
    assert torch.equal(engine.forward(batch, logprobs_of), after)
    assert (after - found).abs().max() > 1e-2


@pytest.mark.slow
def test_save_hf_is_the_merged_model(model_path, tmp_path):
    engine, batch = trained_engine(model_path), make_batch()

    engine.save(SaveLoadMeta(str(tmp_path / "merged")))

    found = make_engine(str(tmp_path / "merged"))
    assert weights_of(found).keys() == weights_of(make_engine(model_path)).keys()
    torch.testing.assert_close(
        found.forward(batch, logprobs_of), engine.forward(batch, logprobs_of), atol=2e-5, rtol=1e-5
    )


def test_save_adapter_loads_with_peft_on_the_base_model(model_path, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine, batch = trained_engine(model_path), make_batch()

    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))

    base = AutoModelForCausalLM.from_pretrained(model_path)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected = engine.forward(batch, logprobs_of)
    found = make_engine(str(tmp_path / "merged")).forward(batch, logprobs_of)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == (model_path, 4, 8.0)


@pytest.mark.slow
def test_load_adapter_gives_the_same_model_again(model_path, tmp_path):
    engine, batch = trained_engine(model_path), make_batch()
    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))

    other = make_engine(model_path, lora=LORA)
    other.load(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))

    assert torch.equal(other.forward(batch, logprobs_of), engine.forward(batch, logprobs_of))


@pytest.mark.slow
def test_load_adapter_of_another_shape_or_scale_says_what_differs(model_path, tmp_path):
    trained_engine(model_path, steps=0).save(SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter"))
    meta = SaveLoadMeta(str(tmp_path / "adapter"), kind="adapter")

    with pytest.raises(ModelError, match=r"rank and alpha \(4, 16.0\), found \(4, 8.0\)"):
        make_engine(model_path, lora=LoRAConfig(4, 16.0)).load(meta)
    with pytest.raises(ModelError, match=r"lora\.target_modules"):
        make_engine(model_path, lora=LoRAConfig(4, 8.0, ["q_proj"])).load(meta)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        make_engine(model_path, lora=LORA).load(SaveLoadMeta(model_path, kind="adapter"))


def test_adapter_without_lora_is_refused(model_path, tmp_path):
    with pytest.raises(ModelError, match="needs lora"):
        make_engine(model_path).save(SaveLoadMeta(str(tmp_path / "new"), kind="adapter"))


@pytest.mark.slow
def test_state_of_adapters_continues_bit_for_bit(model_path, tmp_path):
    engine, state = trained_engine(model_path), SaveLoadMeta(str(tmp_path / "state"), kind="state")
    engine.save(state)
    expected = engine.train_batch(make_batch(seed=3), loss_fn, loss_weight_fn)

    other = make_engine(model_path, lora=LORA)
    other.load(state)

    assert other.train_batch(make_batch(seed=3), loss_fn, loss_weight_fn) == expected


@pytest.mark.slow
def test_critic_with_adapters_trains_its_head_too_and_its_adapter_loads_with_peft(tmp_path):
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
        found = model(input_ids=ids[None]).logits[0, 0]
    expected = engine.forward(batch, values_of)[0, len(ids) - 1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [["lm_head"], ["no_such_layer"], ["embed_tokens"]])
def test_target_modules_that_cannot_be_adapted_are_refused(wrong, tmp_path):
    path = make_model(tmp_path, "Llama")

    with pytest.raises(ConfigError, match=r"lora\.target_modules"):
        make_engine(path, lora=LoRAConfig(target_modules=wrong))


def test_lora_without_peft_says_what_to_install(model_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(ConfigError, match=r"rl-engines-fsdp\[lora\]"):
        make_engine(model_path, lora=LORA)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}], ids=["rank", "alpha"])
def test_lora_config_with_a_wrong_value_names_the_field(wrong):
    with pytest.raises(ConfigError, match=f"lora.{next(iter(wrong))}"):
        LoRAConfig(**wrong)


@pytest.mark.slow
def test_adapters_on_two_ranks_train_publish_and_save_as_on_one(model_path, tmp_path):
    engine = make_engine(model_path, lora=LORA)
    engine.save(SaveLoadMeta(str(tmp_path / "start"), kind="adapter"))
    expected = [engine.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn) for seed in range(3)]

    run_ranks(Path(__file__).with_name("fsdp_lora_ranks.py"), [model_path, str(tmp_path)], 2)

    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        for found, one in zip(seen["steps"], expected, strict=True):
            assert found == pytest.approx(one, rel=2e-5)
        assert seen["after loading"] == seen["after saving"]
        assert seen["adapter"]["scales"]
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
    alone, adapter = load_file(tmp_path / "alone.safetensors"), AdapterSpec(**seen["adapter"])
    base = BaseWeights(Path(model_path))
    base.check(adapter)
    for name, scale in adapter.scales.items():
        made = merged(base[name], *(alone[each] for each in adapter.matrices(name)), scale)
        torch.testing.assert_close(made, published[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("wrong", [["q_proj", "v_porj"], ["q_proj", "query_key_value"]])
def test_lora_name_that_matches_no_layer_is_refused(model_path, wrong):
    with pytest.raises(ConfigError, match=f"found {wrong[1]}"):
        make_engine(model_path, lora=LoRAConfig(rank=2, target_modules=wrong))


def test_lora_what_is_adapted_is_logged(model_path, caplog):
    caplog.set_level("INFO")
    engine = make_engine(model_path, lora=LoRAConfig(rank=2, target_modules=["layers.1.self_attn.q_proj", "v_proj"]))

    learning = sum(p.numel() for p in engine._model.parameters() if p.requires_grad)
    assert f"3 layers are adapted (q_proj, v_proj), with {learning} parameters" in caplog.text


@pytest.mark.slow
def test_state_of_adapters_with_another_alpha_is_refused(model_path, tmp_path):
    state = SaveLoadMeta(str(tmp_path / "state"), kind="state")
    trained_engine(model_path).save(state)

    with pytest.raises(ModelError, match="alpha"):
        make_engine(model_path, lora=replace(LORA, alpha=2 * LORA.alpha)).load(state)
