"""Isolation of sequences that share a micro-batch, also with sliding windows."""

from dataclasses import replace

import pytest
import torch
from test_megatron_families import MODELS, make_models

from rl_contracts.data import FinetuneSpec
from rl_contracts.testing import make_batch
from rl_engines_megatron import MegatronEngine

VOCABULARY = 97


def logprobs(engine, batch):
    return engine.forward(batch, lambda outputs, packed: outputs.logprobs)


def with_other_neighbors(batch):
    """Return the batch with other tokens in all sequences except the middle one."""
    changed = batch.clone()
    for row in (0, 2):
        changed["input_ids"][row] = changed["input_ids"][row] % (VOCABULARY - 1) + 1
    return changed


def attend_across_sequences(attend):
    """Return attention with an injected fault: the sequences of a micro-batch are treated as one."""

    def attend_to_all(self, *tensors, packed_seq_params, **kwargs):
        joined = replace(packed_seq_params, lengths=(sum(packed_seq_params.lengths),))
        return attend(self, *tensors, packed_seq_params=joined, **kwargs)

    return attend_to_all


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windowed_attention_keeps_packed_sequences_separate(tmp_path, monkeypatch, family):
    path = make_models(tmp_path, {family: MODELS[family]}) / family
    batch = make_batch(3, vocab_size=VOCABULARY, lengths=(12, 20))
    engine = MegatronEngine()
    engine.initialize(FinetuneSpec(str(path), 1, device="cpu", optimizer=None))

    one, other = logprobs(engine, batch), logprobs(engine, with_other_neighbors(batch))

    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0], other[0])
    from rl_engines_megatron.model.attention import PackedAttention

    monkeypatch.setattr(PackedAttention, "forward", attend_across_sequences(PackedAttention.forward))
    one, other = logprobs(engine, batch), logprobs(engine, with_other_neighbors(batch))
    assert (one[1] - other[1]).abs().max() > 1e-2
    engine.destroy()
