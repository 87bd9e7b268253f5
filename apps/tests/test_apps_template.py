"""Chat templates: a model without one is rejected before a run starts, and a setting can provide one."""

import json
import shutil

import PIL.Image
import pytest
from tokenizers import processors

from rl_apps.cli.driver import main
from rl_apps.programs import gsm8k_grpo
from rl_apps.run.app import Run
from rl_apps.run.chat_template import load_tokenizer, read_tokenizer, save_tokenizer
from rl_apps.settings.device_layout import layout_of
from rl_apps.settings.model import ModelConfig
from rl_contracts.chat.image_messages import image_part
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.images import read_image
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.testing.vision_families import make_vision_model

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A model whose tokenizer has no chat template."""
    directory = make_tiny_model(tmp_path_factory.mktemp("base"), layers=1, hidden=32)
    for file in directory.glob("chat_template*"):
        file.unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("app", ["gsm8k-grpo", "gsm8k-sft"])
def test_model_without_a_chat_template_is_rejected(base_model, capsys, app):
    assert main(app, [f"model.path={base_model}", "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        "expected a tokenizer with a chat template, which base models lack; give model.chat_template=" in captured.err
    )


def test_chat_template_that_is_no_file_is_rejected(base_model, capsys):
    assert main("gsm8k-sft", [f"model.path={base_model}", "model.chat_template=nowhere.jinja", "--dry-run"]) == 2
    assert "model.chat_template: expected plain, or a file with a Jinja template, found 'nowhere.jinja'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("broken", "content", "remedy"),
    [
        ("model/tokenizer_config.json", b"", "Copy or download it again"),
        ("model/tokenizer.json", b"{}", "Copy or download it again"),
        ("run/config.yaml", b"seed: [1", "delete the file to continue"),
        ("run/config.yaml", b"", "delete the file to continue"),
        ("run/config.yaml", b"seed: \xff", "delete the file to continue"),
        ("mine.jinja", b"{{ '\xff' }}", "expected text in UTF-8"),
    ],
)
def test_unreadable_file_is_named_with_the_remedy(base_model, tmp_path, capsys, broken, content, remedy):
    shutil.copytree(base_model, tmp_path / "model")
    if broken == "run/config.yaml":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    (tmp_path / broken).write_bytes(content)
    arguments = (f"model.path={tmp_path / 'model'}", f"model.chat_template={tmp_path / 'mine.jinja'}")

    assert main("gsm8k-sft", [*arguments, f"run_dir={tmp_path / 'run'}", "recover.every=1", "--dry-run"]) == 2

    err = capsys.readouterr().err
    assert (tmp_path / broken).name in err
    assert remedy in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_plain_template_renders_turns_and_learns_end_of_completions(base_model):
    tokenizer = load_tokenizer(ModelConfig(str(base_model), chat_template="plain"))
    renderer = ChatRenderer(tokenizer)
    end = tokenizer.eos_token

    ids, mask = renderer.render_sft([{"role": "system", "content": "Be brief."}, *CHAT])

    assert tokenizer.decode(ids) == f"Be brief.\n\nUser: 2+2?\n\nAssistant: It is 4.{end}\n\n"
    assert tokenizer.decode([i for i, learned in zip(ids, mask, strict=True) if learned]) == f" It is 4.{end}"
    prompt = renderer.render(CHAT[:1])
    assert tokenizer.decode(prompt) == "User: 2+2?\n\nAssistant:"
    assert ids[-len(prompt) :] != prompt
    extended = renderer.append_turn(ids[: len(ids) - len(tokenizer.encode("\n\n"))], CHAT[:1])
    assert tokenizer.decode(extended).endswith(f"4.{end}\n\nUser: 2+2?\n\nAssistant:")


def test_plain_template_begins_with_bos_if_the_tokenizer_adds_it(base_model, tmp_path):
    tokenizer = load_tokenizer(ModelConfig(str(base_model)))
    tokenizer.bos_token = tokenizer.pad_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)

    tokenizer = load_tokenizer(ModelConfig(str(tmp_path), chat_template="plain"))

    ids = ChatRenderer(tokenizer).render(CHAT[:1])
    assert ids == tokenizer.encode("User: 2+2?\n\nAssistant:")
    assert ids[0] == tokenizer.bos_token_id


def test_save_tokenizer_keeps_the_models_end_tokens(base_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(base_model, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))

    save_tokenizer(ModelConfig(str(model), chat_template="plain"), tmp_path / "saved")

    saved = load_tokenizer(ModelConfig(str(tmp_path / "saved")))
    assert ChatRenderer(saved).stop_ids == (saved.eos_token_id, 5, 6)


def test_chat_template_of_a_file_is_used_and_saved(base_model, tmp_path, capsys):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}")
    arguments = [f"model.path={base_model}", f"model.chat_template={file}"]

    assert main("gsm8k-sft", [*arguments, "--dry-run"]) == 0

    config = gsm8k_grpo.APP.config(arguments)
    run = Run(config, layout_of(config.allocation, "required"), tmp_path, "cpu")
    save_tokenizer(config.model, run.tokenizer)
    shutil.copy(base_model / "config.json", tmp_path / "tokenizer")
    saved = load_tokenizer(ModelConfig(run.tokenizer))
    assert saved.apply_chat_template(CHAT[:1], tokenize=False) == f"<user>2+2?{saved.eos_token}"


@pytest.mark.slow
def test_vision_model_has_a_processor_with_the_configured_template(tmp_path):
    pytest.importorskip("torchvision")
    model = make_vision_model("qwen2_vl", tmp_path / "model")
    template = "{% for m in messages %}{% for p in m.content %}"
    template += "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{{ eos_token }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    parts = [image_part(read_image(PIL.Image.new("RGB", (16, 16)))), {"type": "text", "text": "What?"}]

    save_tokenizer(ModelConfig(str(model), chat_template=str(tmp_path / "mine.jinja")), tmp_path / "saved")

    saved = read_tokenizer(tmp_path / "saved")
    assert type(saved) is type(read_tokenizer(model))
    rendered = saved.tokenizer.decode(ChatRenderer(saved).render([{"role": "user", "content": parts}]))
    assert rendered == "<|image_pad|>" * 4 + f"What?{saved.tokenizer.eos_token}"
