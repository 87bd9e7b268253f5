"""Rows that share a micro-batch do not see each other, also through sliding windows."""

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


def with_other_neighbours(batch):
    """The batch with other tokens in all rows but the middle one."""
    changed = batch.clone()
    for row in (0, 2):
        changed["input_ids"][row] = changed["input_ids"][row] % (VOCABULARY - 1) + 1
    return changed


def as_one_row(attend):
    """Attention with the fault: the rows of a micro-batch are taken for one."""

    def attend_to_all(self, *tensors, packed_seq_params, **kwargs):
        joined = replace(packed_seq_params, lengths=(sum(packed_seq_params.lengths),))
        return attend(self, *tensors, packed_seq_params=joined, **kwargs)

    return attend_to_all


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_row_between_others_is_said_the_same_whatever_they_are_and_another_mask_is_seen(tmp_path, monkeypatch, family):
    path = make_models(tmp_path, {family: MODELS[family]}) / family
    batch = make_batch(3, vocab_size=VOCABULARY, lengths=(12, 20))
    engine = MegatronEngine()
    engine.initialize(FinetuneSpec(str(path), 1, device="cpu", optimizer=None))

    one, other = logprobs(engine, batch), logprobs(engine, with_other_neighbours(batch))

    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0], other[0])
    from rl_engines_megatron.model.attention import PackedAttention

    monkeypatch.setattr(PackedAttention, "forward", as_one_row(PackedAttention.forward))
    one, other = logprobs(engine, batch), logprobs(engine, with_other_neighbours(batch))
    assert (one[1] - other[1]).abs().max() > 1e-2
    engine.destroy()
