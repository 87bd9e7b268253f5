"""Trajectory batches: build, pack, split into minibatches, exchange between ranks."""
