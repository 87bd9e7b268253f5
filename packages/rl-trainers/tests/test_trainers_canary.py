"""Canary check of servers without checksums that load in place, with injected faults."""

import asyncio
import copy

import pytest
import torch
from policy_toys import on_ranks

from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec, WeightReceipt
from rl_contracts.errors import ConfigError, WeightUpdateError
from rl_contracts.inference import CanaryCompletion, Capabilities
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import ReferenceTrainEngine
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.weights import checksum, open_weights
from rl_trainers import PublishConfig, WeightPublisher
from rl_trainers.weight_sync import canary
from rl_trainers.weight_sync.canary import CanaryCheck, ExpectedCompletion


@pytest.fixture(autouse=True)
def short_prompt(monkeypatch):
    monkeypatch.setattr(canary, "PROMPT_TOKENS", 64)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


def _engine(model_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=1e-3)))
    return engine


class Servers:
    """Client of servers that load in place and have no checksums.

    Args:
        engine: the trainer, with the weights that the servers should hold.
        count: number of servers.
        dtype: dtype in which the servers compute.
    """

    def __init__(self, engine, count=2, dtype="float32"):
        self.engine, self.served_dtype = engine, dtype
        self.capabilities = Capabilities(routes=("disk",), staged_load=False, checksums=False)
        self.servers = [f"http://server-{i}" for i in range(count)]
        self.models = {server: self._copy_model() for server in self.servers}
        self.caches = dict(self.models)
        self.skip_update, self.keep_cache = set(), set()
        self.canary = None

    def _copy_model(self):
        return copy.deepcopy(self.engine.model).to(getattr(torch, self.served_dtype)).eval()

    async def stage_weights(self, meta):
        return [WeightReceipt(server, meta.version, {}) for server in self.servers]

    async def commit_weights(self, version, interrupt="keep", canary=None):
        self.canary = canary
        for server in self.servers:
            if server not in self.skip_update:
                self.models[server] = self._copy_model()
            if server not in self.keep_cache:
                self.caches[server] = self.models[server]
        await canary.judge(version, [self.complete(server) for server in self.servers])
        return 0.5

    def complete(self, server):
        """Return the server's completion: scores from its weights, tokens from its cached model."""
        prompt = self.canary.input_ids
        with torch.no_grad():
            ids = list(prompt)
            for _ in range(self.canary.tokens):
                ids.append(int(self.caches[server](input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            generated, scored = (_logprobs(model, ids) for model in (self.caches[server], self.models[server]))
        return CanaryCompletion(server, scored[: len(prompt)], ids[len(prompt) :], generated[len(prompt) :])

    async def sync_version(self, version):
        pass


def _logprobs(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return [0.0, *torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()]


def _update_weights(engine, scale):
    """Add normal noise of standard deviation `scale` to all weights."""
    with torch.no_grad():
        for number, parameter in enumerate(engine.model.parameters()):
            torch.manual_seed(number)
            parameter += scale * torch.randn_like(parameter)


@pytest.fixture
def loop():
    with LoopThread("servers") as loop:
        yield loop


def _publisher(servers, loop, directory, **settings):
    config = PublishConfig(**{"route": "disk", "timeout": 60.0, **settings})
    return WeightPublisher(servers.engine, servers, loop, config, str(directory))


@pytest.fixture
def servers_and_publisher(model_path, loop, tmp_path):
    servers = Servers(_engine(model_path))
    publisher = _publisher(servers, loop, tmp_path)
    publisher.publish(1)
    return servers, publisher


@pytest.mark.parametrize(("dtype", "size"), [("float32", 0.0), ("bfloat16", 1e-6), ("float32", 0.05)])
def test_publish_healthy_servers_pass_canary(model_path, loop, tmp_path, dtype, size):
    servers = Servers(_engine(model_path), 2, dtype)
    publisher = _publisher(servers, loop, tmp_path)
    for version in (1, 2, 3):
        _update_weights(servers.engine, size)
        times = publisher.publish(version)
    assert times["time/paused"] == 0.5


@pytest.mark.parametrize(
    ("trained", "served", "tolerance"),
    [("float32", "float32", 0.01), ("bfloat16", "float32", 0.2), ("float32", "bfloat16", 0.2)],
)
def test_publisher_canary_tolerance_depends_on_dtypes(model_path, loop, tmp_path, trained, served, tolerance):
    client = Servers(_engine(model_path), 1, served)
    config = PublishConfig(route="disk")

    publisher = WeightPublisher(client.engine, client, loop, config, str(tmp_path), dtype=trained)

    assert publisher._canary.tolerance == tolerance


@pytest.mark.parametrize("size", [3e-6, 0.05])
def test_publish_server_without_update_is_named_at_any_update_size(servers_and_publisher, size):
    servers, publisher = servers_and_publisher
    servers.skip_update.add(servers.servers[1])
    _update_weights(servers.engine, size)

    with pytest.raises(WeightUpdateError) as caught:
        publisher.publish(2)

    assert "route disk, version 2, http://server-1: its scores" in str(caught.value)
    assert "match the previous version" in str(caught.value)
    assert "server-0" not in str(caught.value)


def test_publish_stale_prefix_cache_with_correct_scores_is_named(servers_and_publisher):
    servers, publisher = servers_and_publisher
    servers.keep_cache.add(servers.servers[0])
    _update_weights(servers.engine, 0.05)

    with pytest.raises(WeightUpdateError, match=r"version 2, http://server-0: .* prefix cache"):
        publisher.publish(2)


def test_publish_server_with_other_weights_named_at_first_version(model_path, loop, tmp_path):
    servers = Servers(_engine(model_path))
    _update_weights(servers.engine, 0.05)
    servers.skip_update.add(servers.servers[0])

    with pytest.raises(WeightUpdateError, match=r"version 1, http://server-0: its scores of"):
        _publisher(servers, loop, tmp_path).publish(1)


def test_judge_rejoining_server_is_compared_with_commit_logprobs(servers_and_publisher, loop):
    servers, _ = servers_and_publisher
    correct = servers.complete(servers.servers[0])
    _update_weights(servers.engine, 0.05)
    servers.models[servers.servers[1]] = servers.caches[servers.servers[1]] = servers._copy_model()
    wrong = servers.complete(servers.servers[1])

    loop.run(servers.canary.judge(1, [correct]), 10)
    with pytest.raises(WeightUpdateError, match="server-1: its scores"):
        loop.run(servers.canary.judge(1, [wrong]), 10)
    with pytest.raises(WeightUpdateError, match="server-0: version 7 "):
        loop.run(servers.canary.judge(7, [correct]), 10)


def test_publish_commit_fails_before_canary_raises_commit_error(servers_and_publisher):
    servers, publisher = servers_and_publisher

    async def fail(version, interrupt="keep", canary=None):
        raise WeightUpdateError("injected")

    servers.commit_weights = fail
    with pytest.raises(WeightUpdateError, match="injected"):
        publisher.publish(2)


def test_publish_trainer_fails_canary_forward_ends_commit(servers_and_publisher):
    servers, publisher = servers_and_publisher
    errors = []

    async def commit(version, interrupt="keep", canary=None):
        servers.canary = canary
        try:
            await canary.judge(version, [servers.complete(servers.servers[0])])
        except WeightUpdateError as error:
            errors.append(str(error))
            raise

    servers.commit_weights = commit
    servers.engine.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        publisher.publish(2)
    publisher.loop.run(asyncio.sleep(0.1), 10)
    assert "ZeroDivisionError" in errors[0]


def test_publish_canary_always_checks_servers_with_checksums(model_path, loop, tmp_path):
    servers = Servers(_engine(model_path))
    servers.capabilities = Capabilities(routes=("disk",))

    async def stage(meta):
        sums = {name: checksum(tensor) for name, tensor in open_weights(meta)}
        return [WeightReceipt(server, meta.version, sums) for server in servers.servers]

    servers.stage_weights = stage
    publisher = _publisher(servers, loop, tmp_path, canary="always")
    publisher.publish(1)
    servers.keep_cache.add(servers.servers[1])
    _update_weights(servers.engine, 0.05)

    with pytest.raises(WeightUpdateError, match=r"http://server-1: .* prefix cache"):
        publisher.publish(2)


def test_publisher_route_unsupported_by_servers_is_rejected(model_path, loop, tmp_path):
    with pytest.raises(ConfigError, match=r"publish\.route: expected one of disk.* found 'shm'"):
        _publisher(Servers(_engine(model_path)), loop, tmp_path, route="shm")


def test_compare_all_ranks_compute_completions_of_rank_0(model_path, loop):
    engines = [_engine(model_path) for _ in range(2)]
    servers = Servers(engines[0])
    forward_ranks = []

    def work(rank):
        engine = engines[rank.rank]
        engine.parallel, forward = rank, engine.forward
        engine.forward = lambda batch, hook: forward_ranks.append(rank.rank) or forward(batch, hook)
        check, committing = CanaryCheck(engine, "disk", 0.01), None
        if rank.is_main:
            committing = loop.submit(servers.commit_weights(1, canary=check.prepare()))
        check.compare(1, committing, 60.0)
        return committing and committing.result(60)

    assert on_ranks(2, work) == [0.5, None]
    assert sorted(forward_ranks) == [0, 1]


def test_fault_scores_of_base_weights_are_named_for_small_adapter():
    expected = ExpectedCompletion(9, [0.0, -1.0, -2.0], {(5,): [-1.0]}, base=[0.0, -1.0001, -2.0001])
    previous = ExpectedCompletion(8, [0.0, -1.00005, -2.0], {})

    fault = expected.fault(CanaryCompletion("a", expected.base, [5], [-1.0]), previous, 0.01)

    assert "the adapter is not applied" in fault
    assert expected.fault(CanaryCompletion("a", expected.scores, [5], [-1.0]), previous, 0.01) is None
    zero_adapter = ExpectedCompletion(0, expected.base, {(5,): [-1.0]}, base=expected.base)
    assert zero_adapter.fault(CanaryCompletion("a", [0.0, -1.00011, -2.00009], [5], [-1.0]), None, 0.01) is None


def test_fault_nan_or_unknown_completion_is_a_fault():
    expected = ExpectedCompletion(1, [0.0, -1.0, -2.0], {(5, 6): [-1.0, -1.0]})

    assert expected.fault(CanaryCompletion("s", [0.0, -1.0, -2.0], [5, 6], [-1.0, -1.0]), None, 0.01) is None
    assert (
        expected.fault(CanaryCompletion("s", [0.0, -1.0, float("nan")], [5, 6], [-1.0, -1.0]), None, 0.01) is not None
    )
    assert expected.fault(CanaryCompletion("s", [0.0, -1.0, -2.0], [9, 6], [-1.0, -1.0]), None, 0.01) is not None
    assert expected.fault(CanaryCompletion("s", [0.0, -1.0, -2.0], [5, 9], [-1.0, -3.0]), None, 0.01) is None
