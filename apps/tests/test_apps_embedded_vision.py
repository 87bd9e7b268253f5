"""The embedded vision-language model, and the commands that train it."""

from pathlib import Path

import pytest

from rl_apps.cli.driver import main
from rl_apps.embedded.vision import VisionShape, prepare_vision
from rl_apps.plan.memory import read_sizes
from rl_apps.programs import vision
from rl_apps.run.app import Run
from rl_apps.run.chat_template import read_tokenizer
from rl_apps.run.summary import read_metrics
from rl_apps.settings.data import DataConfig, load_rows
from rl_apps.settings.device_layout import layout_of
from rl_apps.settings.model import ModelConfig, as_planned, newest_checkpoint
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import ConfigError, ModelError

pytest.importorskip("torchvision")
SCENES = DataConfig(name="drawn-scenes", options={"size": 64})
SMALL = ["data.options.size=64", "data.batch_size=8", "evaluation.examples=8", "total_steps=2"]


def test_prepare_vision_model_and_processor_load(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    directory = prepare_vision(["How many shapes are there?"], 1, cache_dir=tmp_path)

    model, processor = AutoModelForImageTextToText.from_pretrained(directory), read_tokenizer(directory)
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    assert ChatRenderer(processor).stop_ids == (processor.tokenizer.eos_token_id,)
    row = load_rows(SCENES, "train", "sft", 1)[0]
    ids, mask = ChatRenderer(processor).render_sft(row["messages"])
    assert ids.count(processor.image_token_id) == 4  # one per cell of the scene
    assert processor.tokenizer.decode([i for i, learned in zip(ids, mask, strict=True) if learned]) == (
        f"{row['messages'][1]['content']}<|end|>"
    )


def test_as_planned_with_images_describes_a_vision_model() -> None:
    from transformers import AutoConfig

    with as_planned(ModelConfig(), SCENES) as directory:
        config = AutoConfig.from_pretrained(directory)
    assert config.vision_config.patch_size == VisionShape().patch_size
    with pytest.raises(ConfigError, match="have no experts"), as_planned(ModelConfig("embedded-moe"), SCENES):
        pass


def test_newest_checkpoint_is_that_of_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="Run clevr-count-sft first"):
        newest_checkpoint("clevr-count-sft")
    for name in ("second/checkpoints/step_9", "first/checkpoints/step_10"):
        (tmp_path / "runs" / "clevr-count-sft" / name).mkdir(parents=True)

    assert newest_checkpoint("clevr-count-sft") == tmp_path / "runs/clevr-count-sft/first/checkpoints/step_10"


@pytest.mark.slow
def test_clevr_count_grpo_starts_from_clevr_count_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main("clevr-count-sft", SMALL) == 0
    small = [*SMALL, "rollout.group_size=2"]

    for app in ("clevr-count-grpo", "geometry3k-grpo"):
        assert main(app, [*small, "run_dir=" + app]) == 0

        gaps = [r["gap/fresh_max_abs"] for r in read_metrics(tmp_path / app) if r.get("gap/fresh_max_abs") is not None]
        assert gaps, "the first step trains on tokens of the current version"
        assert max(gaps) < 1e-4
        assert hasattr(read_tokenizer(tmp_path / app / "checkpoints" / "step_2"), "image_processor")


def test_read_sizes_counts_the_vision_tower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config = vision.CLEVR_COUNT_GRPO.config()

    sizes = read_sizes(Run(config, layout_of(config.allocation, "required"), tmp_path, "cpu"), "rl", "answers")

    assert any("visual" in name for name in sizes.shapes)
    assert sizes.layers == VisionShape().layers
