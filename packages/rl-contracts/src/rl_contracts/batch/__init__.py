"""Trajectory batches: build, pack, cut into minibatches, exchange between ranks."""
