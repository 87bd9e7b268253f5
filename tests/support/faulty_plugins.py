"""Plugins of real vLLM and SGLang servers, with faults that a test switches on while the servers run.

The file FAULT_FILE lists the active faults. vLLM imports this file from PYTHONPATH (`--middleware
faulty_plugins.Guard`, `--worker-extension-cls faulty_plugins.WeightStage`). For SGLang it is the program (`python
faulty_plugins.py --model-path ...`), which all processes of the server load.

    not loaded         the server's load does nothing and reports success
    one behind         the server loads the weights of the previous commit, and compares with them
    stale lm_head      the output head multiplies with a copy of its weights from before the load
    cache not flushed  the prefix cache keeps its entries through a load and serves them for every version
    temperature        tokens are sampled at temperature 0.7, unless a request asks for greedy decoding
    comparison off     combined with another fault: no comparison after the load, as for split or quantized weights
"""

import copy
import json
import os
import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "packages" / "rl-inference" / "src" / "rl_inference" / "backends" / "plugins"
IS_SGLANG = __name__ in ("__main__", "__mp_main__")
SAMPLED_TEMPERATURE = 0.7

sys.path.insert(0, str(PLUGINS))
import rl_guard  # noqa: E402
import rl_stored  # noqa: E402

if IS_SGLANG:
    import sglang_server as real
else:
    import vllm_extension as real


def is_active(fault):
    """Return whether the fault is active now."""
    return fault in Path(os.environ["FAULT_FILE"]).read_text()


def change_temperature(body):
    """Return the body of a request with another temperature, unless it asks for greedy tokens or for scores."""
    request = json.loads(body)
    sampling = request.get("sampling_params", {})
    scores = "prompt_logprobs" in sampling or "logprob_start_len" in request
    if is_active("temperature") and sampling.get("temperature") and not scores:
        sampling["temperature"] = SAMPLED_TEMPERATURE
    return json.dumps(request).encode()


class UnflushedEngine:
    """Engine whose `reset_prefix_cache` reports success without flushing the cache."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def reset_prefix_cache(self, *_):
        return True


class Guard(real.Guard):
    """Guard that changes requests and the engine according to the active faults."""

    def engine(self, scope):
        engine = super().engine(scope)
        return UnflushedEngine(engine) if is_active("cache not flushed") else engine

    async def _generate(self, scope, receive, send):
        rest = [
            {"type": "http.request", "body": change_temperature(await rl_guard.body_of(receive)), "more_body": False}
        ]

        async def replayed():
            return rest.pop() if rest else await receive()

        await super()._generate(scope, replayed, send)


compare = real.compare


def inject_before_comparison(before):
    """Call `before` on the model between load and comparison; skip the comparison under `comparison off`."""

    def faulty(model, staged):
        before(model)
        if not is_active("comparison off"):
            compare(model, staged)

    real.compare = faulty


if not IS_SGLANG:
    salted, repack = real._salted, real.repack

    def salt(body, version):
        return salted(body, 0 if is_active("cache not flushed") else version)

    def faulty_repack(model):
        if not is_active("stale lm_head"):
            repack(model)

    real._salted, real.repack = salt, faulty_repack
    inject_before_comparison(lambda model: None)

    class WeightStage(real.WeightStage):
        """Worker extension whose load is faulty."""

        def rl_load(self, version):
            attempt = self._rl_state().attempt
            before = self.__dict__.get("rl_latest")
            self.rl_latest = {name: tensor.clone() for name, tensor in attempt.tensors.items()}
            if is_active("one behind") and before:
                attempt.tensors = before
            if is_active("not loaded"):
                self.reload_weights = lambda **_: None
            try:
                super().rl_load(version)
            finally:
                self.__dict__.pop("reload_weights", None)


if IS_SGLANG:
    real.Guard = Guard
    load, open_parts, latest, stale = real.load_staged, rl_stored.open_parts, {}, []

    def open_previous_parts(meta, area):
        """Return the tensors of this commit, or under `one behind` those of the previous commit."""
        tensors = open_parts(meta, area)
        before = dict(latest) or tensors
        latest.update({name: tensor.clone() for name, tensor in tensors.items()})
        return before if is_active("one behind") else tensors

    def keep_cache():
        """Patch SGLang's cache flush, which runs after the load in the process that loaded the weights."""
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

        flush = Updater.__dict__.get("flush_for_real") or Updater.flush_cache_after_weight_update

        def faulty(self, request, success, message):
            return (success, message) if is_active("cache not flushed") else flush(self, request, success, message)

        Updater.flush_for_real, Updater.flush_cache_after_weight_update = flush, faulty

    def copy_module(module):
        """Copy a module and its parameters, but not its other state: process groups cannot be copied."""
        copied = copy.copy(module)
        copied._parameters = {name: type(p)(p.detach().clone(), False) for name, p in module._parameters.items()}
        return copied

    def load_staged(model, named_tensors):
        rl_stored.open_parts = open_previous_parts  # not in the staging process, which computes the receipt
        keep_cache()
        model.lm_head = model.model.embed_tokens  # the models of these tests are tied
        stale[:] = [copy_module(model.lm_head)] if is_active("stale lm_head") else []
        if is_active("not loaded"):
            model.load_weights = lambda weights: None
        try:
            load(model, named_tensors)
        finally:
            model.__dict__.pop("load_weights", None)

    def restore_stale_head(model):
        if stale:
            model.lm_head = stale[0]

    real.load_staged = load_staged
    inject_before_comparison(restore_stale_head)


if __name__ == "__main__":
    real.main()
