"""Log-prob gap gate: check that servers and trainer compute the same log-probs from the same weights.

`gate` compares at every step, `experiments` makes the measurements, `divergence` summarizes the differences and
`diagnosis` infers the cause.
"""
