"""Critics and reward models: one value per token instead of log-probs."""

import json
from pathlib import Path

import pytest
import torch
from fsdp_toys import (
    EPS,
    VOCABULARY,
    loss_weight_fn,
    make_batch,
    make_classifier,
    make_engine,
    make_model,
    value_loss_fn,
    values_of,
    weights_of,
)

from rl_contracts.batch.trajectory import select
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ModelError
from rl_contracts.models.config_files import pad_token_id
from rl_contracts.testing import make_tiny_tokenizer
from rl_contracts.testing.chat_formats import make_chat_tokenizer
from rl_engines_fsdp.model import attention


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("classifier"), pad_token_id=VOCABULARY - 1)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("language-model"))


def plain_model(path):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")


def plain_values(model, batch, head):
    """Apply decoder and head of transformers to one sequence at a time: [B, T], with gradients."""
    padded_values = []
    for index in range(len(batch)):
        ids = batch["input_ids"][index][batch["attention_mask"][index]]
        values = model.score(model.model(ids[None], use_cache=False)[0][0])[:, 0]
        if head == "value":
            values = torch.cat([torch.zeros(1), values[:-1]])
        padded_values.append(torch.nn.functional.pad(values, (0, batch["input_ids"].shape[1] - len(ids))))
    return torch.stack(padded_values)


@pytest.mark.parametrize(("family", "head"), [("Qwen3", "value"), ("Gemma2", "score")])
def test_forward_of_scalar_head_equals_plain_transformers(family, head, tmp_path):
    path, batch = make_classifier(tmp_path, family), make_batch()
    expected = plain_values(plain_model(path), batch, head).detach()

    actual = make_engine(path, head=head).forward(batch, values_of)

    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert (expected[batch["attention_mask"]] != 0).sum() >= batch["attention_mask"].sum() - len(batch)


def test_train_batch_of_critic_equals_one_step_of_plain_torch(classifier):
    batch, model = make_batch(), plain_model(classifier)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    errors = (plain_values(model, batch, "value") - batch["advantages"]).square() * batch["loss_mask"]
    loss = errors.sum() / batch["loss_mask"].sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    engine = make_engine(classifier, head="value", micro_batch=30)

    result = engine.train_batch(batch, value_loss_fn, loss_weight_fn)

    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    weights = weights_of(engine)
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=1e-5, rtol=1e-5)


def test_scalar_head_has_zero_logprobs_and_entropy_without_gradient(classifier):
    recorded = []

    def recording_loss_fn(outputs, packed):
        recorded.append((outputs.logprobs, outputs.entropy, packed.num_tokens))
        return value_loss_fn(outputs, packed)

    make_engine(classifier, head="value").train_batch(make_batch(), recording_loss_fn, loss_weight_fn)

    for logprobs, entropy, tokens in recorded:
        for zeros in (logprobs, entropy):
            assert not zeros.requires_grad
            assert torch.equal(zeros, torch.zeros(tokens))


@pytest.mark.slow
def test_new_scalar_head_starts_at_zero_and_trains_decoder(language_model):
    engine, batch = make_engine(language_model, head="value"), make_batch()
    before = weights_of(engine)
    assert torch.equal(before["score.weight"], torch.zeros(1, 32))
    assert (engine.forward(batch, values_of) == 0).all()

    losses = [engine.train_batch(batch, value_loss_fn, loss_weight_fn)["loss"] for _ in range(8)]

    assert losses[-1] < 0.9 * losses[0]
    after = weights_of(engine)
    assert (after["score.weight"] != 0).all()
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def test_train_batch_in_bfloat16_is_close_to_float32(classifier):
    results = [
        make_engine(classifier, head="score", dtype=dtype).train_batch(make_batch(), value_loss_fn, loss_weight_fn)
        for dtype in ("float32", "bfloat16")
    ]

    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=0.05)
    assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=0.1)


# ---- saving and loading


def test_save_hf_of_scalar_head_scores_padded_sequences_equally(language_model, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    make_tiny_tokenizer().save_pretrained(tokenizer)  # pads with 0
    engine, batch = make_engine(language_model, head="score"), make_batch()
    batch["input_ids"].clamp_(min=1)
    engine.train_batch(batch, value_loss_fn, loss_weight_fn)

    engine.save(SaveLoadMeta(str(tmp_path / "saved"), tokenizer_path=str(tokenizer)))

    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["architectures"], config["pad_token_id"]) == (["Qwen3ForSequenceClassification"], 0)
    assert list(config["id2label"].values()) == ["LABEL_0"]
    padded = batch["input_ids"].where(batch["attention_mask"], 0)
    with torch.no_grad():
        actual = plain_model(tmp_path / "saved")(padded, attention_mask=batch["attention_mask"].long()).logits[:, 0]
    last = batch["attention_mask"].sum(-1) - 1
    expected = engine.forward(batch, values_of)[torch.arange(len(batch)), last]
    assert (expected != 0).all()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_save_hf_pad_token_differs_from_end_of_conversation(language_model, tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    engine, batch = make_engine(language_model, head="score"), make_batch()
    engine.train_batch(batch, value_loss_fn, loss_weight_fn)
    sequences = [[5, 6, 7, tokenizer.eos_token_id], [8, tokenizer.eos_token_id]]

    engine.save(SaveLoadMeta(str(tmp_path / "saved"), tokenizer_path=str(tmp_path / "tokenizer")))

    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    padded = saved.pad({"input_ids": sequences}, return_tensors="pt")
    with torch.no_grad():
        actual = plain_model(tmp_path / "saved")(**padded).logits[:, 0]
    batch = select(batch, [0, 1])
    for index, ids in enumerate(sequences):
        batch["attention_mask"][index] = torch.arange(batch["input_ids"].shape[1]) < len(ids)
        batch["input_ids"][index, : len(ids)] = torch.tensor(ids)
    values = engine.forward(batch, values_of)
    expected = torch.stack([values[index, len(ids) - 1] for index, ids in enumerate(sequences)])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_pad_token_without_closing_token_is_not_end_token(tmp_path):
    tokenizer = make_chat_tokenizer("glm45")
    tokenizer.save_pretrained(tmp_path)

    assert pad_token_id(None, None, str(tmp_path)) not in (None, tokenizer.eos_token_id)


def test_save_hf_without_pad_token_logs_warning(language_model, tmp_path, caplog):
    make_engine(language_model, head="score").save(SaveLoadMeta(str(tmp_path / "saved")))

    assert "tokenizer_path" in caplog.text
    assert plain_model(tmp_path / "saved")(torch.tensor([[1, 2, 3]])).logits.shape == (1, 1)


@pytest.mark.slow
def test_save_hf_of_scalar_head_reloads_bitwise(language_model, tmp_path):
    engine, batch = make_engine(language_model, head="value"), make_batch()
    for _ in range(2):
        engine.train_batch(batch, value_loss_fn, loss_weight_fn)
    path = str(tmp_path / "saved")
    engine.save(SaveLoadMeta(path))

    fresh, other = make_engine(path, head="value"), make_engine(language_model, head="value")
    other.load(SaveLoadMeta(path))

    weights, values = weights_of(engine), engine.forward(batch, values_of)
    for loaded in (fresh, other):
        assert all(torch.equal(value, weights[name]) for name, value in weights_of(loaded).items())
        torch.testing.assert_close(loaded.forward(batch, values_of), values, atol=1e-6, rtol=1e-6)


def test_load_of_language_model_into_critic_is_rejected(language_model):
    engine = make_engine(language_model, head="value")

    with pytest.raises(ModelError, match=r"score\.weight"):
        engine.load(SaveLoadMeta(language_model))


# ---- rejected models


def test_head_that_does_not_fit_the_model_is_rejected(classifier, tmp_path):
    with pytest.raises(ModelError, match=r"Qwen3ForSequenceClassification.*head=value or head=score"):
        make_engine(classifier)
    with pytest.raises(ModelError, match="found 3 labels"):
        make_engine(make_classifier(tmp_path / "labels", num_labels=3), head="score")
    with pytest.raises(ModelError, match="cannot load the weights"):
        make_engine(make_model(tmp_path / "no-classifier", "Cohere"), head="value")


def test_scalar_head_with_missing_decoder_weights_is_rejected(tmp_path):
    from safetensors.torch import load_file, save_file

    file = Path(make_model(tmp_path), "model.safetensors")
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ModelError, match="up_proj"):
        make_engine(str(tmp_path), head="value")


def test_scalar_head_with_layers_that_mix_sequences_is_rejected(classifier, monkeypatch):
    original = attention.packed_attention

    def mixing(module, query, key, value, mask, packed=None, **kwargs):
        one_segment = attention.Segments((query.shape[2],), torch.tensor([0, query.shape[2]]))
        return original(module, query, key, value, mask, packed=one_segment, **kwargs)

    monkeypatch.setattr(attention, "packed_attention", mixing)
    with pytest.raises(ModelError, match="layers mix packed sequences"):
        make_engine(classifier, head="score")
    monkeypatch.undo()
    attention.register()


# ---- two ranks


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_critic_on_two_ranks_trains_and_resumes_as_on_one_rank(classifier, tmp_path):
    from safetensors.torch import load_file

    from rl_contracts.testing.processes import run_ranks

    run_ranks(Path(__file__).with_name("fsdp_head_ranks.py"), [classifier, str(tmp_path)], 2)

    engine = make_engine(classifier, head="value")
    expected = [engine.train_batch(make_batch(seed=s), value_loss_fn, loss_weight_fn) for s in range(2)]
    for rank in range(2):
        report = json.loads((tmp_path / f"report-{rank}.json").read_text())
        for actual, step in zip(report["steps"], expected, strict=True):
            assert actual == pytest.approx(step, rel=1e-5)
        assert report["after loading"] == report["after saving"]
        actual = load_file(tmp_path / f"weights-{rank}.safetensors")
        for name, value in weights_of(engine).items():
            torch.testing.assert_close(actual[name], value, atol=3e-6, rtol=1e-5)
    saved = make_engine(str(tmp_path / "hf"), head="value")
    torch.testing.assert_close(saved.forward(make_batch(), values_of), engine.forward(make_batch(), values_of))
    engine.load(SaveLoadMeta(str(tmp_path / "state"), kind="state"))
    actual = engine.train_batch(make_batch(seed=2), value_loss_fn, loss_weight_fn)
    assert actual == pytest.approx(json.loads((tmp_path / "report-0.json").read_text())["after saving"], rel=1e-5)
