"""What every figure in `metrics.jsonl` means: the one list, of which `docs/figures.md` and `rl figures` are made.

Figures that a reward, workflow, agent or loss of somebody's own records are not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """Of one figure."""

    section: str
    """What it belongs with."""
    unit: str
    """What it counts or is measured in; `-` for what has none."""
    text: str
    """What it is."""


REWARDS = "Rewards"
"""Section of the metrics that reward functions record."""

_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "The record": {
        "step": ("steps", "training step that the record is of; 0: before the first"),
        "version": ("versions", "version of the weights after it: batches that were applied"),
        "timestamp": ("s since 1970", "when the record was written (UTC)"),
        "evaluation": ("true", "stands in records of an evaluation to which no training step belongs, and only there"),
        "metrics/non_finite": ("figures", "of this record that were NaN or infinite, and stand as null"),
    },
    "The batch": {
        "rows": ("rows", "trained on, over all replicas"),
        "tokens/trained": ("tokens", "that a loss was computed of, over all replicas"),
        "reward/mean": ("reward", "mean over the rows of the batch, as the reward function gave it"),
        "reward/std": ("reward", "sample standard deviation over the rows; null with fewer than two"),
        "reward/shaped": (
            "reward",
            "mean over episodes, after what `algorithm.reward` makes of it",
        ),
        "length/mean": ("tokens", "sampled in an episode, mean over episodes"),
        "truncated/fraction": ("fraction of rows", "whose answer was cut off before it ended"),
        "staleness/mean": ("versions", "from a row's oldest token to the trainer's weights, mean over rows"),
        "staleness/max": ("versions", "the same, of the oldest row"),
        "staleness/fraction_<n>": ("fraction of tokens", "trained ones that are n versions old"),
        "staleness/fraction_4_and_more": ("fraction of tokens", "trained ones that are four versions old or more"),
    },
    "Groups and episodes": {
        "groups/trained": ("groups", "in the batch"),
        "groups/singleton": ("groups", "of one episode, whose advantage is 0 where groups are compared"),
        "groups/zero_variance": ("groups", "of several episodes with the same reward, which give no gradient then"),
        "groups/accepted": ("groups", "that became whole since the last record, and wait for a batch or are in it"),
        "groups/rejected": ("groups", "that were filtered out since the last record; others take their place"),
        "groups/rejected/<reason>": ("groups", "of these, for that reason"),
        "groups/failed": ("groups", "that failed since the last record; others take their place"),
        "groups/failed/<boundary>": ("groups", "of these, where the error arose (`reward`, `inference`, ...)"),
        "groups/left_over": ("groups", "dropped because the data of a replica were over; only with the last batch"),
        "groups/outstanding": ("groups", "admitted and not trained on at the time of the record"),
        "groups/staleness_mean": ("versions", "from the start of a group to its batch, mean over the batch's groups"),
        "groups/staleness_max": ("versions", "the same, of the oldest group"),
        "groups/wait_seconds": ("s", "that the trainer waited for groups, summed over replicas"),
        "episodes/failed/<boundary>": ("episodes", "that failed since the last record, where the error arose"),
        "finished/reward_mean": ("reward", "mean over all answers of groups that ended, trained on or not"),
        "finished/length_mean": ("tokens", "generated in such an answer, mean"),
        "finished/truncated_fraction": ("fraction of answers", "of these that were cut off"),
        "tokens/generated": ("tokens", "that episodes received since the last record, trained on or not"),
        "conversation/turns": ("turns", "of an episode, mean"),
        "agent/rows": ("rows", "that an agent's episode became, mean"),
        "agent/turn_rewards": ("rewards", "of single turns that an agent reported in an episode, mean"),
        "agent/<name>": ("-", "a figure that an agent returned or reported, mean over episodes"),
    },
    REWARDS: {
        "code/passed": ("fraction of tests", "passed by the program of a completion, mean over completions"),
        "reward/timeouts": ("programs", "whose tests exceeded their time limit and whose reward is therefore 0"),
    },
    "The policy loss": {
        "loss/policy": ("-", "what was minimised; its value says little, since advantages have mean 0"),
        "loss/aux": ("-", "load-balancing loss of a mixture's routers, without its factor and not in the loss"),
        "ratio/mean": ("-", "pi_theta / pi_old of the trained tokens, mean; 1 at the first minibatch of a step"),
        "ratio/max": ("-", "the largest such ratio"),
        "clip/low": ("fraction of tokens", "for which the clip below 1 decides"),
        "clip/high": ("fraction of tokens", "for which the clip above 1 decides"),
        "clip/dual": ("fraction of tokens", "for which the dual clip decides"),
        "gate/closed": ("fraction of tokens", "whose gradient SAPO's gate has at least halved"),
        "correction/mean": ("-", "weight that corrects for the difference of server and trainer, mean over tokens"),
        "correction/capped": ("fraction of tokens", "whose correction was capped"),
        "correction/masked": ("fraction of tokens", "that the correction or a mask dropped"),
        "weight/effective": ("fraction of tokens", "effective sample size of the weights pi_theta / pi_behaviour"),
        "entropy/mean": ("nats", "entropy of the policy's next-token distribution, mean over trained tokens"),
        "kl/old_k1": ("nats", "KL to the policy at the start of the step, estimator k1, mean over trained tokens"),
        "kl/old_k3": ("nats", "the same, estimator k3, which is never negative"),
        "kl/beh_k1": ("nats", "KL to the policy that generated the tokens, estimator k1"),
        "kl/beh_k3": ("nats", "the same, estimator k3"),
        "kl/ref_k1": ("nats", "KL to the reference policy, estimator k1"),
        "kl/ref_k3": ("nats", "the same, estimator k3"),
    },
    "The critic": {
        "critic/explained_variance": ("-", "of the returns by the values: 1 is all, null where returns do not vary"),
        "critic/value/mean": ("reward", "estimated value, mean over trained tokens"),
        "critic/return/mean": ("reward", "return that it learns, mean over trained tokens"),
        "critic/clip/value": ("fraction of tokens", "for which the clip of the value loss decides"),
        "critic/<name>": ("as <name>", "the same of the critic's own loss and optimizer"),
    },
    "Supervised and preference learning": {
        "loss/train": ("nats or -", "mean loss of the batch: nats per token of cross entropy, or per pair"),
        "loss/eval": ("nats or -", "the same of held-out rows"),
        "logprob/mean": ("nats", "log-prob of a trained token, mean"),
        "pair/accuracy": ("fraction of pairs", "in which the chosen answer is preferred; ties count half"),
        "pair/margin": ("-", "score or implied reward of the chosen answer minus that of the rejected one, mean"),
        "reward/chosen": ("-", "implied reward of chosen answers, mean"),
        "reward/rejected": ("-", "implied reward of rejected answers, mean"),
        "score/mean": ("-", "score that the reward model gives a row, mean"),
    },
    "The optimizer": {
        "loss": ("-", "what was minimised, where it has no other name"),
        "grad_norm": ("-", "global norm of the gradient before clipping, mean over the step's minibatches"),
        "lr": ("-", "learning rate, mean over the step's minibatches"),
        "applied": (
            "fraction of minibatches",
            "that were applied; others had a loss or gradient that is not finite",
        ),
        "tokens": ("tokens", "in the micro-batches of the step, prompts too, over all ranks"),
        "minibatches/empty": ("minibatches", "that had nothing to learn from"),
        "experts/share/max": ("fraction of choices", "of a layer that fell on one expert, the largest"),
        "experts/share/min": ("fraction of choices", "of a layer that fell on one expert, the smallest"),
        "experts/entropy": ("fraction", "entropy of the experts' shares over that of even ones, mean over layers"),
        "experts/dropped": ("fraction of choices", "that went to no expert"),
    },
    "Servers against trainer": {
        "gap/mean_abs": ("nats", "|log-prob of a server - of the trainer| after the commit, mean over compared tokens"),
        "gap/max_abs": ("nats", "the same, the largest"),
        "gap/k3": ("nats", "the KL of the two, estimator k3"),
        "gap/fresh_mean_abs": ("nats", "the same of recorded log-probs that the trainer's own version made, mean"),
        "gap/fresh_max_abs": ("nats", "the same, the largest"),
        "gap/fresh_k3": ("nats", "their KL, estimator k3"),
        "gap/fresh_tokens": ("tokens", "of which that could be said"),
        "gap/lag": ("standard deviations", "evidence that a server serves an older version than it says"),
        "gap/empty": ("comparisons", "of this step that could not be made"),
        "sharing/freed_gib": ("GiB", "that sleeping servers gave back"),
        "server/servers": ("servers", "that live"),
        "server/rejoins": ("servers", "taken back so far"),
        "server/running": ("answers", "being generated, sum over servers"),
        "server/waiting": ("requests", "that wait, sum over servers"),
        "server/generated_tokens": ("tokens", "generated since the start, sum over all servers that there were"),
        "server/busy_seconds": ("s", "in which they generated since the start, sum over all servers that there were"),
    },
    "Evaluation": {
        "eval/accuracy": ("fraction", "of held-out episodes with reward 1, or of held-out pairs that are judged right"),
        "eval/reward": ("reward", "mean over held-out episodes"),
        "eval/rows": ("rows", "held out, which the figures of an evaluation are about"),
        "eval/failed": (
            "answers",
            "to held-out rows without a reward, which count as 0 in `eval/accuracy` and `eval/reward`",
        ),
        "eval/length": ("tokens", "generated in a held-out answer, mean"),
        "eval/margin": ("-", "`pair/margin` of held-out pairs"),
        "eval/<name>": ("as <name>", "what the answers of an evaluation recorded under that name"),
    },
    "Time": {
        "time/step": ("s", "from the end of the step before to the end of this one, without evaluation"),
        "time/rollout_wait": ("s", "of the step spent waiting for a batch"),
        "time/train": ("s", "spent on advantages, log-probs and the update"),
        "time/train_batch": ("s", "of it in forward, backward and optimizer"),
        "time/publish": ("s", "spent until the new weights were committed on the servers"),
        "time/stage": ("s", "from the first tensor sent until all servers had staged the weights"),
        "time/paused": ("s", "for which servers stood still for the commit"),
        "time/gap": ("s", "spent comparing servers and trainer"),
        "time/sleep": ("s", "spent putting servers to sleep and waking them"),
        "time/save": ("s", "for which training was held up by a checkpoint"),
        "time/recover": ("s", "for which training was held up by the recover point before this step"),
        "time/recover_written": ("s", "that a recover point took to be on the disk, in the background"),
        "time/evaluate": ("s", "of the evaluation after the step before"),
        "time/reward": ("s", "that a reward process worked, mean over them"),
        "throughput/trained_tokens_per_s": ("tokens/s", "`tokens/trained` over `time/step`"),
        "throughput/generated_tokens_per_s": ("tokens/s", "`tokens/generated` over `time/step`"),
        "throughput/mfu": ("fraction", "useful FLOPs of training over the devices' peak in `time/train_batch`"),
        "memory/peak_gib": ("GiB", "most memory that rank 0 had so far: of its GPU, or of the process"),
        "checkpoint/failed": ("checkpoints", "that could not be written since the last record"),
        "recover/failed": ("recover points", "that could not be written since the last record"),
    },
}

MEANINGS: dict[str, Meaning] = {
    name: Meaning(section, unit, text) for section, names in _SECTIONS.items() for name, (unit, text) in names.items()
}
"""Figures by name; `<...>` in a name stands for any word."""


def meaning(figure: str) -> Meaning | None:
    """What a figure means; None for one that is not known, such as one of somebody's own.

    Example:
        >>> meaning("groups/failed/reward").unit
        'groups'
    """
    if figure in MEANINGS:
        return MEANINGS[figure]
    for name in (name for name in MEANINGS if "<" in name):
        inner = re.fullmatch(re.sub(r"<\w+>", "(.+)", name), figure)
        if inner and (not name.endswith(("critic/<name>", "eval/<name>")) or meaning(inner[1]) is not None):
            return MEANINGS[name]
    return None
