"""Parallel ranks: layout, sharding of models, tensor parallelism, and differentiable collectives."""
