"""Pure functions on tensors, without engine, logging or state.

The modules, in the order in which a batch uses them:

- `reward_shaping`: shaping of an episode's reward, and its assignment to a token.
- `advantages`: normalization over groups and batches, and generalized advantage estimation.
- `aggregation`: the weight of each token, and the denominator.
- `policy_terms`: the input of a policy loss; `policy_losses`: clip, importance, reinforce, cispo, sapo.
- `correction`: weights, masks and interpolated log-probs for the difference between sampling and learning policy.
- `kl`: estimates of the divergence between two policies.
- `value_and_preference_losses`: cross entropy, preference pairs (reward model, DPO, IPO) and values.

Each formula and its source are in the docstring of the function that computes it.
"""
