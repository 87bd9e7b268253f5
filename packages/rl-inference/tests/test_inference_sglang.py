"""SGLang's protocol against recorded and synthetic responses; `tests/servers/test_servers_sglang.py` has real ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ServeSpec
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.images import Image
from rl_inference.backends.sglang.config import PROGRAM, SGLangEngineConfig, server_job
from rl_inference.backends.sglang.protocol import SGLangProtocol, Stream, sampling_params
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, Stats
from rl_inference.client.transport import ServerBusyError

RECORDED = Path(__file__).parent / "recorded" / "sglang"
PROMPT = [84, 104, 101, 32, 115, 117, 109, 32, 105, 115]
VOCABULARY = 256


@pytest.fixture
def protocol(tmp_path: Path) -> SGLangProtocol:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return SGLangProtocol(ServeSpec(str(tmp_path), version=3))


def recorded(scene: str, name: str, index: int = 0) -> dict[str, Any]:
    exchanges = json.loads((RECORDED / f"{scene}.json").read_text())["exchanges"]
    match: dict[str, Any] = [exchange for exchange in exchanges if exchange["name"] == name][index]
    return match


def read(call: Call[GenerationChunk | None], lines: list[str]) -> list[GenerationChunk]:
    chunks = [call.parse(line.encode()) for line in lines]
    return [chunk for chunk in chunks if chunk is not None]


def drive(exchange: Exchange[Any], *responses: Any) -> tuple[list[Call[Any]], Any]:
    """Return the calls of an exchange with these responses (JSON, or bytes), and its result."""
    calls: list[Call[Any]] = []
    parsed: Any = None
    for response in (*responses, None):
        try:
            calls.append(exchange.send(parsed))
        except StopIteration as end:
            return calls, end.value
        parsed = calls[-1].parse(response if isinstance(response, bytes) else json.dumps(response).encode())
    raise AssertionError(f"unexpected further call: {calls[-1]}")


# ---- generation


def test_generate_request_equals_recorded_request(protocol: SGLangProtocol) -> None:
    request = recorded("stream", "length")["request"]

    call = protocol.generate("a", PROMPT, GenerationConfig(6, temperature=0.7, ignore_eos=True), 5, 0)

    assert (call.verb, call.target) == (request["method"], request["path"])
    assert call.body == {**request["json"], "rid": "a"}
    with_schema = protocol.generate("a", PROMPT, GenerationConfig(6), 5, 0, {"type": "boolean"}).body
    assert with_schema is not None
    assert json.loads(with_schema["sampling_params"]["json_schema"]) == {"type": "boolean"}


def test_generate_stream_returns_each_token_once_and_versions_last(protocol: SGLangProtocol) -> None:
    lines = recorded("stream", "length")["response"]["lines"]
    last = json.loads(lines[-2].removeprefix("data:"))

    chunks = read(protocol.generate("a", PROMPT, GenerationConfig(6), None, 0), lines)

    assert len(chunks) > 1
    assert [token for chunk in chunks for token in chunk.output_ids] == last["output_ids"]
    entries = last["meta_info"]["output_token_logprobs"]
    assert [p for chunk in chunks for p in chunk.logprobs] == [entry[0] for entry in entries]
    assert all((chunk.finish, chunk.stamps, chunk.versions) == (None, None, []) for chunk in chunks[:-1])
    assert (chunks[-1].finish, chunks[-1].stamps) == ("length", [3] * 6)  # `default` is the initial version


def test_generate_aborted_completion_keeps_its_tokens(protocol: SGLangProtocol) -> None:
    for index in range(3):
        lines = recorded("abort", "interrupted stream", index)["response"]["lines"]

        chunks = read(protocol.generate("a", PROMPT, GenerationConfig(24), None, 0), lines)

        assert chunks[-1].finish == "abort"
        assert chunks[-1].stamps == [3] * len([token for chunk in chunks for token in chunk.output_ids])


def test_generate_during_update_has_version_of_each_token(protocol: SGLangProtocol) -> None:
    exchange = recorded("update", "interrupted stream")
    spans = json.loads(exchange["response"]["lines"][-2].removeprefix("data:"))["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "1"]

    [*_, last] = read(
        SGLangProtocol(replace(protocol._spec, version=0)).generate("a", PROMPT, GenerationConfig(24), None, 0),
        exchange["response"]["lines"],
    )

    assert last.stamps == [0] * spans[0]["end"] + [1] * (spans[1]["end"] - spans[1]["start"])


IMAGE = Image(b"\x89PNG", 1, 1)


def test_generate_images_sends_one_placeholder_each(protocol: SGLangProtocol, tmp_path: Path) -> None:
    """SGLang expands each placeholder, also if the prompt has one for each feature of the image."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "image_token_id": 9}))
    prompt = [5, 9, 9, 9, 6, 9, 9, 7]

    body = protocol.generate("a", prompt, GenerationConfig(6), None, 0, None, (IMAGE, IMAGE)).body

    without = protocol.generate("a", prompt, GenerationConfig(6), None, 0).body
    assert without is not None
    assert body == {**without, "input_ids": [5, 9, 6, 9, 7], "image_data": ["data:image/png;base64,iVBORw=="] * 2}


def test_generate_images_other_prompt_length_is_rejected(protocol: SGLangProtocol, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "image_token_index": 9}))
    lines = recorded("stream", "length")["response"]["lines"]  # the prompt had `len(PROMPT)` tokens

    def chunks(*more: int) -> list[GenerationChunk]:
        return read(protocol.generate("a", [*PROMPT, *more], GenerationConfig(6), None, 0, None, (IMAGE,)), lines)

    assert chunks()[-1].finish == "length"
    with pytest.raises(InferenceError, match="images: expected SGLang to use the 11 tokens"):
        chunks(9)


def test_generate_images_of_text_model_are_rejected(protocol: SGLangProtocol) -> None:
    with pytest.raises(InferenceError, match="image_token_id"):
        protocol.generate("a", PROMPT, GenerationConfig(6), None, 0, None, (IMAGE,))


def message(ids: list[int], total: int, reason: Any = None, **fields: Any) -> bytes:
    meta = {"completion_tokens": total, "finish_reason": reason, **fields}
    meta.setdefault("output_token_logprobs", [[-token / 10, token, None] for token in ids])
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode()


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), min_size=1), st.booleans(), st.data())
def test_stream_in_any_pieces_returns_each_token_once(
    pieces: list[list[int]], cumulative: bool, data: st.DataObject
) -> None:
    ids = [token for piece in pieces for token in piece]
    split = data.draw(st.integers(0, len(ids)))
    spans = [{"version": "4", "start": 0, "end": split}, {"version": "5", "start": split, "end": len(ids)}]
    stream, results, received = Stream(3, 100), [], list[int]()
    for index, piece in enumerate(pieces):
        received = received + piece
        last = index == len(pieces) - 1
        fields = {"weight_versions": spans} if last else {}
        line = message(received if cumulative else piece, len(received), {"type": "stop"} if last else None, **fields)
        results.append(stream.read(line))

    chunks = [chunk for chunk in results if chunk is not None]
    assert [token for chunk in chunks for token in chunk.output_ids] == ids
    assert [p for chunk in chunks for p in chunk.logprobs] == [-token / 10 for token in ids]
    assert chunks[-1].stamps == [4] * split + [5] * (len(ids) - split)
    assert chunks[-1].finish == "stop"


def test_stream_invalid_message_raises_value_key_or_type_error() -> None:
    for line in (
        b"data: {",
        b"data: []",
        b"data: {}",
        message([1, 2], 3),
        message([1], 1, output_token_logprobs=[]),
        message([1], 1, output_token_logprobs=[[-1.0, 2, None]]),
        message([1], 1, output_token_logprobs=[[None, 1, None]]),
        message([1], 1, {"type": "stop"}),
        message([1], 1, {"type": "stop"}, weight_versions=[{"version": "new", "start": 0, "end": 1}]),
        message([1], 1, {"type": "stop"}, weight_versions=[{"version": "1", "start": 0, "end": 2}]),
        message([1], 1, {"type": "unknown"}, weight_versions=[{"version": "1", "start": 0, "end": 1}]),
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Stream(0, 10).read(line)


def test_stream_failed_request_has_the_servers_message() -> None:
    rejected = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}

    with pytest.raises(InferenceError, match="too long"):
        Stream(0, 10).read(message([], 0, rejected))
    with pytest.raises(ServerBusyError, match="queue"):
        Stream(0, 10).read(message([], 0, {**rejected, "message": "the queue is full", "status_code": 503}))
    with pytest.raises(InferenceError, match="longer than"):
        Stream(0, 10).read(b'data: {"error": {"message": "longer than", "code": 400}}')
    failed = Stream(0, 10).read(message([], 0, {**rejected, "message": "out of memory", "status_code": 500}))
    assert failed is not None
    assert failed.error == "out of memory"


def test_generate_stop_tokens_with_ignore_eos_continue_after_end_token(protocol: SGLangProtocol) -> None:
    generation = GenerationConfig(3, stop_token_ids=[7], ignore_eos=True)

    def finish(ids: list[int], matched: int) -> str | None:
        call = protocol.generate("a", PROMPT, generation, None, 0)
        assert call.body is not None
        assert call.body["sampling_params"]["stop_token_ids"] == [7]
        assert "ignore_eos" not in call.body["sampling_params"]
        spans = [{"version": "3", "start": 0, "end": len(ids)}]
        chunk = call.parse(message(ids, len(ids), {"type": "stop", "matched": matched}, weight_versions=spans))
        assert chunk is not None
        return chunk.finish

    assert finish([5, 7], 7) == "stop"
    assert finish([5, 2], 2) == "abort"  # so that the client continues after the end token
    assert finish([5, 6, 2], 2) == "length"


def test_sampling_params_omit_disabled_settings() -> None:
    assert sampling_params(GenerationConfig(9)) == {"max_new_tokens": 9, "temperature": 1.0}
    assert sampling_params(GenerationConfig(9, top_p=0.5, top_k=3, min_p=0.1)) == {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
    }


def test_sampling_params_minimum_length_is_sent_only_if_harmless() -> None:
    fixed_length = sampling_params(GenerationConfig(9, min_new_tokens=9, stop_token_ids=[7]))

    assert fixed_length == {"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    assert "min_new_tokens" not in sampling_params(GenerationConfig(9, min_new_tokens=3, ignore_eos=True))
    with pytest.raises(InferenceError, match=r"generation\.min_new_tokens: .*found 3"):
        sampling_params(GenerationConfig(9, min_new_tokens=3))


@pytest.mark.parametrize("ids", [[VOCABULARY], [5, -1]])
def test_request_with_unknown_token_id_is_not_sent(protocol: SGLangProtocol, ids: list[int]) -> None:
    for request in (
        lambda: protocol.generate("a", ids, GenerationConfig(), None, 0),
        lambda: protocol.generate("a", PROMPT, GenerationConfig(stop_token_ids=ids), None, 0),
        lambda: next(protocol.score(ids, 1.0)),
    ):
        with pytest.raises(InferenceError, match=f"from 0 to {VOCABULARY - 1}"):
            request()


def test_generate_without_vocab_size_is_rejected(tmp_path: Path) -> None:
    for spec in (ServeSpec(), ServeSpec(str(tmp_path))):
        with pytest.raises(InferenceError, match=r"config\.json.*vocab_size"):
            SGLangProtocol(spec).generate("a", PROMPT, GenerationConfig(), None, 0)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 200}}))
    SGLangProtocol(ServeSpec(str(tmp_path))).generate("a", PROMPT, GenerationConfig(), None, 0)


def test_generate_beyond_context_is_shortened_or_rejected(protocol: SGLangProtocol) -> None:
    short_context = SGLangProtocol(protocol._spec, len(PROMPT) + 2)

    call = short_context.generate("a", PROMPT, GenerationConfig(9, min_new_tokens=5, ignore_eos=True), None, 0)

    assert call.body is not None
    assert call.body["sampling_params"]["max_new_tokens"] == 2
    with pytest.raises(InferenceError, match=r"input_ids: expected at most 11 tokens .*12.*found 12"):
        short_context.generate("a", [*PROMPT, 1, 2], GenerationConfig(9), None, 0)


# ---- control


def test_score_returns_recorded_log_probs_at_temperature_1(protocol: SGLangProtocol) -> None:
    exchange = recorded("score", "T = 0.7, no token generated")
    request, response = exchange["request"]["json"], exchange["response"]["json"]

    [call], scores = drive(protocol.score(PROMPT, 1.0), response)

    assert call.body is not None
    assert {name: value for name, value in request.items() if name != "sampling_params"}.items() <= call.body.items()
    assert call.body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert scores == [0.0, *(entry[0] for entry in response["meta_info"]["input_token_logprobs"][1:])]
    with pytest.raises(ValueError, match="of 9 tokens, found 10"):
        drive(protocol.score(PROMPT[1:], 1.0), response)


@pytest.mark.parametrize(
    ("call_method", "request_text", "response", "expected"),
    [
        (
            lambda p: p.stats(),
            "GET /rl/stats None",
            {
                "version": 8,
                "paused": True,
                "running": 1,
                "waiting": 2,
                "generated_tokens": 3,
                "busy_seconds": 2.5,
            },
            Stats(8, True, 1.0, 2.0, 3.0, 2.5),
        ),
        (
            lambda p: p.pause("wait", 60.0),
            "POST /rl/pause {'mode': 'wait', 'lease': 60.0}",
            {"paused": False, "generated_tokens": 7},
            7.0,
        ),
        (lambda p: p.abort("a"), "POST /abort_request {'rid': 'a'}", {}, None),
    ],
)
def test_control_calls_send_request_and_parse_response(
    protocol: SGLangProtocol,
    call_method: Callable[[SGLangProtocol], Exchange[Any]],
    request_text: str,
    response: Any,
    expected: Any,
) -> None:
    [call], result = drive(call_method(protocol), response)

    assert f"{call.verb} {call.target} {call.body}" == request_text
    assert result == expected


def test_error_message_is_plain_text(protocol: SGLangProtocol) -> None:
    for scene, name, expected in (
        ("errors", "too long", "longer than the model's context length"),
        ("errors", "wrong type", "expected i64"),
        ("errors", "no such route", "expected SGLang with the control routes"),
        ("abort", "pause, unknown mode", "mode"),
        ("update", "update to what is not there", "Failed to get weights iterator"),
    ):
        text = protocol.error_message(json.dumps(recorded(scene, name)["response"]["json"]).encode())

        assert expected in text
        assert not text.startswith("{")
    assert protocol.error_message(b'{"error": "Unauthorized"}') == "Unauthorized"
    assert protocol.error_message(b"<!DOCTYPE html><html>") == "a page of HTML, so this is another kind of server"
    assert protocol.error_message(b"Not here") == "Not here"


# ---- settings and command


def test_server_job_has_settings_and_no_key() -> None:
    config = SGLangEngineConfig([], "bfloat16", "", 1024, max_sequences=8, python="/py", arguments=["--x", "1"])
    strategy = ParallelStrategy(data=2, tensor=2)

    job = server_job(config, ServeSpec("/models/0", strategy, "/weights", version=7, gpus=2, cpus=3))

    command = " ".join(job.command)
    assert job.command[:2] == ("/py", str(PROGRAM))
    assert PROGRAM.is_file()
    for words in (
        "--model-path /models/0 --host {host} --port {port} --dtype bfloat16 --weight-version 7 --tp-size 2",
        "--stream-interval 8 --log-level-http warning --max-running-requests 8",
        "--mem-fraction-static 0.85 --context-length 1032",
        "--incremental-streaming-output --skip-server-warmup",
    ):
        assert words in command
    assert job.command[-2:] == ("--x", "1")
    assert "--device" not in job.command
    assert "key" not in command
    assert "radix" not in command, "SGLang reuses prefixes by default"
    assert (job.count, job.gpus, job.cpus, job.ready_path) == (2, 2, 3, "/health")
    assert job.env["PYTHONPATH"] == ""  # packages of the command must not hide those of the interpreter
    variables = {"RL_WEIGHTS_DIR": "/weights", "RL_WEIGHT_VERSION": "7", "RL_SERVER_NAME": "rollout-{index}"}
    assert variables.items() <= job.env.items()
    assert "SGLANG_USE_CPU_ENGINE" not in job.env


def test_server_job_on_cpu_has_cpu_options(tmp_path: Path) -> None:
    job, spec = server_job(SGLangEngineConfig(), ServeSpec(str(tmp_path), device="cpu")), ServeSpec("/models/0", gpus=1)

    assert job.command[0] == sys.executable
    assert "PYTHONPATH" not in job.env
    assert "--max-running-requests 64 --max-total-tokens 65536" in " ".join(job.command)
    assert "--max-running-requests" not in server_job(SGLangEngineConfig(dtype="bfloat16"), spec).command
    assert "--device cpu --attention-backend torch_native" in " ".join(job.command)
    assert job.env["SGLANG_USE_CPU_ENGINE"] == job.env["HF_HUB_OFFLINE"] == "1"
    assert not Path(job.env["SGLANG_NCCL_SO_PATH"]).exists()


@pytest.mark.parametrize(
    ("config", "spec", "setting"),
    [
        ({}, {"strategy": ParallelStrategy(data=2, expert=2)}, "allocation"),
        (
            {"arguments": ["--tp", "2", "--hicache-storage-backend=file"]},
            {},
            "server.arguments: .*, found '--tp, --hicache-storage-backend=file'",
        ),
        ({"arguments": ["--api_key", "k"]}, {}, "server.arguments"),
        (
            {"quantization": "fp8", "dtype": "bfloat16"},
            {"device": "cuda", "gpus": 1, "weights_dir": "/weights"},
            "server.quantization: expected none if weights are updated",
        ),
        ({}, {"device": "cuda", "gpus": 1}, "server.dtype: expected bfloat16 or float16 on GPUs"),
    ],
)
def test_check_unsupported_setting_is_rejected(config: dict[str, Any], spec: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        SGLangEngineConfig(**config).check(ServeSpec("/models/0", **spec))
