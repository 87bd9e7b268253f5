"""What train engines have in common: joining ranks, micro-batches, sums and usage of a step, log-probs of a
vocabulary."""
