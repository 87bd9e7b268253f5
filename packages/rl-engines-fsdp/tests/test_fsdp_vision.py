"""Vision-language models of seven families against a loop over single sequences in transformers."""

from __future__ import annotations

import inspect
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_toys import record_gradients
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from vision_toys import LAYOUTS, make_vision_batch, make_vision_engine, noise, output_path, step

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.image_entries import images_of, set_images
from rl_contracts.batch.trajectory import lengths
from rl_contracts.data import VISION_PARTS, FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import ConfigError, EngineError, ModelError
from rl_contracts.images.features import ImageProcessor, placeholder_id
from rl_contracts.testing import make_tiny_model
from rl_contracts.testing.processes import run_ranks
from rl_contracts.testing.vision_families import VISION_FAMILIES, make_vision_model
from rl_engines_fsdp import FSDPEngineConfig
from rl_engines_fsdp.config import LoRAConfig
from rl_engines_fsdp.model.vision import freeze

TYPES = ("mm_token_type_ids", "token_type_ids")
SPLIT = ("qwen2_5_vl", "gemma3")
"""Families that are trained on several ranks."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: str(make_vision_model(family, root / family)) for family in VISION_FAMILIES}


def reference(directory: str, batch: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probs [B, T] and gradients of the mean over trained tokens, one sequence at a time."""
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    processor, names = ImageProcessor(directory), inspect.signature(type(model.base_model).forward).parameters
    result, sizes = torch.zeros(batch["input_ids"].shape), lengths(batch).tolist()
    total: Any = 0.0
    for row, (size, images) in enumerate(zip(sizes, images_of(batch), strict=True)):
        ids = batch["input_ids"][row, :size][None]
        features = processor.features(images).tensors if images else {}
        inputs = {name: value for name, value in features.items() if name in names}
        inputs |= {name: (ids == placeholder_id(model.config)).long() for name in TYPES if name in names}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        result[row, 1:size] = logprobs.detach()
        total = total - logprobs[batch["loss_mask"][row, 1:size]].sum()
    (total / batch["loss_mask"].sum()).backward()
    return result, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def part_of(name: str) -> str:
    """Return the part of the model to which a parameter of `SPLIT` belongs."""
    if "language_model" in name or "lm_head" in name:
        return "language_model"
    return "projector" if "projector" in name or "merger" in name else "vision_tower"


def assert_equal_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        if scale > 1e-7:
            torch.testing.assert_close(actual[name], gradient, atol=1e-4 * scale, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_step_equals_a_loop_over_sequences(family: str, directories: dict[str, str]) -> None:
    directory = directories[family]
    batch = make_vision_batch(directory)
    expected, gradients = reference(directory, batch)

    for max_tokens in (4096, 130):
        engine = make_vision_engine(directory, max_tokens)
        recorded = record_gradients(engine)
        logprobs = engine.forward(batch, lambda outputs, _: outputs.logprobs)
        step(engine, batch)

        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        assert_equal_gradients(recorded, gradients)
        assert any("vis" in name for name in recorded)


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_vision_step_on_two_ranks_equals_a_loop(directories: dict[str, str], tmp_path: Path) -> None:
    models = {family: directories[family] for family in SPLIT}
    run_ranks(Path(__file__).with_name("fsdp_vision_ranks.py"), [json.dumps(models), str(tmp_path)], 2)

    for family, directory in models.items():
        _, gradients = reference(directory, make_vision_batch(directory))
        for layout, (_, frozen) in LAYOUTS.items():
            expected = {name: value for name, value in gradients.items() if part_of(name) not in frozen}
            for rank in range(2):
                actual = load_file(output_path(tmp_path, f"{family}-{layout}", rank))
                assert actual.keys() == expected.keys()
                assert_equal_gradients(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", SPLIT)
def test_vision_frozen_part_leaves_the_other_gradients(family: str, directories: dict[str, str]) -> None:
    batch = make_vision_batch(directories[family])
    _, gradients = reference(directories[family], batch)

    for part in VISION_PARTS:
        engine = make_vision_engine(directories[family], freeze=(part,))
        recorded = record_gradients(engine)
        step(engine, batch)

        expected = {name: value for name, value in gradients.items() if part_of(name) != part}
        assert recorded.keys() == expected.keys() < gradients.keys()
        assert_equal_gradients(recorded, expected)


@pytest.mark.slow
def test_freeze_without_such_a_part_is_rejected(directories: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(directories["gemma3"])
    model.model.multi_modal_projector = torch.nn.Identity()
    with pytest.raises(ModelError, match="projector"):
        freeze(model, ("projector",))
    with pytest.raises(ConfigError, match="freeze"):
        make_vision_engine(directories["gemma3"], freeze=("vision",))
    with pytest.raises(ConfigError, match="vision-language"):
        make_vision_engine(str(make_tiny_model(tmp_path)), freeze=("vision_tower",))


@pytest.mark.slow
def test_vision_features_exist_for_one_micro_batch_at_a_time(directories: dict[str, str]) -> None:
    engine, batch = make_vision_engine(directories["gemma3"], 40), make_vision_batch(directories["gemma3"])
    features: list[weakref.ref[torch.Tensor]] = []

    def record(_: Any, inputs: Any, keywords: dict[str, torch.Tensor]) -> None:
        assert all(feature() is None for feature in features)
        if "pixel_values" in keywords:
            features.append(weakref.ref(keywords["pixel_values"]))

    engine._model.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    step(engine, batch)
    engine.forward(batch, lambda outputs, _: outputs.logprobs)

    assert len(features) == 4


@pytest.mark.slow
def test_vision_other_image_changes_only_its_sequence(directories: dict[str, str]) -> None:
    engine = make_vision_engine(directories["qwen2_5_vl"])
    batch = make_vision_batch(directories["qwen2_5_vl"])
    before = engine.forward(batch, lambda outputs, _: outputs.logprobs)
    rows = [*images_of(batch)]
    rows[2] = (noise(32, 16, seed=9), rows[2][1])

    set_images(batch, rows)
    after = engine.forward(batch, lambda outputs, _: outputs.logprobs)

    assert [index for index in range(len(batch)) if not torch.equal(before[index], after[index])] == [2]


@pytest.mark.slow
def test_vision_placeholders_without_image_raise_engine_error(directories: dict[str, str]) -> None:
    engine = make_vision_engine(directories["qwen2_5_vl"])
    batch = make_vision_batch(directories["qwen2_5_vl"])
    set_images(batch, [()] * len(batch))

    with pytest.raises(EngineError, match="placeholders"):
        step(engine, batch)


@pytest.mark.slow
def test_vision_saved_directory_has_processor_and_names(directories: dict[str, str], tmp_path: Path) -> None:
    for family, directory in directories.items():
        engine = make_vision_engine(directory)
        path = tmp_path / family
        engine.save(SaveLoadMeta(str(path), tokenizer_path=directory))

        assert load_file(path / "model.safetensors").keys() == load_file(Path(directory) / "model.safetensors").keys()
        assert type(AutoProcessor.from_pretrained(path)) is type(AutoProcessor.from_pretrained(directory))
        engine.destroy()


@pytest.mark.slow
def test_vision_checkpoint_loads_with_processor_and_trained_weights(
    directories: dict[str, str], tmp_path: Path
) -> None:
    directory, path = directories["gemma3"], str(tmp_path / "saved")
    batch = make_vision_batch(directory)
    engine = make_vision_engine(directory)
    step(engine, batch)
    tokenizer = tmp_path / "tokenizer"  # as with another chat template, whose directory has no processor
    AutoTokenizer.from_pretrained(directory).save_pretrained(tokenizer)

    engine.save(SaveLoadMeta(path, tokenizer_path=str(tokenizer)))

    logprobs, _ = reference(path, batch)
    torch.testing.assert_close(engine.forward(batch, lambda o, _: o.logprobs), logprobs, atol=1e-5, rtol=0)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "color?"}]}]
    rendered, expected = (
        AutoProcessor.from_pretrained(saved).apply_chat_template(messages) for saved in (path, directory)
    )
    assert rendered == expected


def test_check_rejects_adapters_and_scalar_heads_of_vision_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}, "vision_config": {}}))
    spec = FinetuneSpec(str(tmp_path), 1)

    FSDPEngineConfig().check(ParallelStrategy(), spec)
    for config, head, message in (
        (FSDPEngineConfig(lora=LoRAConfig()), "lm", "lora"),
        (FSDPEngineConfig(), "value", "head=value"),
        (FSDPEngineConfig(), "score", "head=score"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.check(ParallelStrategy(), replace(spec, head=head))
