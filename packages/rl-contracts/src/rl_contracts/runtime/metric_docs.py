"""Meaning of every built-in metric in `metrics.jsonl`, the source of `docs/metrics.md` and `rl metrics`.

Metrics that a custom reward, workflow, agent or loss records are not listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """Documentation of one metric."""

    section: str
    """Title of the section that lists the metric."""
    unit: str
    """Unit of the value, or the items that it counts; `-` if it has neither."""
    text: str
    """Description."""


REWARDS = "Rewards"
"""Section of the metrics that reward functions record."""

_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "The record": {
        "step": ("steps", "training step of the record; 0 before the first step"),
        "version": ("versions", "version of the weights after the step, which is the number of applied batches"),
        "timestamp": ("s since 1970", "time when the record was written (UTC)"),
        "evaluation": (
            "true",
            "true in the record of an evaluation before or after training; absent from records of steps",
        ),
        "metrics/non_finite": ("metrics", "metrics of this record that were NaN or infinite, and are null here"),
    },
    "The batch": {
        "sequences": ("sequences", "sequences in the batch, over all replicas"),
        "tokens/trained": ("tokens", "tokens in the loss, over all replicas"),
        "reward/mean": ("reward", "mean reward of the sequences in the batch, as the reward function returned it"),
        "reward/std": ("reward", "sample standard deviation of the rewards of the sequences; null with fewer than two"),
        "reward/shaped": (
            "reward",
            "mean reward of the episodes in the batch, after the changes that `algorithm.reward` makes",
        ),
        "length/mean": ("tokens", "mean number of sampled tokens per episode"),
        "truncated/fraction": ("fraction of sequences", "sequences whose completion was truncated"),
        "staleness/mean": (
            "versions",
            "age of the oldest token in a sequence (trainer's version minus token's version), mean over sequences",
        ),
        "staleness/max": ("versions", "age of the oldest token in the batch"),
        "staleness/fraction_<n>": ("fraction of tokens", "trained tokens that are n versions old"),
        "staleness/fraction_4_and_more": ("fraction of tokens", "trained tokens that are at least four versions old"),
    },
    "Groups and episodes": {
        "groups/trained": ("groups", "groups in the batch"),
        "groups/singleton": ("groups", "groups of one episode; their group-relative advantage is 0"),
        "groups/zero_variance": (
            "groups",
            "groups of several episodes with equal rewards; group-relative advantages give them no gradient",
        ),
        "groups/accepted": ("groups", "groups completed since the last record and accepted for a batch"),
        "groups/rejected": ("groups", "groups filtered out since the last record; other groups replace them"),
        "groups/rejected/<reason>": ("groups", "groups filtered out for this reason"),
        "groups/failed": ("groups", "groups that failed since the last record; other groups replace them"),
        "groups/failed/<boundary>": (
            "groups",
            "groups that failed with an error in this part of the system (`reward`, `inference`, ...)",
        ),
        "groups/left_over": (
            "groups",
            "prompts and groups dropped because the data of a replica was exhausted; only with the last batch",
        ),
        "groups/outstanding": ("groups", "admitted groups that were not yet trained on when the record was written"),
        "groups/staleness_mean": (
            "versions",
            "versions between the start of a group and its batch, mean over the groups of the batch",
        ),
        "groups/staleness_max": ("versions", "versions between the start of the oldest group and its batch"),
        "groups/wait_seconds": ("s", "time that the trainer waited for groups, summed over replicas"),
        "episodes/failed/<boundary>": (
            "episodes",
            "episodes that failed since the last record, by the part of the system where the error occurred",
        ),
        "finished/reward_mean": ("reward", "mean reward of all completions in finished groups, trained on or not"),
        "finished/length_mean": ("tokens", "mean number of generated tokens per completion in finished groups"),
        "finished/truncated_fraction": ("fraction of completions", "truncated completions in finished groups"),
        "tokens/generated": ("tokens", "tokens that episodes received since the last record, trained on or not"),
        "conversation/turns": ("turns", "mean number of turns per episode"),
        "agent/rows": ("sequences", "mean number of sequences made from an agent's episode"),
        "agent/turn_rewards": (
            "reward",
            "sum of the turn rewards that an agent reported in an episode, mean over episodes",
        ),
        "agent/<name>": ("-", "metric that an agent returned or reported, mean over episodes"),
    },
    REWARDS: {
        "code/passed": ("fraction of tests", "tests that the program in a completion passed, mean over completions"),
        "reward/timeouts": ("programs", "programs whose tests exceeded their time limit; their reward is 0"),
    },
    "The policy loss": {
        "loss/policy": ("-", "minimized loss; a poor measure of progress, since advantages have mean 0"),
        "loss/aux": ("-", "load-balancing loss of the MoE routers, before its coefficient; not included in the loss"),
        "ratio/mean": ("-", "mean of pi_theta / pi_old over trained tokens; 1 at the first minibatch of a step"),
        "ratio/max": ("-", "largest pi_theta / pi_old of a trained token"),
        "clip/low": ("fraction of tokens", "tokens for which the lower clip bound (below 1) determines the loss"),
        "clip/high": ("fraction of tokens", "tokens for which the upper clip bound (above 1) determines the loss"),
        "clip/dual": ("fraction of tokens", "tokens for which the dual clip determines the loss"),
        "gate/closed": ("fraction of tokens", "tokens whose gradient was at least halved by SAPO's gate"),
        "correction/mean": ("-", "mean weight that corrects for the difference between server and trainer log-probs"),
        "correction/capped": ("fraction of tokens", "tokens whose correction weight was capped"),
        "correction/masked": ("fraction of tokens", "tokens dropped by the correction or by a mask"),
        "weight/effective": (
            "fraction of tokens",
            "effective sample size of the importance weights pi_theta / pi_behavior",
        ),
        "entropy/mean": ("nats", "entropy of the policy's next-token distribution, mean over trained tokens"),
        "kl/old_k1": ("nats", "KL to the policy at the start of the step, estimator k1, mean over trained tokens"),
        "kl/old_k3": ("nats", "KL to the policy at the start of the step, estimator k3 (never negative)"),
        "kl/beh_k1": ("nats", "KL to the policy that generated the tokens, estimator k1"),
        "kl/beh_k3": ("nats", "KL to the policy that generated the tokens, estimator k3"),
        "kl/ref_k1": ("nats", "KL to the reference policy, estimator k1"),
        "kl/ref_k3": ("nats", "KL to the reference policy, estimator k3"),
    },
    "The critic": {
        "critic/explained_variance": (
            "-",
            "fraction of the variance of the returns that the values explain; at most 1, null if all returns are equal",
        ),
        "critic/value/mean": ("reward", "estimated value, mean over trained tokens"),
        "critic/return/mean": ("reward", "return that the critic is trained on, mean over trained tokens"),
        "critic/clip/value": ("fraction of tokens", "tokens for which the value clip determines the loss"),
        "critic/<name>": ("as <name>", "metric `<name>` of the critic's own loss and optimizer"),
    },
    "Supervised and preference learning": {
        "loss/train": ("nats or -", "mean loss of the batch: cross-entropy in nats per token, or loss per pair"),
        "loss/eval": ("nats or -", "mean loss of the held-out examples"),
        "logprob/mean": ("nats", "mean log-prob of a trained token"),
        "pair/accuracy": ("fraction of pairs", "pairs whose chosen completion is preferred; a tie counts half"),
        "pair/margin": ("-", "mean score or implied reward, chosen minus rejected completion"),
        "reward/chosen": ("-", "mean implied reward of chosen completions"),
        "reward/rejected": ("-", "mean implied reward of rejected completions"),
        "score/mean": ("-", "mean score that the reward model gives a sequence"),
    },
    "The optimizer": {
        "loss": ("-", "minimized loss, if the algorithm reports it under no other name"),
        "grad_norm": ("-", "global norm of the gradient before clipping, mean over the minibatches of the step"),
        "lr": ("-", "learning rate, mean over the minibatches of the step"),
        "applied": (
            "fraction of minibatches",
            "minibatches that were applied; the others had a non-finite loss or gradient",
        ),
        "tokens": ("tokens", "tokens in the micro-batches of the step, including prompts, over all ranks"),
        "minibatches/empty": ("minibatches", "minibatches without a token to train on"),
        "experts/share/max": (
            "fraction of choices",
            "largest fraction of a layer's routing choices that fell on one expert",
        ),
        "experts/share/min": (
            "fraction of choices",
            "smallest fraction of a layer's routing choices that fell on one expert",
        ),
        "experts/entropy": (
            "fraction",
            "entropy of the load of the experts relative to a uniform load, mean over layers",
        ),
        "experts/dropped": ("fraction of choices", "routing choices that went to no expert"),
    },
    "Servers against trainer": {
        "gap/mean_abs": ("nats", "|server log-prob - trainer log-prob| after the commit, mean over compared tokens"),
        "gap/max_abs": ("nats", "largest |server log-prob - trainer log-prob| after the commit"),
        "gap/k3": ("nats", "KL between server and trainer after the commit, estimator k3"),
        "gap/fresh_mean_abs": (
            "nats",
            "|server log-prob - trainer log-prob| of recorded tokens of the current version, mean",
        ),
        "gap/fresh_max_abs": (
            "nats",
            "largest |server log-prob - trainer log-prob| of recorded tokens of the current version",
        ),
        "gap/fresh_k3": (
            "nats",
            "KL between recorded and trainer log-probs of tokens of the current version, estimator k3",
        ),
        "gap/fresh_tokens": ("tokens", "tokens of the current version that were compared"),
        "gap/lag": ("standard deviations", "evidence that a server serves an older version than it reports"),
        "gap/empty": ("comparisons", "comparisons of this step that could not be made"),
        "sharing/freed_gib": ("GiB", "memory that sleeping servers released"),
        "server/servers": ("servers", "live servers"),
        "server/rejoins": ("servers", "number of times that a lost server rejoined, since the start"),
        "server/running": ("completions", "completions in generation, sum over servers"),
        "server/waiting": ("requests", "queued requests, sum over servers"),
        "server/generated_tokens": (
            "tokens",
            "tokens generated since the start, sum over all servers, including removed ones",
        ),
        "server/busy_seconds": (
            "s",
            "time spent generating since the start, sum over all servers, including removed ones",
        ),
    },
    "Evaluation": {
        "eval/accuracy": (
            "fraction",
            "held-out episodes with reward 1, if all rewards are 0 or 1; or held-out pairs that were judged correctly",
        ),
        "eval/reward": ("reward", "mean reward of held-out episodes"),
        "eval/standard_error": (
            "reward",
            "standard error of `eval/reward` over examples; the completions of an example are one cluster",
        ),
        "eval/pass@<k>": (
            "fraction",
            "examples solved by one of k completions (reward 1): the mean of 1 - C(n-c,k)/C(n,k), with c of n correct",
        ),
        "eval/maj@<k>": (
            "fraction",
            "accuracy of the most frequent answer among k completions, if the reward extracts answers; a tie gives the "
            "expected value",
        ),
        "eval/avg@<n>": ("reward", "`eval/reward`, if there are n > 1 completions per example"),
        "eval/examples": ("examples", "number of held-out examples in the evaluation"),
        "eval/failed": (
            "completions",
            "completions of held-out examples without a reward; they count as 0 in `eval/accuracy` and `eval/reward`",
        ),
        "eval/length": ("tokens", "mean number of generated tokens in a held-out completion"),
        "eval/truncated": ("fraction", "finished held-out episodes that were cut off at a length limit"),
        "eval/margin": ("-", "`pair/margin` of held-out pairs"),
        "eval/<name>": ("as <name>", "metric `<name>` recorded during an evaluation"),
        "eval/<set>/<name>": ("as eval/<name>", "`eval/<name>` of the evaluation set `<set>` (`evaluation.sets`)"),
    },
    "Time": {
        "time/step": ("s", "time from the end of the previous step to the end of this one, without evaluation"),
        "time/rollout_wait": ("s", "time in the step spent waiting for a batch"),
        "time/train": ("s", "time for advantages, log-probs and the update"),
        "time/train_batch": ("s", "time in forward, backward and optimizer step, part of `time/train`"),
        "time/publish": ("s", "time until the new weights were committed on the servers"),
        "time/stage": ("s", "time from the end of sending until all servers had staged the weights"),
        "time/paused": ("s", "time for which the commit paused the servers"),
        "time/gap": ("s", "time for comparing log-probs of servers and trainer"),
        "time/sleep": ("s", "time for putting servers to sleep and waking them"),
        "time/save": ("s", "time for which a checkpoint blocked training"),
        "time/recover": ("s", "time for which the recovery checkpoint before this step blocked training"),
        "time/recover_written": ("s", "time to write a recovery checkpoint to disk in the background"),
        "time/evaluate": ("s", "time of the evaluation after the previous step"),
        "time/reward": ("s", "time that a reward process spent scoring, mean over processes"),
        "throughput/trained_tokens_per_s": ("tokens/s", "`tokens/trained` divided by `time/step`"),
        "throughput/generated_tokens_per_s": ("tokens/s", "`tokens/generated` divided by `time/step`"),
        "throughput/mfu": (
            "fraction",
            "model FLOPs utilization: useful training FLOPs divided by the devices' peak in `time/train_batch`",
        ),
        "memory/peak_gib": ("GiB", "peak memory of rank 0 so far, of its GPU or of its process"),
        "checkpoint/failed": ("checkpoints", "checkpoints that could not be written since the last record"),
        "recover/failed": (
            "recovery checkpoints",
            "recovery checkpoints that could not be written since the last record",
        ),
    },
}

MEANINGS: dict[str, Meaning] = {
    name: Meaning(section, unit, text) for section, names in _SECTIONS.items() for name, (unit, text) in names.items()
}
"""Metrics by name; `<...>` in a name stands for any word."""


def meaning(figure: str) -> Meaning | None:
    """Return the documentation of a metric, or None if it is not a built-in one.

    Example:
        >>> meaning("groups/failed/reward").unit
        'groups'
    """
    if figure in MEANINGS:
        return MEANINGS[figure]
    for name in (name for name in MEANINGS if "<" in name):
        match = re.fullmatch(re.sub(r"<\w+>", "(.+)", name.replace("<set>", "([^/]+)")), figure)
        if not match:
            continue
        inner = {
            "critic/<name>": match[1],
            "eval/<name>": match[1],
            "eval/<set>/<name>": f"eval/{match[match.re.groups]}",
        }
        if name not in inner or meaning(inner[name]) is not None:
            return MEANINGS[name]
    return None
