"""The policy that learns, with the other models that its algorithm asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_apps.app import Run
from rl_apps.config import GRPOConfig
from rl_apps.model import check_model
from rl_apps.parts import Closing, make_engine

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine
    from rl_trainers import PolicyActor


def check_algorithm(run: Run[GRPOConfig]) -> list[str]:
    """Refuse parts that are not installed or cannot be composed, and other models that are not there; what else is
    loaded, in words.

    Raises:
        ConfigError: a part of the algorithm, or its constants.
        ModelError: the path of the reference or the critic.
    """
    from rl_trainers.objective import make_policy_loss

    config = run.config
    make_policy_loss(config.algorithm, config.actor.minibatches)
    lines = []
    for needed, name, setting, model, spec in (
        (config.algorithm.needs_reference, "reference policy", "ref.path", config.ref, config.reference_spec()),
        (config.algorithm.needs_critic, "critic", "critic.path", config.critic, config.critic_spec()),
    ):
        if needed:
            check_model(spec.model_path, setting)
            model.engine.check(run.layout.actor.strategy, replace(spec, device=run.device))
            lines.append(f"a {name} beside the policy, from {spec.model_path}")
    return lines


def make_actor(stack: Closing, run: Run[GRPOConfig], engine: TrainEngine) -> PolicyActor:
    """The learner of the run: the policy in `engine`, and a reference and a critic where the algorithm has them."""
    from rl_trainers import Critic, PolicyActor

    config = run.config
    algorithm, minibatches = config.algorithm, config.actor.minibatches
    reference = critic = None
    if algorithm.needs_reference:
        reference = stack.add(make_engine(run, config.ref.engine, config.reference_spec()))
    if algorithm.needs_critic:
        values = stack.add(make_engine(run, config.critic.engine, config.critic_spec()))
        critic = Critic(values, config.critic.clip, minibatches)
    return PolicyActor(engine, algorithm, minibatches, reference, critic)
