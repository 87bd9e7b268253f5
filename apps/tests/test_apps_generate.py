"""`rl generate` with a tiny model made on the spot: questions, conversations, and what is wrong in a sentence."""

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


def _greedy(model, ids, most):
    """What transformers itself generates."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor([ids]), max_new_tokens=most, do_sample=False, eos_token_id=[2, 0], pad_token_id=0
    )
    return made[0].tolist()


def test_generate_two_greedy_turns_are_those_of_transformers_and_keep_sampled_ids(model):
    renderer = ChatRenderer(make_tiny_tokenizer())
    talk = ChatSession(model, GenerationConfig(temperature=0, max_new_tokens=12))
    first, second = "2 + 3?", "and 4?"

    said = "".join(talk.ask(first))
    prompt = renderer.render([{"role": "user", "content": first}])
    expected = _greedy(model, prompt, 12)
    assert talk.ids == expected
    assert said == renderer.decode_completion(expected[len(prompt) :]).rstrip("\ufffd")

    list(talk.ask(second))
    assert talk.ids == _greedy(model, renderer.append_turn(expected, [{"role": "user", "content": second}]), 12)


def test_generate_sampled_answers_come_again_with_their_seed_alone(model, capsys):
    def answer(*more):
        asked = ["generate", str(model), "--prompt", "hello", "--max-new-tokens", "16", "--device", "cpu"]
        assert main([*asked, *more]) == 0
        return capsys.readouterr().out

    assert answer("--seed", "1") == answer("--seed", "1")
    assert len({answer("--seed", str(seed)) for seed in range(3)}) == 3
    assert answer("--temperature", "0") == answer("--temperature", "0")
    assert answer("--top-p", "1e-6") == answer("--temperature", "0")


def test_generate_a_conversation_of_a_run_reads_a_line_for_each_turn(model, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (2, 10):
        shutil.copytree(model, run / "checkpoints" / f"step_{step}")
    assert model_of(run) == run / "checkpoints" / "step_10"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    assert main(["generate", str(run), "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def test_generate_conversation_longer_than_the_context_is_refused(model):
    talk = ChatSession(model, GenerationConfig(max_new_tokens=4))
    with pytest.raises(DataError, match=r"the model's context 2048: no answer fits"):
        list(talk.ask("a" * 2048))


@pytest.mark.parametrize(
    ("where", "more", "answer"),
    [
        ("nowhere", (), "expected the directory of a run, a checkpoint or a Hugging Face model"),
        ("empty-run", (), "expected a run with a checkpoint, found none"),
        ("half", (), "expected weights (*.safetensors) beside config.json"),
        ("scorer", (), "expected a model that generates text, found Qwen3ForSequenceClassification"),
        ("mute", (), "expected a tokenizer with a chat template"),
        ("tiny", ("--temperature", "-1"), "generation.temperature: expected 0 (greedy)"),
        ("tiny", ("--max-new-tokens", "0"), "generation.max_new_tokens: expected at least 1"),
    ],
)
def test_generate_what_cannot_be_is_said_in_a_sentence(model, where, more, answer, tmp_path, capsys):
    (tmp_path / "empty-run").mkdir()
    (tmp_path / "empty-run" / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "half").mkdir()
    shutil.copy(model / "config.json", tmp_path / "half")
    for name in ("scorer", "mute", "tiny"):
        shutil.copytree(model, tmp_path / name)
    config = json.loads((model / "config.json").read_text())
    scorer = config | {"architectures": ["Qwen3ForSequenceClassification"]}
    (tmp_path / "scorer" / "config.json").write_text(json.dumps(scorer))
    (tmp_path / "mute" / "chat_template.jinja").unlink()

    assert main(["generate", str(tmp_path / where), "--prompt", "hello", *more]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert answer in sentence
