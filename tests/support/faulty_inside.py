"""What runs inside real vLLM and SGLang servers, with faults that a test switches on while they run: the file
FAULT_FILE names those that are on.

vLLM finds this file on PYTHONPATH (`--middleware faulty_inside.Guard`, `--worker-extension-cls
faulty_inside.WeightStage`). SGLang is started with it (`python faulty_inside.py --model-path ...`), and so are its own
processes.

    not loaded    the server's own load does nothing, and says that all went well
    one behind    what is loaded, and what it is compared with, is what the commit before should have brought
    stale head    the output head multiplies with a copy of its weights that was made before the load
    cache kept    what was computed before the load stays in the prefix cache, under the name of any version
    temperature   everything that is not greedy is sampled at 0.7
    unseen        beside another one: the comparison after the load is off, as it is for what is split or quantised
"""

import copy
import json
import os
import sys
from pathlib import Path

INSIDE = Path(__file__).parents[2] / "packages" / "rl-inference" / "src" / "rl_inference" / "backends" / "plugins"
IN_SGLANG = __name__ in ("__main__", "__mp_main__")
COLDER = 0.7

sys.path.insert(0, str(INSIDE))
import rl_guard  # noqa: E402
import rl_stored  # noqa: E402

if IN_SGLANG:
    import sglang_server as real
else:
    import vllm_extension as real


def on(fault):
    """Whether a fault is on now."""
    return fault in Path(os.environ["FAULT_FILE"]).read_text()


def colder(body):
    """A request's body at another temperature than it asks for, unless it asks for greedy tokens or for scores."""
    asked = json.loads(body)
    sampling = asked.get("sampling_params", {})
    scores = "prompt_logprobs" in sampling or "logprob_start_len" in asked
    if on("temperature") and sampling.get("temperature") and not scores:
        sampling["temperature"] = COLDER
    return json.dumps(asked).encode()


class Kept:
    """An engine whose prefix cache is emptied in word alone."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def reset_prefix_cache(self, *_):
        return True


class Guard(real.Guard):
    """The doors, and what is changed on the way through them."""

    def engine(self, scope):
        engine = super().engine(scope)
        return Kept(engine) if on("cache kept") else engine

    async def _generate(self, scope, receive, send):
        rest = [{"type": "http.request", "body": colder(await rl_guard.body_of(receive)), "more_body": False}]

        async def replayed():
            return rest.pop() if rest else await receive()

        await super()._generate(scope, replayed, send)


compare = real.compare


def plant_in_comparison(before):
    """`unseen`, and what is done to a model between its load and the comparison."""

    def faulty(model, staged):
        before(model)
        if not on("unseen"):
            compare(model, staged)

    real.compare = faulty


if not IN_SGLANG:
    salted, repack = real._salted, real.repack

    def salt(body, version):
        return salted(body, 0 if on("cache kept") else version)

    def faulty_repack(model):
        if not on("stale head"):
            repack(model)

    real._salted, real.repack = salt, faulty_repack
    plant_in_comparison(lambda model: None)

    class WeightStage(real.WeightStage):
        """The worker's methods."""

        def rl_load(self, version):
            attempt = self._rl_state().attempt
            before = self.__dict__.get("rl_due")
            self.rl_due = {name: tensor.clone() for name, tensor in attempt.tensors.items()}
            if on("one behind") and before:
                attempt.tensors = before
            if on("not loaded"):
                self.reload_weights = lambda **_: None
            try:
                super().rl_load(version)
            finally:
                self.__dict__.pop("reload_weights", None)


if IN_SGLANG:
    real.Guard = Guard
    load, open_parts, due, stale = real.load_staged, rl_stored.open_parts, {}, []

    def staged_before(meta, place):
        """What a commit brings, or what the one before should have brought."""
        tensors = open_parts(meta, place)
        before = dict(due) or tensors
        due.update({name: tensor.clone() for name, tensor in tensors.items()})
        return before if on("one behind") else tensors

    def keep_cache():
        """SGLang empties the cache after the load, in the process that has loaded."""
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

        flush = Updater.__dict__.get("flush_for_real") or Updater.flush_cache_after_weight_update

        def faulty(self, request, success, message):
            return (success, message) if on("cache kept") else flush(self, request, success, message)

        Updater.flush_for_real, Updater.flush_cache_after_weight_update = flush, faulty

    def copied(module):
        """A module with parameters of its own; what else it holds cannot be copied (groups of processes)."""
        made = copy.copy(module)
        made._parameters = {name: type(p)(p.detach().clone(), False) for name, p in module._parameters.items()}
        return made

    def load_staged(model, named_tensors):
        rl_stored.open_parts = staged_before  # here alone: the process that stages tells what came
        keep_cache()
        model.lm_head = model.model.embed_tokens  # the models of these tests are tied
        stale[:] = [copied(model.lm_head)] if on("stale head") else []
        if on("not loaded"):
            model.load_weights = lambda weights: None
        try:
            load(model, named_tensors)
        finally:
            model.__dict__.pop("load_weights", None)

    def leave_head(model):
        if stale:
            model.lm_head = stale[0]

    real.load_staged = load_staged
    plant_in_comparison(leave_head)


if __name__ == "__main__":
    real.main()
