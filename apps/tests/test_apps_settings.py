"""Processes of real runs read every setting, and read every leaf of a command's config at a non-default value.

The tests list the exceptions.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import filter as filter_names
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rl_apps.embedded.prepare import prepare_from_scratch
from rl_apps.programs.gsm8k_grpo import APP as GRPO
from rl_apps.programs.gsm8k_sft import APP as SFT
from rl_apps.programs.hh_rlhf import DPO, REWARD_MODEL, DPOConfig
from rl_apps.settings.compose import SEAMS
from rl_apps.settings.config import GRPOConfig, SFTConfig
from rl_contracts import registry
from rl_contracts.config import ComponentConfig
from rl_contracts.testing.processes import free_port
from rl_datasets import ChatOptions, GSM8KOptions
from rl_datasets.word_problems import WordProblemsOptions
from rl_rewards.formatting import FormatRewardConfig

BIN = Path(sys.executable).parent
PROBE = Path(__file__).with_name("settings_probe")

CHECKS = {
    "rl_inference.backends.sglang.config:SGLangEngineConfig.memory_share": "read only on a GPU",
    "rl_apps.settings.config:RolloutSettings.allow_biased_sampling": "read by the check of sampling parameters",
}
"""Settings that no command of `runs` reads, with the reason."""

FEW = ("data.batch_size=4", "evaluation.examples=4", "total_steps=2")
QUESTIONS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(32)]
FAILING_REWARD = """
def reward(prompt, completions, prompt_ids, completion_ids, **data):
    if sum(prompt_ids) % 3:
        raise ValueError("injected failure")
    return 0.0
"""


def runs(directory):
    """Return commands that together read every setting, with the exit code of each."""
    launchers = Path(__file__).parents[2] / "packages" / "rl-launchers" / "tests"
    tests = [str(launchers / f"test_launchers_{name}.py") for name in ("restarts", "signals")]
    return {
        # a reference, a critic, recovery checkpoints, saved batches and canaries
        (
            "gsm8k-grpo",
            *FEW,
            "algorithm=ppo",
            "algorithm.kl.place=loss",
            "algorithm.kl.coef=0.1",
            "publish.canary=always",
            "recover.every=1",
        ): 0,
        # two ranks, adapters, small micro-batches, data set options, a broadcast that waits for completions
        (
            "gsm8k-grpo",
            *FEW,
            "allocation=embedded:d1+fsdp:d2",
            "actor.engine.lora.rank=2",
            "actor.micro_batch.max_tokens=128",
            "actor.optimizer.schedule=cosine",
            "actor.optimizer.warmup_steps=0",
            "algorithm.reward.overlong_max=16",
            "data.name=gsm8k",
            f"data.path={directory}",
            "data.train_split=odd",
            "data.options.instruction=Be brief.",
            "data.options.invalid_text=replace",
            "data.columns.question=question",
            "evaluation.sets.other.data.name=chat",
            f"evaluation.sets.other.data.path={directory}",
            "evaluation.sets.other.data.columns.messages=question",
            "evaluation.sets.other.data.options.system=Be brief.",
            "evaluation.sets.other.data.test_split=test",
            "evaluation.sets.other.reward=gsm8k",
            "evaluation.sets.other.examples=2",
            "evaluation.sets.other.n=2",
            "evaluation.sets.other.k=[2]",
            "evaluation.sets.other.temperature=1",
            "evaluation.sets.other.max_new_tokens=9",
            "publish.route=broadcast",
            "rollout.interrupt=wait",
            "rollout.invalid_text=replace",
            "rollout.reward=format",
        ): 0,
        # failed and rejected groups, until the run stops
        (
            "gsm8k-grpo",
            *FEW,
            "evaluation.examples=0",
            "launcher.max_restarts=0",
            "rollout.dynamic_sampling=true",
            "rollout.failure_budget=1",
            "rollout.max_rejected_in_row=3",
            "rollout.trial_episode=false",
            "rollout.reward=unsteady:reward",
        ): 1,
        (
            "gsm8k-sft",
            *FEW,
            "allocation=embedded:d1+fsdp:d1",
            "data.overlong=truncate",
            "data.name=chat",
            f"data.path={directory}",
            "data.columns.messages=question",
            "data.options.system=Be brief.",
        ): 0,
        # skipped steps, because the first one makes the weights infinite
        ("hh-rlhf-dpo", *FEW, "preference.label_smoothing=0.1", "actor.optimizer.lr=1e38"): 0,
        # other servers, which are not installed: dry runs
        **{
            (
                "gsm8k-grpo",
                *FEW,
                "--dry-run",
                f"allocation={kind}:d1+fsdp:d1",
                f"rollout.server.python={fake_interpreter(directory, kind, version)}",
            ): 0
            for kind, version in (("vllm", "0.32.0"), ("sglang", "0.5.23"))
        },
        # a restarted server, and a run that is asked to stop
        ("pytest", "-q", "--all", *tests, "-k", "lost_is_restarted or sigterm_saves_checkpoint"): 0,
    }


def fake_interpreter(directory, package, version):
    """Write an interpreter that reports an installed package."""
    path = directory / f"python-with-{package}"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(['3.12.0', {package: version}, ''])}'\n")
    path.chmod(0o755)
    return path


def settings_of(*roots):
    """Return the settings of config classes by `module:Class.field`, including the settings of optional sections."""
    settings, pending = {}, list(roots)
    while pending:
        cls = pending.pop()
        types = get_type_hints(cls)
        for item in fields(cls):
            kinds = [kind for kind in (types[item.name], *get_args(types[item.name])) if is_dataclass(kind)]
            pending += kinds
            if not kinds:
                settings[owner(cls, item.name)] = (cls, item.name)
    return settings


def owner(cls, name):
    """Return a field with the class that declares it first, in the format of the probe."""
    declaring = [base for base in cls.__mro__ if name in inspect.get_annotations(base)]
    return f"{declaring[-1].__module__}:{declaring[-1].__qualname__}.{name}"


def constant_of_a_component(cls, name):
    """Return whether a field is a constant that an installed component of its group accepts and uses."""
    components = [registry.load(cls.group, kind) for kind in registry.available(cls.group)]
    return any(name in inspect.signature(c).parameters and name in names_used(c) for c in components)


def names_used(component):
    tree = ast.parse(textwrap.dedent(inspect.getsource(component)))
    loads = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load)]
    return {getattr(node, "id", None) or getattr(node, "attr", None) for node in loads}


def unread(settings, seen):
    """Return the settings that no process of the runs reads and no component accepts as a constant."""
    constants = {
        setting
        for setting, (cls, name) in settings.items()
        if issubclass(cls, ComponentConfig) and hasattr(cls, "group") and constant_of_a_component(cls, name)
    }
    return sorted(settings.keys() - seen - constants)


def watched(command, seen, modules="rl_", code=0, cwd=None):
    """Run a command, check its exit code, and return the settings that its processes read, as lines of the probe."""
    seen.mkdir()
    environment = os.environ | {"PYTHONPATH": str(PROBE), "SETTINGS_READ": str(seen), "SETTINGS_MODULES": modules}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return {tuple(line.split("\t")) for file in seen.iterdir() for line in file.read_text().splitlines()}


TESTED_ELSEWHERE = (
    "rl_engines_megatron.",  # runs in tests/megatron/test_megatron_commands.py
    "rl_workflows.agents.endpoint.",  # tests/end_to_end/test_agent_commands.py
    "rl_launchers.cluster.scheduler:",  # tests/clusters/test_clusters_commands.py, and the two below
    "rl_launchers.ray.scheduler:",
    "rl_launchers.slurm.scheduler:",
    "rl_inference.backends.vllm.config:VLLMEngineConfig.sleep",  # needs a GPU
    # packages/rl-trainers/tests/test_trainers_checkpoints.py
    "rl_trainers.run_log.checkpoints:CheckpointConfig.best_mode",
)
"""Settings of components that the runs below do not use, and where they are tested."""


@pytest.mark.nightly  # six commands
@pytest.mark.timeout(900)
def test_every_setting_is_read_in_a_run(tmp_path):
    components = [registry.settings(group, name) for group in SEAMS.values() for name in registry.available(group)]
    settings = settings_of(
        GRPOConfig,
        SFTConfig,
        DPOConfig,
        *components,
        WordProblemsOptions,
        GSM8KOptions,
        ChatOptions,
        FormatRewardConfig,
    )
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    invalid = [{"question": "1 + 1? \ud83d", "answer": "#### 2"}]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, invalid + QUESTIONS)))
    (tmp_path / "unsteady.py").write_text(FAILING_REWARD)
    seen = set(CHECKS)
    for number, (command, code) in enumerate(runs(tmp_path).items()):
        app, *arguments = command
        run_dir = [] if app == "pytest" else [f"run_dir={tmp_path / f'run-{number}'}"]
        lines = watched([str(BIN / app), *arguments, *run_dir], tmp_path / f"seen-{number}", code=code, cwd=tmp_path)
        seen |= {setting for setting, _, _ in lines}

    missing = [setting for setting in unread(settings, seen) if not setting.startswith(TESTED_ELSEWHERE)]
    assert not missing, "\n".join(missing)


@dataclass(frozen=True)
class Leaf:
    """A setting in the config of a command, at one dotted key."""

    owner: str
    """Class and name of the field, in the format of the probe."""
    item: Any
    """Field of the dataclass."""
    value: Any
    section: Any
    """Section that contains the field."""


def default_config(app, *overrides):
    """Return the config of a command with these overrides, and with servers if it may have some."""
    return app.config((*overrides, "allocation=embedded:d1+fsdp:d1") if app.servers != "rejected" else overrides)


def leaves_of(section, prefix=""):
    """Return the leaves of a config section by dotted key. A section that is None counts with its defaults."""
    types, leaves = get_type_hints(type(section)), {}
    for item in fields(section):
        key, value = prefix + item.name, getattr(section, item.name)
        kinds = [kind for kind in get_args(types[item.name]) if is_dataclass(kind)]
        value = kinds[0]() if kinds and value is None else value
        if is_dataclass(value):
            leaves |= leaves_of(value, f"{key}.")
        else:
            leaves[key] = Leaf(owner(type(section), item.name), item, value, section)
    return leaves


def other_values(leaf):
    """Return other valid values of a leaf, derived from the type and condition of its field. The list may be empty."""
    value, expected = leaf.value, leaf.item.metadata.get("expected", "")
    if isinstance(value, bool):
        candidates = [not value]
    elif isinstance(value, int):
        candidates = [value + step for step in (1, 2, 3, -1)]
    elif isinstance(value, float):
        candidates = [value * factor for factor in (0.9, 0.8, 0.7)] if value else [0.1, 0.2, 0.3]
    else:
        named = expected.startswith("one of ") and isinstance(value, str)
        candidates = expected.removeprefix("one of ").split(", ") if named else []
    holds = leaf.item.metadata.get("holds", lambda _: True)
    return [candidate for candidate in candidates if candidate != value and holds(candidate)]


def text(value):
    """Return the text of a value in an argument of a command."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Command:
    """Run whose settings have other values than their defaults."""

    app: Any
    values: dict[str, Any]
    """Explicit values, by key."""
    keep: tuple[str, ...] = ("*",)
    """Patterns of keys that keep their default. All others get another value that their field allows."""
    code: int = 0

    @property
    def overrides(self):
        """Arguments of the command. Leaves of one field get different values, which identify the leaf in a copy."""
        taken, arguments = set(), {key: str(value) for key, value in self.values.items()}
        for key, leaf in leaves_of(default_config(self.app)).items():
            if key not in arguments and not any(fnmatch(key, pattern) for pattern in self.keep):
                free = [value for value in other_values(leaf) if (leaf.owner, value) not in taken]
                for value in (free or other_values(leaf))[:1]:
                    taken.add((leaf.owner, value))
                    arguments[key] = text(value)
        return [f"{key}={value}" for key, value in arguments.items()]


def commands(at, port=4711):
    """Return runs that together change every leaf, by name. The directory `at` has questions, pairs and a model."""
    common = {
        "experiment": "other",
        "trial": "other",
        "total_steps": 2,
        "recipe": "pretrained",
        "model.path": f"{at}/model",
        "data.name": "gsm8k",
        "data.path": at,
        "data.batch_size": 4,
        "evaluation.examples": 5,
        "cluster.device": "cpu",
    }
    pairs = {"data.name": "hh-rlhf", "data.path": f"{at}/pairs", "data.columns": "{chosen: chosen}"}
    generated = {"data.name": "word-problem-pairs", "data.path": "", "data.options": "{size: 64}"}
    trainer = {
        "model.dtype": "bfloat16",
        "model.chat_template": "plain",
        "data.train_split": "test",
        "data.test_split": "train",
        "data.max_length": 200,
        "data.overlong": "truncate",
        "actor.optimizer.name": "muon",
        "actor.optimizer.options": "{eps: 1e-5, momentum: 0.5}",
        "actor.optimizer.schedule": "linear",
        "actor.optimizer.warmup_steps": 1,
        "actor.micro_batch.max_tokens": 256,
        "actor.dtype": "bfloat16",
        "actor.engine.lora.rank": 2,
        "actor.engine.lora.target_modules": "[q_proj]",
        "actor.engine.max_logits": 60000,
        "actor.engine.serve_dtype": "bfloat16",
        "allocation": "fsdp:d2",
        "launcher.kind": "rl_launchers:LocalScheduler",
        "launcher.options.host": "localhost",
        "checkpoint.every": 2,  # not due at step 1, which tests every_epochs
        "checkpoint.best_metric": "grad_norm",
        "recover.every": 2,  # not due at step 1, which tests every_minutes
    }
    supervised = {"data.batch_size": 8, "actor.micro_batch.max_tokens": 64}
    servers = {
        "allocation": "embedded:d1+fsdp:d2",
        "data.options": "{instruction: Be brief.}",
        "data.columns": "{answer: answer}",
        "evaluation.max_new_tokens": 9,
        "rollout.workflow": "rl_workflows:RLVRWorkflow",
        "rollout.reward": "format",
        "rollout.interrupt": "wait",
        "rollout.port": port,
        "rollout.server.dtype": "bfloat16",
        "rollout.server.context_length": 300,
        "rollout.server.python": sys.executable,
        "publish.route": "broadcast",
        "publish.canary": "auto",  # the canary needs a longer context and larger micro-batches
    }
    algorithm = {
        "rollout.max_concurrent": 4,
        "rollout.group_size": 4,
        "rollout.min_group": 3,
        "rollout.generation.max_new_tokens": 12,
        "rollout.generation.top_k": 50,  # few tokens would never form a stop string, and truncated ones are masked
        "rollout.generation.stop": "[a, e, i, n, o, s, t]",
        "rollout.generation.stop_token_ids": "[8]",
        "algorithm.reward.overlong_max": 9,
        "algorithm.reward.overlong_cache": 3,
        "algorithm.advantage.kind": "gae",
        "algorithm.advantage.options": "{lam: 0.5}",
        "algorithm.loss.options": "{dual_clip: 3.0}",
        "algorithm.aggregation.kind": "constant_length",
        "algorithm.proximal": "recompute",
        "algorithm.correction.kind": "mask",
        "algorithm.correction.options": "{cap: 3.0}",
        "algorithm.mask.kind": "ratio",
        "algorithm.mask.options": "{high: 3.0}",
        "algorithm.kl.place": "loss",
        "ref.path": f"{at}/model",
        "critic.path": f"{at}/model",
    }
    failing = {
        "evaluation.examples": 0,
        "launcher.max_restarts": 0,
        "rollout.dynamic_sampling": "true",
        "rollout.failure_budget": 1,
        "rollout.max_rejected_in_row": 3,
        "rollout.trial_episode": "false",
        "rollout.reward": "unsteady:reward",
    }
    canary = {"publish.canary": "always"}
    short = {"evaluation.max_new_tokens": 9, "rollout.generation.max_new_tokens": 12}
    deterministic = {"deterministic": "true"}
    variants = {
        "grpo": Command(GRPO, common | trainer | servers | algorithm, KEPT),
        "grpo-same": Command(
            GRPO,
            common
            | deterministic
            | short
            | canary
            | {
                "rollout.max_staleness": 0,
                "algorithm.loss.kind": "importance",
                "algorithm.advantage.mean": "batch",
                "algorithm.advantage.std": "batch",
                "algorithm.advantage.leave_one_out": "true",
                "algorithm.mask.kind": "second_moment",
                "algorithm.mask.threshold": 0.5,
            },
        ),
        "grpo-failing": Command(GRPO, common | failing, code=1),
        "sft": Command(SFT, common | trainer | supervised | servers, SUPERVISED_KEPT),
        "sft-same": Command(SFT, common | deterministic | canary | {"allocation": "embedded:d1+fsdp:d1"}),
        "dpo": Command(DPO, common | pairs | trainer | supervised, (*SUPERVISED_KEPT, "preference.loss")),
        "dpo-same": Command(DPO, common | generated | deterministic | {"preference.loss": "ipo"}),
        "rm": Command(REWARD_MODEL, common | pairs | trainer | supervised, SUPERVISED_KEPT),
        "rm-same": Command(REWARD_MODEL, common | generated | deterministic),
    }
    return {
        name: replace(command, values={**command.values, "run_dir": f"{at}/runs/{name}"})
        for name, command in variants.items()
    }


KEPT = (
    "algorithm.advantage.leave_one_out",
    "algorithm.advantage.mean",
    "algorithm.advantage.std",
    "algorithm.mask.threshold",
    "*.compile",
    "*.offload",
    "deterministic",
    "model.directories",
    "rollout.dynamic_sampling",
    "rollout.endpoint.discount",
    "rollout.max_rejected_in_row",
)
"""Settings that the largest commands do not change."""
SUPERVISED_KEPT = (*KEPT, "actor.minibatches")


@dataclass(frozen=True)
class Elsewhere:
    """Leaves that every command above reads at the default, and a test that uses another value."""

    keys: str
    """Pattern of keys."""
    why: str
    test: str
    apps: tuple[Any, ...] = (GRPO, SFT, DPO, REWARD_MODEL)
    value: str = ""
    """Another valid value, if the field does not define one."""
    also: tuple[str, ...] = ()
    """Other overrides that the value needs."""


TWO_RANKS = "test_train_batch_on_two_ranks_equals_one_rank"
BLOCKS = "test_step_does_not_depend_on_order_micro_batches_padding_or_blocks"
SERVED = "test_full_parameters_have_hugging_face_names_and_served_dtype"
BIASED = "test_compose_allowed_biased_sampling_is_accepted"
CONFIG = "apps/tests/test_apps_config.py::"
ENGINES, LAUNCHERS = "packages/rl-engines-fsdp/tests/test_fsdp_", "packages/rl-launchers/tests/test_launchers_"
ELSEWHERE = [
    Elsewhere(
        "model.directories",
        "filled in by the command",
        "apps/tests/test_apps_model_path.py::test_hub_id_in_the_cache_trains_and_saves",
        value="{me/tiny: /models/tiny}",
    ),
    Elsewhere(
        "recipe",
        "read before the config object exists",
        "apps/tests/test_apps_recipes.py::test_recipe_can_be_set_and_an_unknown_one_raises_config_error",
        value="pretrained",
    ),
    *(
        Elsewhere(
            f"trackers.{name}",
            "only trackers read it",
            f"packages/rl-trainers/tests/test_trainers_tracking.py::{test}",
            value=value,
            also=also,
        )
        for name, value, also, test in (
            ("kind", "tensorboard", (), "test_tensorboard_reader_returns_logged_metrics"),
            ("options", "{mode: offline}", ("trackers.kind=wandb",), "test_wandb_offline_file_has_logged_metrics"),
        )
    ),
    Elsewhere(
        "*.engine.compile",
        "minutes on a CPU",
        f"{ENGINES}compile.py::test_train_batch_with_compiled_layers_equals_plain_layers",
    ),
    Elsewhere(
        "actor.freeze",
        "needs a vision-language model",
        f"{CONFIG}test_frozen_parts_reach_the_engine",
        value="[projector]",
    ),
    Elsewhere(
        "evaluation.k",
        "names metrics",
        "packages/rl-trainers/tests/test_trainers_evaluation.py::test_evaluation_k_defaults_to_1_and_n",
        (GRPO, SFT),
        "[1]",
    ),
    Elsewhere(
        "evaluation.sets",
        "adds metrics",
        "apps/tests/test_apps_evaluation_sets.py::test_set_with_n_has_default_k_and_own_reward",
        (GRPO, SFT),
        "{other: {n: 2}}",
    ),
    Elsewhere(
        "*.engine.offload",
        "needs a GPU",
        f"{ENGINES}usage.py::test_offload_on_cuda_gives_the_same_losses",
    ),
    Elsewhere(
        "rollout.server.compile",
        "minutes on a CPU",
        "packages/rl-inference/tests/test_inference_compiled.py::test_compiled_model_uses_changed_weights",
        (GRPO, SFT),
    ),
    *(
        Elsewhere(
            f"rollout.endpoint.{keys}",
            "needs an agent",
            "packages/rl-workflows/tests/test_workflows_endpoint.py::"
            "test_calls_beyond_limit_return_429_and_others_are_kept",
            (GRPO, SFT),
            value=value,
        )
        for keys, value in (
            ("session_seconds", "2"),
            ("max_calls", "2048"),
            ("tool_calls", "hermes"),
            ("port", "1"),
            ("host", "me"),
            ("url", "you"),
        )
    ),
    *(
        Elsewhere(
            f"rollout.endpoint.{name}",
            "needs an agent",
            "tests/end_to_end/test_agents.py::test_agent_rewards_per_call_become_episode_or_turn_rewards",
            apps,
            value=value,
            also=also,
        )
        for name, value, apps, also in (
            ("credit", "turn", (GRPO,), ("algorithm.advantage.kind=return",)),
            ("credit", "turn", (SFT,), ()),
            ("discount", "0.5", (GRPO, SFT), ()),
        )
    ),
    Elsewhere(
        "rollout.endpoint.sequences_per",
        "needs an agent",
        "tests/end_to_end/test_agents.py::test_agent_per_call_makes_one_trajectory_per_call",
        (GRPO, SFT),
        value="call",
    ),
    Elsewhere(
        "resume_from",
        "needs a recovery checkpoint",
        "apps/tests/test_apps_resuming.py::test_resume_from_another_run_links_its_checkpoint",
        value="40",
    ),
    Elsewhere(
        "launcher.grace_seconds",
        "needs a request to stop",
        f"{LAUNCHERS}signals.py::test_trainer_that_ignores_sigterm_is_killed_after_grace",
    ),
    Elsewhere(
        "rollout.server.addresses",
        "needs attached servers",
        "tests/servers/test_attached_servers.py::test_attached_servers_are_used_and_left_running",
        (GRPO, SFT),
        value="[http://127.0.0.1:1]",
    ),
    *(
        Elsewhere(
            f"launcher.{name}",
            "no servers in these commands",
            f"{LAUNCHERS}restarts.py::test_server_lost_is_restarted_and_run_continues",
            (DPO, REWARD_MODEL),
        )
        for name in ("max_restarts", "health_timeout")
    ),
    Elsewhere(
        "actor.engine.max_logits",
        "a score has no logits",
        f"{ENGINES}invariance.py::test_step_does_not_depend_on_order_micro_batches_padding_or_blocks",
        (REWARD_MODEL,),
    ),
    *(
        Elsewhere(keys, why, test, (GRPO,))
        for keys, why, test in (
            ("*.engine.sync_every_micro_batch", "several micro-batches", f"{ENGINES}ranks.py::{TWO_RANKS}"),
            ("critic.engine.max_logits", "values have no logits", f"{ENGINES}invariance.py::{BLOCKS}"),
            ("ref.engine.serve_dtype", "only the actor is served", f"{ENGINES}weights_and_checkpoints.py::{SERVED}"),
            ("critic.engine.serve_dtype", "only the actor is served", f"{ENGINES}weights_and_checkpoints.py::{SERVED}"),
            ("rollout.allow_biased_sampling", "read while composing", f"{CONFIG}{BIASED}"),
        )
    ),
    Elsewhere(
        "actor.minibatches",
        "each batch is one step, and other values are rejected",
        "apps/tests/test_apps_config.py::test_supervised_command_rejects_several_minibatches",
        (SFT, DPO, REWARD_MODEL),
    ),
]


@cache
def default_leaves(name):
    [app] = [app for app in (GRPO, SFT, DPO, REWARD_MODEL) if app.name == name]
    return leaves_of(default_config(app))


def elsewhere(app):
    """Return the entries of `ELSEWHERE` for a command, by the leaves that they cover."""
    entries, leaves = [entry for entry in ELSEWHERE if app in entry.apps], default_leaves(app.name)
    return {key: entry for entry in entries for key in filter_names(leaves, entry.keys)}


def changed(app, config):
    """Return the leaves of a config that differ from the default."""
    before = default_leaves(app.name)
    return {key: leaf for key, leaf in leaves_of(config).items() if leaf.value != before[key].value}


def leaves_read(leaves, changes, lines):
    """Return the changed leaves that the processes of a run read, at their key or by a unique value in a copy.

    A constant of an installed component counts as read, because components receive constants as keyword arguments.
    """
    values = Counter((leaf.owner, repr(leaf.value)) for leaf in leaves.values())
    read = {(setting, key, value) for setting, key, value in lines}
    copies = {(setting, value) for setting, _, value in lines}
    return {
        key
        for key, leaf in changes.items()
        if (leaf.owner, key, repr(leaf.value)) in read
        or ((leaf.owner, repr(leaf.value)) in copies and values[leaf.owner, repr(leaf.value)] == 1)
        or (isinstance(leaf.section, ComponentConfig) and constant_of_a_component(type(leaf.section), leaf.item.name))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "app",
    [GRPO, SFT, *(pytest.param(app, marks=pytest.mark.nightly) for app in (DPO, REWARD_MODEL))],
    ids=lambda app: app.name,
)
def test_every_leaf_has_another_value_in_some_command(app):
    leaves = leaves_of(default_config(app))
    configs = [app.config(command.overrides) for command in commands("/data").values() if command.app is app]
    for key, entry in elsewhere(app).items():
        configs.append(default_config(app, f"{key}={entry.value or text(other_values(leaves[key])[0])}", *entry.also))
    changes = {key for config in configs for key in changed(app, config)}

    assert sorted(leaves.keys() - changes) == []


def test_leaves_tested_elsewhere_exist_and_so_do_their_tests():
    covered = {app.name: elsewhere(app).values() for app in (GRPO, SFT, DPO, REWARD_MODEL)}
    for entry in ELSEWHERE:
        file, name = entry.test.split("::")
        assert all(entry in covered[app.name] for app in entry.apps), entry.keys
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(), entry.test


@pytest.fixture
def training_data(tmp_path):
    """Directory with questions, pairs and a small model for the commands."""
    pairs = [{"prompt": q["question"], "chosen": q["answer"], "rejected": "#### 0"} for q in QUESTIONS]
    (tmp_path / "pairs").mkdir()
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
        (tmp_path / "pairs" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "unsteady.py").write_text(FAILING_REWARD)
    texts = [text for question in QUESTIONS for text in question.values()]
    (tmp_path / "model").symlink_to(prepare_from_scratch(texts, 1, cache_dir=tmp_path / "cache"))
    return tmp_path


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("app", [GRPO, SFT, DPO, REWARD_MODEL], ids=lambda app: app.name)
def test_every_leaf_is_read_at_another_value(app, training_data):
    read = set()
    for name, command in commands(training_data, free_port()).items():
        if command.app is app:
            line = [str(BIN / app.name), *command.overrides]
            lines = watched(line, training_data / f"seen-{name}", code=command.code, cwd=training_data)
            config = app.config(file=training_data / "runs" / name / "config.yaml")
            read |= leaves_read(leaves_of(config), changed(app, config), lines)

    assert sorted(leaves_of(default_config(app)).keys() - read - elsewhere(app).keys()) == []


UNREAD_SETTINGS = """
import os
from dataclasses import asdict, dataclass, field, replace
from rl_contracts.config import Settings, require

@dataclass
class InnerConfig(Settings):
    used: int = 1
    copied: int = 2
    dumped: int = 3
    compared: int = 4
    checked: int = 5
    def __post_init__(self):
        require(self.checked > 0, "checked", "more than 0", self.checked)

@dataclass
class OuterConfig(Settings):
    inner: InnerConfig = field(default_factory=InnerConfig)
    idle: int = 6

if __name__ == "__main__":
    config = OuterConfig()
    print(config.inner.used, replace(config.inner).copied, asdict(config), config == OuterConfig(), config)
"""


def test_unread_setting_is_named(tmp_path, monkeypatch):
    (tmp_path / "injected.py").write_text(UNREAD_SETTINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import injected

    seen = watched([sys.executable, str(tmp_path / "injected.py")], tmp_path / "seen", "__main__")

    lines = [(setting.replace("__main__", "injected"), key, value) for setting, key, value in seen]
    assert unread(settings_of(injected.OuterConfig), {setting for setting, _, _ in lines}) == [
        "injected:InnerConfig.checked",
        "injected:InnerConfig.compared",
        "injected:InnerConfig.dumped",
        "injected:OuterConfig.idle",
    ]
    leaves = leaves_of(injected.OuterConfig())
    other_leaves = leaves_of(injected.OuterConfig(injected.InnerConfig(used=9, copied=9)))
    assert leaves_read(leaves, leaves, lines) == {"inner.used", "inner.copied"}
    assert leaves_read(other_leaves, other_leaves, lines) == set()  # not read at these values
