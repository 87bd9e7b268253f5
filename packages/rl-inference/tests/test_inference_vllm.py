"""vLLM's protocol against responses recorded from the real server (tests/recorded/vllm), its settings and command."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ServeSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.images import Image
from rl_contracts.inference import ServedModel
from rl_inference import VLLMEngine, VLLMEngineConfig
from rl_inference.backends.vllm.config import INSIDE, RESERVED_ARGUMENTS
from rl_inference.backends.vllm.protocol import VLLMProtocol
from rl_inference.client.protocol import GenerationChunk, Health

RECORDED = Path(__file__).parent / "recorded" / "vllm"
PROMPT = [84, 104, 101, 32, 115, 117, 109, 32, 105, 115]
PROTOCOL = VLLMProtocol(version=7)


def exchanges(scene: str, name: str) -> list[dict[str, Any]]:
    """Return the recorded exchanges of a name."""
    matches = [
        entry for entry in json.loads((RECORDED / f"{scene}.json").read_text())["exchanges"] if entry["name"] == name
    ]
    assert matches
    return matches


def body_of(entry: dict[str, Any]) -> bytes:
    """Return the unchanged body of a recorded response."""
    response = entry["response"]
    return response["text"].encode() if "text" in response else json.dumps(response["json"]).encode()


def read(entry: dict[str, Any]) -> list[GenerationChunk]:
    """Return the chunks that the protocol parses from a recorded stream."""
    call = PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0)
    chunks = [call.parse(line.encode()) for line in entry["response"]["lines"]]
    return [chunk for chunk in chunks if chunk is not None]


def drive(exchange: Any, *responses: bytes) -> tuple[list[Any], Any]:
    """Return the calls of an exchange with these responses, and its result."""
    calls, call = [], next(exchange)
    try:
        for response in responses:
            calls.append(call)
            call = exchange.send(call.parse(response))
    except StopIteration as end:
        return calls, end.value
    raise AssertionError(f"unexpected further call: {call}")


# ---- tokens


def test_generate_request_has_recorded_and_disabled_settings():
    generation = GenerationConfig(max_new_tokens=6, temperature=0.7, ignore_eos=True, stop_token_ids=[171])

    call = PROTOCOL.generate("mine", PROMPT, generation, 3, 0)

    recorded = exchanges("tokens", "stop token, stream")[0]["request"]
    assert (call.verb, call.target) == (recorded["method"], recorded["path"])
    body = call.body
    assert body is not None
    sampling = body["sampling_params"]
    assert body | {"sampling_params": {}} == recorded["json"] | {"sampling_params": {}}
    assert recorded["json"]["sampling_params"].items() <= sampling.items()
    assert {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "detokenize": False}.items() <= sampling.items()
    schema = {"type": "boolean"}
    with_schema = PROTOCOL.generate("mine", PROMPT, generation, 3, 0, schema).body
    assert with_schema is not None
    assert with_schema["sampling_params"] == sampling | {"structured_outputs": {"json": schema}}
    assert "seed" not in (PROTOCOL.generate("a", PROMPT, generation, None, 0).body or {})["sampling_params"]


def test_generate_images_are_sent_and_other_prompt_is_rejected():
    image = Image(b"\x89PNG", 1, 1)
    message = json.loads(_message().removeprefix(b"data: "))

    call = PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0, None, (image, image))

    part = {"type": "image_url", "url": "data:image/png;base64,iVBORw=="}
    added = {"content_parts": [part, part], "return_token_ids": True}
    assert call.body == {**(PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0).body or {}), **added}
    first, second = (
        b"data: " + json.dumps({**message, **more}).encode() for more in ({"prompt_token_ids": PROMPT}, {})
    )
    assert [chunk.output_ids for line in (first, second) if (chunk := call.parse(line))] == [[5], [5]]
    other = PROTOCOL.generate("mine", [*PROMPT, 9], GenerationConfig(), 3, 0, None, (image,))
    with pytest.raises(InferenceError, match="images: expected vLLM to use the 11 tokens of the prompt, found 10"):
        other.parse(first)


def test_generate_minimum_length_that_changes_log_probs_is_rejected():
    """vLLM masks the tokens that end a completion until the minimum length, also in the log-probs."""

    def minimum(**generation: Any) -> int:
        call = PROTOCOL.generate("mine", PROMPT, GenerationConfig(min_new_tokens=4, **generation), 3, 0)
        assert call.body is not None
        return call.body["sampling_params"]["min_tokens"]

    assert minimum(ignore_eos=True) == 0
    assert minimum(temperature=0.0) == minimum(temperature=0.0, ignore_eos=True, stop_token_ids=[7]) == 4
    for unsupported in ({}, {"ignore_eos": True, "stop_token_ids": [7]}):
        with pytest.raises(InferenceError, match=r"generation\.min_new_tokens: .*found 4"):
            minimum(**unsupported)


@pytest.mark.parametrize(
    ("name", "finish", "ids"),
    [("length, stream", "length", [211, 155, 171, 48, 190, 135]), ("stop token, stream", "stop", [211, 155, 171])],
)
def test_generate_recorded_stream_returns_tokens_and_versions(name, finish, ids):
    chunks = read(exchanges("tokens", name)[0])

    assert [token for chunk in chunks for token in chunk.output_ids] == ids
    assert chunks[0].logprobs == [-3.106067419052124]
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]
    assert chunks[-1].stamps == [7] * len(ids)  # `default` is the initial version
    assert not any(chunk.versions for chunk in chunks)


def test_generate_aborted_or_updated_stream_has_all_versions():
    aborted = read(exchanges("tokens", "interrupted stream")[0])
    updated = read(exchanges("update", "interrupted stream")[0])

    assert (aborted[-1].finish, aborted[-1].output_ids, aborted[-1].stamps) == ("abort", [], [7] * 4)
    assert updated[-1].stamps == [7] * 5 + [1] * 55
    assert sum(len(chunk.output_ids) for chunk in updated) == 60


def test_generate_calls_do_not_share_stream_state():
    first, second = (PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0) for _ in range(2))
    lines = [line.encode() for line in exchanges("tokens", "length, stream")[0]["response"]["lines"]]
    first.parse(lines[0])

    assert [chunk.finish for line in lines if (chunk := second.parse(line))][-1] == "length"


def _message(**choice: Any) -> bytes:
    entry = {"token_id": 5, "logprob": -1.0}
    fields = {
        "finish_reason": None,
        "token_ids": [5],
        "logprobs": {"content": [entry]},
        "weight_versions": None,
        **choice,
    }
    return b"data: " + json.dumps({"choices": [fields]}).encode()


def test_generate_inconsistent_message_raises_value_key_or_type_error():
    for choice in (
        {"token_ids": [5, 6]},
        {"logprobs": None},
        {"finish_reason": "length", "weight_versions": []},
        {"finish_reason": "length", "weight_versions": [{"version": "3", "start": 0, "end": 2}]},
        {"finish_reason": "length", "weight_versions": [{"version": "new", "start": 0, "end": 1}]},
        {"token_ids": "x"},
        {"logprobs": {"content": [{}]}},
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0).parse(_message(**choice))


def test_generate_server_failure_becomes_error_of_chunk():
    def error_of(line: bytes) -> str | None:
        chunk = PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0).parse(line)
        assert chunk is not None
        return chunk.error

    assert error_of(b'data: {"error": {"message": "out of memory", "code": 500}}') == "out of memory"
    assert "not finite" in str(error_of(_message(logprobs={"content": [{"logprob": -9999.0}]})))
    assert "'error'" in str(error_of(_message(finish_reason="error")))


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: b"data: " + text.encode()))
def test_generate_any_line_is_ignored_or_raises_known_error(line):
    with contextlib.suppress(ValueError, LookupError, TypeError):
        assert PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0).parse(line) is None


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda values: (
            st.lists(values)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "error",
                        "token_ids",
                        "logprobs",
                        "content",
                        "finish_reason",
                        "weight_versions",
                        "prompt_logprobs",
                        "version",
                    ]
                ),
                values,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_response_is_parsed_or_raises_known_error(value):
    text = json.dumps(value).encode()
    readers = [
        PROTOCOL.generate("mine", PROMPT, GenerationConfig(), 3, 0).parse,
        *(
            next(exchange).parse
            for exchange in (PROTOCOL.score([1, 2], 1.0), PROTOCOL.health(), PROTOCOL.stats(), PROTOCOL.receipt())
        ),
    ]
    for number, reader in enumerate(readers):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            reader(b"data: " + text if number == 0 else text)


def test_abort_uses_request_id_of_vllm():
    [call], _ = drive(PROTOCOL.abort("mine"), b"")

    recorded = exchanges("tokens", "abort of one")[0]["request"]
    assert (call.verb, call.target, call.body) == (recorded["method"], recorded["path"], recorded["json"])


def test_score_returns_recorded_log_probs_only_at_temperature_1():
    [call], scores = drive(PROTOCOL.score(PROMPT, 1.0), body_of(exchanges("tokens", "score")[0]))

    assert call.body["sampling_params"] == {
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
        "detokenize": False,
    }
    assert scores[:3] == [0.0, -4.435525894165039, -9.076803207397461]
    assert len(scores) == len(PROMPT)
    with pytest.raises(InferenceError, match=r"temperature=0\.7"):
        next(PROTOCOL.score(PROMPT, 0.7))
    with pytest.raises(ValueError, match="of 3 tokens, found 10"):
        drive(PROTOCOL.score([1, 2, 3], 1.0), body_of(exchanges("tokens", "score")[0]))


def test_error_message_of_recorded_response_is_plain_text():
    for scene, name, expected in (
        ("tokens", "too long", "The decoder prompt (length 2000) is longer than the maximum model length of 1024."),
        ("tokens", "unknown setting", "unable to parse string as a number"),
        ("errors", "no such route", "expected vLLM with the extension"),
        ("extension", "no key", "no valid key"),
    ):
        assert expected in PROTOCOL.error_message(body_of(exchanges(scene, name)[0]))


# ---- responses of the extension


def test_extension_responses_are_parsed():
    def recorded(name: str) -> bytes:
        return body_of(exchanges("extension", name)[0])

    meta = WeightUpdateMeta("disk", 8, (WeightPart("/models/weights", ()),))
    _, health = drive(PROTOCOL.health(), recorded("health"))
    [stats_call], stats = drive(PROTOCOL.stats(), recorded("stats"))
    [stage], receipt = drive(PROTOCOL.load(meta, 30.0), recorded("stage"))
    [pause], tokens_until_paused = drive(PROTOCOL.pause("keep", 60.0), recorded("pause"))
    [commit], _ = drive(PROTOCOL.commit(1, "keep"), recorded("commit"))
    [_], seconds = drive(PROTOCOL.resume(), recorded("resume"))
    _, live_receipt = drive(PROTOCOL.receipt(), recorded("receipt"))
    _, served_model = drive(PROTOCOL.describe(), recorded("info"))

    assert health == Health(0, 0)
    assert served_model == ServedModel("/models/0", 0, "/models/weights", "vllm 0.32.0")
    assert (stats_call.verb, stats.version, stats.paused, stats.running) == ("GET", 0, False, 0.0)
    assert stats.generated_tokens > 0
    assert (stage.verb, stage.body) == ("POST", {"meta": meta.to_json(), "timeout": 30.0})
    assert (receipt.version, len(receipt.checksums)) == (1, len(live_receipt.checksums))
    assert receipt.checksums == live_receipt.checksums
    assert (pause.body, tokens_until_paused) == ({"mode": "keep", "lease": 60.0}, None)
    assert commit.body == exchanges("extension", "commit")[0]["request"]["json"]
    assert seconds >= 0


# ---- settings and command


def _spec(**changes: Any) -> ServeSpec:
    return ServeSpec(
        **{"model_path": "/models/0", "device": "cpu", "weights_dir": "/w", "version": 4, "cpus": 2, **changes}
    )


def test_server_spec_has_required_options_and_environment(tmp_path):
    config = VLLMEngineConfig(
        python="/envs/vllm/bin/python", context_length=512, arguments=["--max-num-batched-tokens", "64"]
    )

    job = VLLMEngine.server_spec(config, _spec(strategy=ParallelStrategy(data=2, tensor=2), gpus=2, device="cuda"))

    text = " ".join(job.command)
    assert VLLMEngine(VLLMEngineConfig(dtype="bfloat16")).served_dtype == "bfloat16"
    assert job.command[:3] == ("/envs/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    for options in (
        "--model /models/0",
        "--host {host} --port {port}",
        "--tensor-parallel-size 2",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-scale-out",
        "--middleware vllm_extension.Guard",
        "--worker-extension-cls vllm_extension.WeightStage",
        "--max-model-len 512",
        "--stream-interval 8",
        "--max-num-batched-tokens 64",
    ):
        assert options in text
    for option in ("--no-enable-chunked-prefill", "--enforce-eager", "--max-num-seqs"):
        assert option not in text
    on_cpu = " ".join(VLLMEngine.server_spec(config, _spec()).command)
    assert "--max-num-seqs 64" in on_cpu
    assert "--enforce-eager" in on_cpu
    assert "prefix-caching" not in text, "vLLM reuses prefixes by default"
    assert "--no-enable-chunked-prefill" in VLLMEngine.server_spec(config, _spec()).command
    assert (job.role, job.count, job.gpus, job.needs_port, job.ready_path) == ("rollout", 2, 2, True, "/health")
    assert job.env["PYTHONPATH"] == str(INSIDE)
    assert (INSIDE / "vllm_extension.py").is_file()
    assert (job.env["RL_WEIGHTS_DIR"], job.env["RL_WEIGHT_VERSION"], job.env["OMP_NUM_THREADS"]) == ("/w", "4", "1")
    assert set(RESERVED_ARGUMENTS) >= {word for word in job.command if word.startswith("--")} - {
        "--max-num-batched-tokens",
        "--stream-interval",
    }


@pytest.mark.parametrize(
    ("device", "gibibytes", "expected"), [("H100", 80, 1024), ("A100", 80, 256), ("L4", 24, 256), ("cpu", 0, 64)]
)
def test_concurrent_completions_default_to_those_of_vllm(device, gibibytes, expected):
    assert VLLMEngineConfig().max_concurrent_completions(device, gibibytes * 2**30) == expected
    assert VLLMEngineConfig(max_sequences=7).max_concurrent_completions(device, gibibytes * 2**30) == 7


@pytest.mark.parametrize(
    ("device", "shared", "expected"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_sleep_mode_follows_shared_gpu(device, shared, expected):
    settings, spec = VLLMEngineConfig(), _spec(device=device, gpus=int(device == "cuda"), shared=shared)
    assert ("--enable-sleep-mode" in VLLMEngine.server_spec(settings, spec).command) is expected
    assert VLLMEngine(settings, spec).capabilities.sleeps is expected


@pytest.mark.parametrize(
    ("settings_", "spec", "match"),
    [
        ({}, {"strategy": ParallelStrategy(pipeline=2)}, "allocation: expected vllm:d1t1"),
        ({}, {"deterministic": True}, "deterministic with allocation=vllm"),
        ({"quantization": "fp8"}, {}, "server.quantization: expected none on CPUs"),
        ({"arguments": ["--logprobs-mode=raw_logprobs"]}, {}, "--logprobs-mode=raw_logprobs"),
        ({"arguments": ["--logprobs_mode", "raw_logprobs"]}, {}, "found '?--logprobs_mode"),
        ({"arguments": ["-tp=2"]}, {}, "found '?-tp=2"),
        ({}, {"model_path": ""}, "model_path"),
    ],
)
def test_server_spec_unsupported_setting_is_rejected(settings_, spec, match):
    with pytest.raises(ConfigError, match=match.replace("(", r"\(")):
        VLLMEngine.server_spec(VLLMEngineConfig(**settings_), _spec(**spec))
