"""Advantages and a clipped policy loss in a training loop of one's own, with gradients worked out by hand."""

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
# the first group has a mean of 0.5 and a sample deviation of 1 / sqrt(3); the second teaches nothing
torch.testing.assert_close(advantages, torch.tensor([1, -1, -1, 1, 0, 0]) * 3**0.5 / 2, rtol=1e-5, atol=0)

# two answers of two tokens, of which the last was not sampled; ratios 1.5, 0.9, 0.5 under advantages 1, 1, -1
mask = torch.tensor([[True, True], [True, False]])
ratio = torch.tensor([1.5, 0.9, 0.5, 1.0])
old = torch.full((4,), -1.0)
logprobs = (old + ratio.log()).requires_grad_()
terms = policy_terms(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), mask.flatten())
losses, marks = clip_loss(terms, clip_low=0.2, clip_high=0.28)
loss = (losses * token_weights(mask, "token_mean").flatten()).sum() / denominator(mask, "token_mean")
loss.backward()

# 1.5 is clipped to 1.28 and 0.5 to 0.8, both without gradient; 0.9 is not, and its gradient is -ratio A / 3
torch.testing.assert_close(loss.detach(), torch.tensor((-1.28 - 0.9 + 0.8) / 3))
torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.3, 0.0, 0.0]))
assert marks["clip/high"].tolist() == [True, False, False, False]
assert marks["clip/low"].tolist() == [False, False, True, False]

heavy = [name for name in ("ray", "transformers", "aiohttp", "datasets", "rl_inference") if find_spec(name)]
assert not heavy, f"expected an environment without {', '.join(heavy)}"
loaded = [name for name in ("tensordict", "numba", "safetensors") if name in sys.modules]
assert not loaded, f"expected losses that import torch alone, found {', '.join(loaded)}"
