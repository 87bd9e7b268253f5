"""`rl serve` in a process of its own, with the official `openai` client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from rl_apps.cli.generate import ChatSession
from rl_contracts.config import GenerationConfig
from rl_contracts.testing import make_tiny_model
from rl_contracts.testing.waiting import wait_until

QUESTION = "2 + 3?"


@contextmanager
def serving(model: Path, log: Path, key: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL of a server, and its process."""
    command = [Path(sys.executable).parent / "rl", "serve", model, "--port", "0", "--device", "cpu"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "RL_API_KEY": key})
    try:

        def url() -> str:
            assert process.poll() is None, log.read_text()
            found = re.search(r"http://\S+/v1", log.read_text())
            return found[0] if found else ""

        wait_until(url, 240)
        yield url(), process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_serve_answers_the_openai_client_until_a_signal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = make_tiny_model(run / "checkpoints" / "step_1", layers=1, hidden=32)
    expected = "".join(
        ChatSession(model, GenerationConfig(max_new_tokens=12, temperature=0), device="cpu").ask(QUESTION)
    )

    with serving(run, tmp_path / "log", "secret") as (url, process):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        arguments = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 12,
        }
        whole = client.chat.completions.create(**arguments, temperature=0, n=2)
        pieces = client.chat.completions.create(
            **arguments, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = pieces
        sampled = [client.chat.completions.create(**arguments, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").chat.completions.create(**arguments)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)

    assert arguments["model"] == "step_1"
    assert [choice.message.content.rstrip("\ufffd") for choice in whole.choices] == [expected] * 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).rstrip("\ufffd") == expected
    assert last.usage.completion_tokens == whole.usage.completion_tokens / 2
    first, again, other = (completion.choices[0].message.content for completion in sampled)
    assert first == again != other
    assert code == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_serve_signal_during_a_completion_reports_no_failure(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    with serving(model, tmp_path / "log", "secret") as (url, process):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        stream = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": QUESTION}], stream=True
        )
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        log = (tmp_path / "log").read_text()

    assert code == 0
    assert len(log.splitlines()) == 1, log
