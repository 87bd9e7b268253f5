"""Collectives of `ParallelContext` with two real processes on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import EngineError
from rl_contracts.testing.processes import DEVICE_VARIABLE, run_ranks

PROGRAM = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from rl_contracts.errors import DataError, EngineError, is_user_error
from rl_contracts.batch.parallel import ParallelContext

rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=limit)
group = dist.group.WORLD
context = ParallelContext(rank, world, rank, world, host_group=group, dp_host_group=group)
results = {}

local = {
    "rows": torch.arange(3 * rank, dtype=torch.int64).view(rank, 3),
    "flags": torch.tensor([rank == 0]),
    "half": torch.full((2, 2), rank + 0.5, dtype=torch.bfloat16).t(),
}
local["alias"] = local["flags"]
gathered = context.gather_tensors(local)
results["gathered"] = [{k: [str(v.dtype), list(v.shape), v.tolist()] for k, v in sorted(p.items())} for p in gathered]
results["nothing"] = [sorted(p) for p in context.gather_tensors({})]
results["uneven"] = [sorted(p) for p in context.gather_tensors({"x": torch.zeros(2)} if rank else {}, all_ranks=True)]

value = {"text": "é" * 5000, "list": [1, None, 2.5]} if rank == 0 else {"local": rank}
results["broadcast"] = context.broadcast_json(value) == {"text": "é" * 5000, "list": [1, None, 2.5]}
results["broadcast_none"] = context.broadcast_json(None if rank == 0 else 5)
results["json"] = context.gather_json({"rank": rank, "pad": "x" * rank})

values = torch.tensor([1.0 + rank, -5.0 * rank])
results["sum"] = context.sum_over_replicas(values).tolist()
results["max"] = context.max_over_replicas(values).tolist()
results["untouched"] = values.tolist() == [1.0 + rank, -5.0 * rank]

context.agree(None, "no failure")
for name, failing in (("one", [1]), ("both", [0, 1])):
    local_error = DataError(f"disk of {rank} is full") if rank in failing else None
    try:
        context.agree(local_error, "saving")
    except EngineError as error:
        results[name] = [str(error), error.__cause__ is local_error, is_user_error(error)]
try:
    with context.agree_on_errors("opening"):
        if rank == 1:
            raise OSError("no such file")
except EngineError as error:
    results["block"] = [str(error), repr(error.__cause__), is_user_error(error)]
context.barrier()
results["main"] = context.is_main
context.release_groups()
try:
    context.gather_json(1)
except EngineError as error:
    results["released"] = str(error)
print(json.dumps(results))
# drop the last reference to the gloo group, which ends its threads: a thread that frees a tensor at exit would abort
group = None
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("gloo") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if sys.platform == "darwin":
        environment["GLOO_SOCKET_IFNAME"] = "lo0"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), "2", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err.decode()
            results.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def test_gather_tensors_different_shapes_returns_all_replicas_in_order(ranks: Any) -> None:
    expected = [
        {
            "alias": ["torch.bool", [1], [rank == 0]],
            "flags": ["torch.bool", [1], [rank == 0]],
            "half": ["torch.bfloat16", [2, 2], [[rank + 0.5] * 2] * 2],
            "rows": ["torch.int64", [rank, 3], [[0, 1, 2]] * rank],
        }
        for rank in range(2)
    ]
    for results in ranks:
        assert results["gathered"] == expected
        assert results["nothing"] == [[], []]
        assert results["uneven"] == [[], ["x"]]


def test_broadcast_json_gives_rank_0_value_and_gather_json_all_values(ranks: Any) -> None:
    for results in ranks:
        assert results["broadcast"] is True
        assert results["broadcast_none"] is None
        assert results["json"] == [{"rank": 0, "pad": ""}, {"rank": 1, "pad": "x"}]


def test_sum_and_max_over_replicas_are_new_tensors(ranks: Any) -> None:
    for results in ranks:
        assert results["sum"] == [3.0, -5.0]
        assert results["max"] == [2.0, 0.0]
        assert results["untouched"] is True


@pytest.mark.guarantee(
    "An error on one rank is raised on all ranks, so that no rank hangs in a collective.", area="failures"
)
def test_agree_failure_on_one_rank_raises_on_all_and_names_it(ranks: Any) -> None:
    for rank, results in enumerate(ranks):
        message, local_error_is_cause, is_user_error = results["one"]
        assert message == "saving failed on 1 of 2 ranks. rank 1: DataError: disk of 1 is full"
        assert local_error_is_cause is True
        assert is_user_error is True  # a DataError is a user error, even when raised on another rank
        assert "rank 0: DataError: disk of 0 is full; rank 1: DataError: disk of 1 is full" in results["both"][0]
        assert results["main"] is (rank == 0)


def test_agree_on_errors_block_fails_on_one_rank_raises_on_all(ranks: Any) -> None:
    message = "opening failed on 1 of 2 ranks. rank 1: OSError: no such file"
    causes = ("None", "OSError('no such file')")
    assert [results["block"] for results in ranks] == [[message, cause, False] for cause in causes]


def test_collective_after_release_groups_raises_engine_error(ranks: Any) -> None:
    assert all("released" in results["released"] for results in ranks)


def test_one_rank_needs_no_process_group() -> None:
    context, tensors = ParallelContext(), {"x": torch.ones(2)}

    assert context.is_main
    assert context.is_dp_leader
    assert context.gather_tensors(tensors) == [tensors]
    assert context.broadcast_json({"a": 1}) == {"a": 1}
    assert context.gather_json(3) == [3]
    assert torch.equal(context.sum_over_replicas(tensors["x"]), tensors["x"])
    assert context.sum_over_replicas(tensors["x"]) is not tensors["x"]
    context.barrier()
    context.agree(None, "nothing")
    with pytest.raises(EngineError, match="local"):
        context.agree(EngineError("local"), "saving")
    with pytest.raises(OSError, match="no such file"), context.agree_on_errors("opening"):
        raise OSError("no such file")


def test_run_ranks_with_fewer_gpus_than_ranks_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(pytest.skip.Exception, match="needs 2 CUDA devices"):
        run_ranks(tmp_path / "unused.py", [], 2)
