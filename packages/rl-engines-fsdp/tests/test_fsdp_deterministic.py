"""The deterministic engine: a row's numbers are its own, and a step is the same to the last bit."""

import torch
from fsdp_toys import logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of

from rl_contracts.batch.trajectory import select


def test_forward_of_a_row_alone_has_the_bits_that_it_has_in_a_batch(tmp_path):
    engine, batch = make_engine(make_model(tmp_path), micro_batch=10_000, deterministic=True), make_batch()
    try:
        whole = engine.forward(batch, logprobs_of)
        for row in range(len(batch)):
            alone = engine.forward(select(batch, [row]), logprobs_of)[0]
            assert torch.equal(whole[row, : len(alone)], alone)
    finally:
        engine.destroy()


def test_loss_sees_the_bits_that_forward_gives(tmp_path):
    engine, batch = make_engine(make_model(tmp_path), micro_batch=10_000, deterministic=True), make_batch()
    batch["forward"] = engine.forward(batch, logprobs_of)
    differences = []

    def comparing(outputs, packed):
        differences.append((outputs.logprobs.detach() - packed["forward"]).abs().max())
        return loss_fn(outputs, packed)

    try:
        engine.train_batch(batch, comparing, loss_weight_fn)
    finally:
        engine.destroy()
    assert len(differences) == len(batch), "each row is a micro-batch of its own"
    assert max(differences) == 0


def test_step_taken_twice_gives_the_same_bits(tmp_path):
    path, found = make_model(tmp_path), []
    for _ in range(2):
        engine = make_engine(path, deterministic=True)
        stats = engine.train_batch(make_batch(), loss_fn, loss_weight_fn)
        found.append((stats, weights_of(engine)))
        engine.destroy()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def test_destroy_gives_torch_back_as_it_was(tmp_path):
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    engine = make_engine(make_model(tmp_path), deterministic=True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (True, 1)
    engine.destroy()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before
