import inspect
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fsdp_toys import ATTENTION_FAMILIES, logprobs_of, make_batch, make_engine, make_model

from rl_contracts.errors import ModelError
from rl_contracts.testing.families import make_family
from rl_engines_fsdp.model import attention

SUPPORTED = [
    *ATTENTION_FAMILIES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("Phi", "Granite", "Cohere", "Qwen3Moe")),
]


def plain_logprobs_and_entropy(path: str, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probs and entropy with transformers, one sequence at a time: [B, T]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    logprobs, entropy = torch.zeros(2, *batch["input_ids"].shape)
    for index in range(len(batch)):
        ids = batch["input_ids"][index][batch["attention_mask"][index]]
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, :-1].float() / batch["temperature"][index]
        distribution = logits.log_softmax(-1)
        logprobs[index, 1 : len(ids)] = distribution.gather(1, ids[1:, None])[:, 0]
        entropy[index, 1 : len(ids)] = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropy


@pytest.mark.guarantee(
    "Packing does not change results: log-probs equal those of transformers on each sequence alone.", area="layout"
)
@pytest.mark.parametrize("family", SUPPORTED)
def test_forward_equals_plain_transformers_per_sequence(family, tmp_path):
    path, batch = make_model(tmp_path, family), make_batch()
    expected_logprobs, expected_entropy = plain_logprobs_and_entropy(path, batch)

    engine = make_engine(path)

    torch.testing.assert_close(engine.forward(batch, logprobs_of), expected_logprobs, atol=1e-5, rtol=1e-5)
    entropy = engine.forward(batch, lambda outputs, packed: outputs.entropy)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_forward_with_one_changed_sequence_keeps_the_others(family, tmp_path):
    engine, batch = make_engine(make_model(tmp_path, family), micro_batch=10_000), make_batch()
    before = engine.forward(batch, logprobs_of)

    changed = batch.clone()
    changed["input_ids"][4] = (changed["input_ids"][4] + 1) % 50
    after = engine.forward(changed, logprobs_of)

    assert not torch.equal(before[4], after[4])
    unchanged = [index for index in range(len(batch)) if index != 4]
    torch.testing.assert_close(after[unchanged], before[unchanged], atol=0, rtol=0)


def test_forward_does_not_depend_on_micro_batch_size(tmp_path):
    path, batch = make_model(tmp_path), make_batch()

    results = [make_engine(path, micro_batch=size).forward(batch, logprobs_of) for size in (19, 40, 10_000)]

    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", r"expected weights .*found config.json, generation_config.json"),
        ("config.json", r"expected config.json, found .*model.safetensors"),
        ("", "found nothing there"),
    ],
)
def test_initialize_with_incomplete_directory_lists_its_files(missing, message, tmp_path):
    path = make_model(tmp_path) if missing else str(tmp_path / "nowhere")
    Path(path, missing).unlink(missing_ok=not missing)

    with pytest.raises(ModelError, match=message):
        make_engine(path)


def test_initialize_with_missing_weights_is_rejected(tmp_path):
    from safetensors.torch import load_file, save_file

    file = Path(make_model(tmp_path), "model.safetensors")
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ModelError, match="up_proj"):
        make_engine(str(tmp_path))


def fake_varlen_attn(q, k, v, edges, edges_k, longest, longest_k, *, scale, window_size, enable_gqa=False):
    """Replace torch's `varlen_attn` on a CPU, one segment at a time: [N, heads, D], with one head size."""
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise ValueError(f"expected one head size, got {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}")
    window = None if window_size[0] < 0 else window_size[0] + 1
    segments = (tuple(t[start:end].transpose(0, 1)[None] for t in (q, k, v)) for start, end in pairwise(edges.tolist()))
    pieces = [attention._one_segment(*segment, scale, window, None, None)[0].transpose(0, 1) for segment in segments]
    return torch.cat(pieces)


@pytest.fixture
def cuda_branch(monkeypatch):
    """Run the CUDA branch of attention on a CPU in float64, with a fake kernel."""
    all_segments = attention._all_segments

    def on_cuda(query, key, value, *rest):
        with patch.object(torch.Tensor, "is_cuda", True):
            return all_segments(query.double(), key.double(), value.double(), *rest).to(query.dtype)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn)
    monkeypatch.setattr(attention, "_all_segments", on_cuda)
    attention._varlen.cache_clear()
    yield
    attention._varlen.cache_clear()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_cuda_attention_branch_equals_the_cpu_branch(family, tmp_path, request):
    engine, batch = make_engine(str(make_family(tmp_path, family))), make_batch()
    expected = engine.forward(batch, logprobs_of)

    request.getfixturevalue("cuda_branch")
    actual = engine.forward(batch, logprobs_of)

    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.usefixtures("cuda_branch")
def test_cuda_attention_branch_reads_the_kernel_signature_once(monkeypatch):
    signature, calls = inspect.signature, []
    monkeypatch.setattr(inspect, "signature", lambda *args: calls.append(args) or signature(*args))
    query, key = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)
    segments = attention.Segments((7,), torch.tensor([0, 7], dtype=torch.int32))

    for _layer in range(3):
        attention._all_segments(query, key, key, segments, 0.5, None, None, None)

    assert calls == [(fake_varlen_attn,)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
@pytest.mark.parametrize(("window", "value_size"), [(None, 64), (5, 64), (None, 32)])
def test_varlen_attention_on_cuda_equals_one_segment_at_a_time(window, value_size):
    lengths = (7, 19, 3)
    edges = torch.tensor([0, 7, 26, 29], dtype=torch.int32, device="cuda")
    query, key, value = (torch.randn(1, h, 29, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))

    value = value[..., :value_size]
    actual = attention._varlen_attention(query, key, value, attention.Segments(lengths, edges), 0.125, window)

    pieces = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    expected = torch.cat([attention._one_segment(q, k, v, 0.125, window, None, None) for q, k, v in pieces], dim=2)
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=2e-2, rtol=2e-2)
