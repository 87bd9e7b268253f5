"""Pure functions: tensors in, tensors or sums out. No engine, no logging, no state. In the order in which a batch meets
them:

- `rewards`: what becomes of an episode's reward, and on which token it lies.
- `advantages`: normalisation over groups and batches, generalized advantage estimation.
- `aggregation`: the weight of each token, and the denominator.
- `terms`: what a policy loss is given; `policy_losses`: clip, importance, reinforce, cispo, sapo.
- `correction`: between the policy that sampled and the one that learns: weights, masks, interpolated log-probs.
- `kl`: how far two policies are apart.
- `other_losses`: cross entropy, pairs (reward model, DPO, IPO), values.

A formula stands once, with its paper, in the docstring of the function that computes it.
"""
