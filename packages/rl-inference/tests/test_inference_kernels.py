"""CPU fast paths compared with plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_inference.embedded_server.model import attention_kernel
from rl_inference.embedded_server.model.attention import Scoring, TokenPass, causal
from rl_inference.embedded_server.model.cache import KernelLayer, SlotLayer, TorchLayer
from rl_inference.embedded_server.model.pages import PAGE, PageTable, PrefixIndex


def attend(
    layer: SlotLayer, states: tuple[torch.Tensor, ...], slots: list[int], positions: list[int], scoring: Scoring
) -> torch.Tensor:
    """Feed the tokens, one per sequence, to a layer, and return its attention."""
    span = TokenPass(torch.tensor(slots), torch.tensor(positions), max(positions) + 1, singles=len(slots))
    return layer.attend(*states, span, scoring)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([0, 5, 33]),
    softcap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attend_single_tokens_equals_whole_sequence_in_any_layout(
    lengths: list[int], heads: tuple[int, int], window: int, softcap: float | None, with_sinks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    query_heads, key_heads = heads
    sinks = torch.randn(query_heads) if with_sinks else None
    scoring = Scoring(0.3, window, softcap, sinks)
    slots = torch.randperm(8)[: len(lengths)].tolist()
    sequences = [
        (torch.randn(1, query_heads, n, 8), torch.randn(1, key_heads, n, 8), torch.randn(1, key_heads, n, 8))
        for n in lengths
    ]
    pages = PageTable(8, 4 * PAGE, torch.device("cpu"))
    pages.reset(33)
    for slot in range(8):
        pages.assign(slot, [1 + slot, 9 + slot])
    layers: list[SlotLayer] = [TorchLayer(pages), KernelLayer(pages)]

    last_outputs: dict[int, torch.Tensor] = {}
    for position in range(max(lengths)):
        active = [i for i, n in enumerate(lengths) if position < n]
        states = tuple(torch.cat([sequences[i][k][:, :, position : position + 1] for i in active], 2) for k in range(3))
        outputs = [
            attend(layer, states, [slots[i] for i in active], [position] * len(active), scoring) for layer in layers
        ]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=2e-5)
        last_outputs.update((i, outputs[1][0, row]) for row, i in enumerate(active))

    for i, states in enumerate(sequences):
        expected = causal(*states, scoring)[0, :, -1]
        torch.testing.assert_close(last_outputs[i], expected, rtol=1e-4, atol=2e-5)


def test_exponentials_of_distant_scores_equal_softmax() -> None:
    scores = torch.tensor([0.0, -1e-6, -0.5, -3.25, -50.0, -86.9, -200.0, -1e30])
    weights, bits = scores.numpy().copy(), np.empty(len(scores), np.int32)

    total = attention_kernel._exponentials(weights, bits, len(scores), np.float32(0.0))

    torch.testing.assert_close(torch.from_numpy(weights / total), torch.softmax(scores, 0), rtol=1e-6, atol=1e-30)


def test_attend_on_two_threads_equals_one_thread() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(8, 2, 8, 32).numpy(), torch.randn(8, 2, 32, 8).numpy()
    query, slots, positions = torch.randn(6, 4, 8).numpy(), np.arange(6) % 4, np.arange(6) * 7
    results = []
    for threads in (1, 2):
        out = np.empty_like(query)
        attention_kernel.attend(
            threads,
            query,
            keys,
            values,
            np.arange(8).reshape(4, 2),
            slots,
            positions,
            out,
            np.float32(0.5),
            0,
            np.float32(0),
            np.empty(0, np.float32),
        )
        results.append(out)

    assert np.array_equal(*results)


def test_prefix_index_finds_longest_proper_prefix() -> None:
    index, tokens = PrefixIndex(), list(range(100))
    index.hold(3, tokens)

    assert index.find(tokens) == (3, 99)
    assert index.find([*tokens, 7]) == (3, 100)
    assert index.find([*tokens[:40], 7, 8]) == (3, 32)
    assert index.find(tokens[:64]) == (3, 63)
    assert index.find([9, *tokens]) is None
    index.forget(3)
    assert index.find(tokens) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=100), min_size=2, max_size=6), st.data())
def test_prefix_index_match_is_a_true_prefix(sequences: list[list[int]], data: st.DataObject) -> None:
    index, sequences_by_slot = PrefixIndex(), dict[int, list[int]]()
    for tokens in sequences:
        slot = data.draw(st.integers(0, 3))
        index.hold(slot, tokens)
        sequences_by_slot[slot] = tokens
        query = data.draw(st.sampled_from(sequences)) + data.draw(st.lists(st.integers(0, 2), max_size=5))
        match = index.find(query)
        if match is not None:
            assert 0 <= match[1] < len(query)
            assert sequences_by_slot[match[0]][: match[1]] == query[: match[1]]
