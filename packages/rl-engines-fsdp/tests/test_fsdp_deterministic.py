"""Deterministic engine: results of a sequence do not depend on the batch, and steps are bitwise repeatable."""

import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of

from rl_contracts.batch.trajectory import select


def test_logprobs_of_batch_single_sequence_and_training_are_bitwise_equal(tmp_path):
    engine, batch = make_engine(make_model(tmp_path), micro_batch=10_000, deterministic=True), make_batch()
    differences = []

    def comparing(outputs, packed):
        differences.append((outputs.logprobs.detach() - packed["forward"]).abs().max())
        return loss_fn(outputs, packed)

    try:
        expected = batch["forward"] = engine.forward(batch, logprobs_of)
        for index in range(len(batch)):
            actual = engine.forward(select(batch, [index]), logprobs_of)[0]
            assert torch.equal(expected[index, : len(actual)], actual)
        engine.train_batch(batch, comparing, loss_weight_fn)
    finally:
        engine.destroy()
    assert len(differences) == len(batch), "each sequence must be a separate micro-batch"
    assert max(differences) == 0


def test_train_batch_in_second_engine_is_bitwise_equal(tmp_path):
    path, runs = make_model(tmp_path), []
    for _ in range(2):
        engine = make_engine(path, deterministic=True)
        stats = engine.train_batch(make_batch(), loss_fn, loss_weight_fn)
        runs.append((stats, weights_of(engine)))
        engine.destroy()
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], value) for name, value in runs[1][1].items())


def test_destroy_restores_torch_settings(tmp_path):
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    engine = make_engine(make_model(tmp_path), deterministic=True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (True, 1)
    engine.destroy()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before
