"""The canary: servers without checksums, by a client that loads in place, with planted faults."""

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
from rl_trainers.weight_sync.canary import CanaryCheck, ExpectedCompletion


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


def _engine(model_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=1e-3)))
    return engine


class Servers:
    """A client of servers that load in place and give no checksums.

    Args:
        engine: whose weights they should hold.
        count: of servers.
        dtype: in which they compute.
    """

    def __init__(self, engine, count=2, dtype="float32"):
        self.engine, self.served_dtype = engine, dtype
        self.capabilities = Capabilities(routes=("disk",), staged_load=False, checksums=False)
        self.servers = [f"http://server-{i}" for i in range(count)]
        self.models = {server: self._weights() for server in self.servers}
        self.caches = dict(self.models)
        self.keeps, self.unflushed = set(), set()
        self.canary = None

    def _weights(self):
        return copy.deepcopy(self.engine.model).to(getattr(torch, self.served_dtype)).eval()

    async def stage_weights(self, meta):
        return [WeightReceipt(server, meta.version, {}) for server in self.servers]

    async def commit_weights(self, version, interrupt="keep", canary=None):
        self.canary = canary
        for server in self.servers:
            if server not in self.keeps:
                self.models[server] = self._weights()
            if server not in self.unflushed:
                self.caches[server] = self.models[server]
        await canary.judge(version, [self.answer(server) for server in self.servers])
        return 0.5

    def answer(self, server):
        """What it shows: scores by its weights, and tokens by what lies in its cache."""
        prompt = self.canary.input_ids
        with torch.no_grad():
            ids = list(prompt)
            for _ in range(self.canary.tokens):
                ids.append(int(self.caches[server](input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            made, scored = (_logprobs(model, ids) for model in (self.caches[server], self.models[server]))
        return CanaryCompletion(server, scored[: len(prompt)], ids[len(prompt) :], made[len(prompt) :])

    async def sync_version(self, version):
        pass


def _logprobs(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return [0.0, *torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()]


def _move(engine, size):
    """An update of the weights."""
    with torch.no_grad():
        for number, parameter in enumerate(engine.model.parameters()):
            torch.manual_seed(number)
            parameter += size * torch.randn_like(parameter)


@pytest.fixture
def loop():
    with LoopThread("servers") as loop:
        yield loop


def _publisher(servers, loop, directory, **settings):
    config = PublishConfig(**{"route": "disk", "canary_tokens": 64, "timeout": 60.0, **settings})
    return WeightPublisher(servers.engine, servers, loop, config, str(directory))


@pytest.fixture
def parts(model_path, loop, tmp_path):
    servers = Servers(_engine(model_path))
    publisher = _publisher(servers, loop, tmp_path)
    publisher.publish(1)
    return servers, publisher


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [0.0, 1e-6, 0.05])
def test_publish_servers_that_serve_what_was_sent_pass(model_path, loop, tmp_path, dtype, size):
    servers = Servers(_engine(model_path), 2, dtype)
    publisher = _publisher(servers, loop, tmp_path)
    for version in (1, 2, 3):
        _move(servers.engine, size)
        times = publisher.publish(version)
    assert times["time/paused"] == 0.5


@pytest.mark.parametrize(
    ("trainer", "servers", "tolerance"),
    [("float32", "float32", 0.01), ("bfloat16", "float32", 0.2), ("float32", "bfloat16", 0.2)],
)
def test_publisher_is_strict_only_where_both_compute_in_float32(
    model_path, loop, tmp_path, trainer, servers, tolerance
):
    found = Servers(_engine(model_path), 1, servers)
    config = PublishConfig(route="disk", canary_tokens=64)

    publisher = WeightPublisher(found.engine, found, loop, config, str(tmp_path), dtype=trainer)

    assert publisher._canary.tolerance == tolerance


@pytest.mark.parametrize("size", [3e-6, 0.05])
def test_publish_server_that_did_not_load_is_named_however_small_the_update(parts, size):
    servers, publisher = parts
    servers.keeps.add(servers.servers[1])
    _move(servers.engine, size)

    with pytest.raises(WeightUpdateError) as caught:
        publisher.publish(2)

    assert "route disk, version 2, http://server-1: its scores" in str(caught.value)
    assert "those of the version before" in str(caught.value)
    assert "server-0" not in str(caught.value)


def test_publish_stale_prefix_cache_is_named_although_the_scores_are_right(parts):
    servers, publisher = parts
    servers.unflushed.add(servers.servers[0])
    _move(servers.engine, 0.05)

    with pytest.raises(WeightUpdateError, match=r"version 2, http://server-0: its scores are right, .* prefix cache"):
        publisher.publish(2)


def test_publish_server_with_another_model_is_named_at_the_first_version(model_path, loop, tmp_path):
    servers = Servers(_engine(model_path))
    _move(servers.engine, 0.05)
    servers.keeps.add(servers.servers[0])

    with pytest.raises(WeightUpdateError, match=r"version 1, http://server-0: its scores .* other weights than"):
        _publisher(servers, loop, tmp_path).publish(1)


def test_judge_server_that_comes_back_is_compared_with_what_was_right_at_the_commit(parts, loop):
    servers, _ = parts
    good = servers.answer(servers.servers[0])
    _move(servers.engine, 0.05)
    servers.models[servers.servers[1]] = servers.caches[servers.servers[1]] = servers._weights()
    bad = servers.answer(servers.servers[1])

    loop.run(servers.canary.judge(1, [good]), 10)
    with pytest.raises(WeightUpdateError, match="server-1: its scores"):
        loop.run(servers.canary.judge(1, [bad]), 10)
    with pytest.raises(WeightUpdateError, match="version 7 was never compared"):
        loop.run(servers.canary.judge(7, [good]), 10)


def test_publish_commit_that_fails_before_the_canary_raises_its_own_error(parts):
    servers, publisher = parts

    async def fails(version, interrupt="keep", canary=None):
        raise WeightUpdateError("planted")

    servers.commit_weights = fails
    with pytest.raises(WeightUpdateError, match="planted"):
        publisher.publish(2)


def test_publish_trainer_that_cannot_compute_ends_the_commit_too(parts):
    servers, publisher = parts
    ended = []

    async def commit(version, interrupt="keep", canary=None):
        servers.canary = canary
        try:
            await canary.judge(version, [servers.answer(servers.servers[0])])
        except WeightUpdateError as error:
            ended.append(str(error))
            raise

    servers.commit_weights = commit
    servers.engine.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        publisher.publish(2)
    publisher.loop.run(asyncio.sleep(0.1), 10)
    assert "could not compute the canary" in ended[0]


def test_publish_canary_always_is_given_to_servers_with_checksums_too(model_path, loop, tmp_path):
    servers = Servers(_engine(model_path))
    servers.capabilities = Capabilities(routes=("disk",))

    async def stage(meta):
        sums = {name: checksum(tensor) for name, tensor in open_weights(meta)}
        return [WeightReceipt(server, meta.version, sums) for server in servers.servers]

    servers.stage_weights = stage
    publisher = _publisher(servers, loop, tmp_path, canary="always")
    publisher.publish(1)
    servers.unflushed.add(servers.servers[1])
    _move(servers.engine, 0.05)

    with pytest.raises(WeightUpdateError, match=r"http://server-1: its scores are right"):
        publisher.publish(2)


def test_publish_route_that_the_servers_cannot_take_is_refused(model_path, loop, tmp_path):
    with pytest.raises(ConfigError, match=r"publish\.route: expected one of disk.* found 'shm'"):
        _publisher(Servers(_engine(model_path)), loop, tmp_path, route="shm")


def test_attend_all_ranks_compute_what_rank_0_was_told(model_path, loop):
    engines = [_engine(model_path) for _ in range(2)]
    servers = Servers(engines[0])
    asked = []

    def work(rank):
        engine = engines[rank.rank]
        engine.parallel, forward = rank, engine.forward
        engine.forward = lambda rows, what: asked.append(rank.rank) or forward(rows, what)
        check, committing = CanaryCheck(engine, "disk", 32, 0.01), None
        if rank.is_main:
            committing = loop.submit(servers.commit_weights(1, canary=check.prepare()))
        check.compare(1, committing, 60.0)
        return committing and committing.result(60)

    assert on_ranks(2, work) == [0.5, None]
    assert sorted(asked) == [0, 1]


def test_fault_scores_of_the_base_weights_are_named_however_small_the_adapter_is():
    right = ExpectedCompletion(9, [0.0, -1.0, -2.0], {(5,): [-1.0]}, base=[0.0, -1.0001, -2.0001])
    before = ExpectedCompletion(8, [0.0, -1.00005, -2.0], {})

    unapplied = right.fault(CanaryCompletion("a", right.base, [5], [-1.0]), before, 0.01)

    assert "and they are those of the base weights: the adapter is not applied" in unapplied
    assert right.fault(CanaryCompletion("a", right.scores, [5], [-1.0]), before, 0.01) is None
    without = ExpectedCompletion(0, right.base, {(5,): [-1.0]}, base=right.base)  # an adapter that is zero
    assert without.fault(CanaryCompletion("a", [0.0, -1.00011, -2.00009], [5], [-1.0]), None, 0.01) is None


def test_fault_nan_is_off_and_an_answer_that_shares_nothing_is_too():
    right = ExpectedCompletion(1, [0.0, -1.0, -2.0], {(5, 6): [-1.0, -1.0]})

    assert right.fault(CanaryCompletion("s", [0.0, -1.0, -2.0], [5, 6], [-1.0, -1.0]), None, 0.01) is None
    assert right.fault(CanaryCompletion("s", [0.0, -1.0, float("nan")], [5, 6], [-1.0, -1.0]), None, 0.01) is not None
    assert right.fault(CanaryCompletion("s", [0.0, -1.0, -2.0], [9, 6], [-1.0, -1.0]), None, 0.01) is not None
    assert right.fault(CanaryCompletion("s", [0.0, -1.0, -2.0], [5, 9], [-1.0, -3.0]), None, 0.01) is None
