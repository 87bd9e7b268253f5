"""The gap gate: do servers and trainer compute the same log-probs from the weights that both should hold?

`gate` compares at every step, `experiments` are the measurements, `divergence` the sums that they give, `diagnosis`
turns them into causes.
"""
