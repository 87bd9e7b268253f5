"""Compute advantages and a clipped policy loss without the training loop of rl, and compare with values by hand."""

import sys
from importlib.util import find_spec

import torch

from rl_trainers.algorithms.functional.advantages import group_by_id, normalize
from rl_trainers.algorithms.functional.aggregation import denominator, token_weights
from rl_trainers.algorithms.functional.policy_losses import clip_loss
from rl_trainers.algorithms.functional.policy_terms import policy_terms

rewards, prompts = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1])
groups = group_by_id(rewards, prompts)
advantages = normalize(rewards, groups, groups)
# the first group has a mean of 0.5 and a sample deviation of 1 / sqrt(3); all rewards of the second are equal
torch.testing.assert_close(advantages, torch.tensor([1, -1, -1, 1, 0, 0]) * 3**0.5 / 2, rtol=1e-5, atol=0)

# two completions of two tokens; the last token is not trained; ratios 1.5, 0.9, 0.5 with advantages 1, 1, -1
mask = torch.tensor([[True, True], [True, False]])
ratio = torch.tensor([1.5, 0.9, 0.5, 1.0])
old = torch.full((4,), -1.0)
logprobs = (old + ratio.log()).requires_grad_()
terms = policy_terms(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), mask.flatten())
losses, clipped = clip_loss(terms, clip_low=0.2, clip_high=0.28)
loss = (losses * token_weights(mask, "token_mean").flatten()).sum() / denominator(mask, "token_mean")
loss.backward()

# 1.5 is clipped to 1.28 and 0.5 to 0.8, both without gradient; 0.9 is not clipped, its gradient is -ratio A / 3
torch.testing.assert_close(loss.detach(), torch.tensor((-1.28 - 0.9 + 0.8) / 3))
torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.3, 0.0, 0.0]))
assert clipped["clip/high"].tolist() == [True, False, False, False]
assert clipped["clip/low"].tolist() == [False, False, True, False]

unexpected = [name for name in ("ray", "transformers", "aiohttp", "datasets", "rl_inference") if find_spec(name)]
assert not unexpected, f"this environment must not have {', '.join(unexpected)}"
loaded = [name for name in ("tensordict", "numba", "safetensors") if name in sys.modules]
assert not loaded, f"the losses must only import torch, found {', '.join(loaded)}"
