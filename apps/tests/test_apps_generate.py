"""`rl generate` with a tiny random model: prompts, conversations and error messages."""

import io
import json
import shutil

import pytest

from rl_apps.cli.generate import ChatSession, model_of
from rl_apps.cli.main import main
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import GenerationConfig
from rl_contracts.errors import DataError
from rl_contracts.testing.models import make_tiny_model, make_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=1, hidden=32)


def _greedy(model, ids, limit):
    """Return the greedy continuation that transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM

    output = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor([ids]), max_new_tokens=limit, do_sample=False, eos_token_id=[2, 0], pad_token_id=0
    )
    return output[0].tolist()


def test_generate_two_greedy_turns_match_transformers_token_by_token(model):
    renderer = ChatRenderer(make_tiny_tokenizer())
    session = ChatSession(model, GenerationConfig(temperature=0, max_new_tokens=12))
    first, second = "2 + 3?", "and 4?"

    completion = "".join(session.ask(first))
    prompt = renderer.render([{"role": "user", "content": first}])
    expected = _greedy(model, prompt, 12)
    assert session.ids == expected
    assert completion == renderer.decode_completion(expected[len(prompt) :]).rstrip("\ufffd")

    list(session.ask(second))
    assert session.ids == _greedy(model, renderer.append_turn(expected, [{"role": "user", "content": second}]), 12)


def test_generate_sampled_completion_depends_on_seed(model, capsys):
    def generate(*options):
        command = ["generate", str(model), "--prompt", "hello", "--max-new-tokens", "16", "--device", "cpu"]
        assert main([*command, *options]) == 0
        return capsys.readouterr().out

    assert generate("--seed", "1") == generate("--seed", "1")
    assert len({generate("--seed", str(seed)) for seed in range(3)}) == 3
    assert generate("--temperature", "0") == generate("--temperature", "0")
    assert generate("--top-p", "1e-6") == generate("--temperature", "0")


def test_generate_conversation_reads_one_line_per_turn(model, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (2, 10):
        shutil.copytree(model, run / "checkpoints" / f"step_{step}")
    assert model_of(run) == run / "checkpoints" / "step_10"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    assert main(["generate", str(run), "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def test_generate_conversation_beyond_context_raises_data_error(model):
    session = ChatSession(model, GenerationConfig(max_new_tokens=4))
    with pytest.raises(DataError, match=r"no completion fits .* 2048"):
        list(session.ask("a" * 2048))


@pytest.mark.parametrize(
    ("directory", "options", "message"),
    [
        ("nowhere", (), "expected the directory of a run, a checkpoint or a Hugging Face model"),
        ("empty-run", (), "expected a run with a checkpoint, found none"),
        ("scorer", (), "expected a model that generates text, found Qwen3ForSequenceClassification"),
        ("mute", (), "expected a tokenizer with a chat template"),
        ("tiny", ("--temperature", "-1"), "generation.temperature: expected 0 (greedy)"),
    ],
)
def test_generate_invalid_model_or_option_reports_one_line(model, directory, options, message, tmp_path, capsys):
    (tmp_path / "empty-run").mkdir()
    (tmp_path / "empty-run" / "config.yaml").write_text("seed: 1\n")
    for name in ("scorer", "mute", "tiny"):
        shutil.copytree(model, tmp_path / name)
    config = json.loads((model / "config.json").read_text())
    scorer = config | {"architectures": ["Qwen3ForSequenceClassification"]}
    (tmp_path / "scorer" / "config.json").write_text(json.dumps(scorer))
    (tmp_path / "mute" / "chat_template.jinja").unlink()

    assert main(["generate", str(tmp_path / directory), "--prompt", "hello", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
