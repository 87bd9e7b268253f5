"""infra/servers/build.py caches, rebuilds and locks environments of inference servers and names missing programs."""

import importlib.util
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVERS = ROOT / "infra" / "servers"


def _builder():
    spec = importlib.util.spec_from_file_location("servers_build", SERVERS / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `dataclass` looks up the module there
    spec.loader.exec_module(module)
    return module


builder = _builder()
PINS = builder.Pins("tiny", f"{sys.version_info[0]}.{sys.version_info[1]}", ("one==1",), (), ("json",), 0.001)


def _finish(pins, directory, lock):
    directory.mkdir(parents=True)
    (directory / builder.DONE).write_text("{}")


def test_interpreter_is_built_once_per_set_of_pins(tmp_path):
    built = []

    def make(pins, directory, lock):
        built.append(directory)
        _finish(pins, directory, lock)

    first, again = (builder.interpreter(PINS, tmp_path, make) for _ in range(2))
    other = builder.interpreter(replace(PINS, requirements=("one==2",)), tmp_path, make)

    assert first == again
    assert first != other
    assert built == [first.parents[1], other.parents[1]]


def test_interpreter_after_an_interrupted_build_is_rebuilt(tmp_path):
    def interrupted(pins, directory, lock):
        directory.mkdir()
        (directory / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builder.interpreter(PINS, tmp_path, interrupted)
    directory = builder.interpreter(PINS, tmp_path, _finish).parents[1]

    assert [path.name for path in directory.iterdir()] == [builder.DONE]


def test_interpreter_concurrent_calls_build_once(tmp_path, monkeypatch):
    started, waits, proceed, built = threading.Event(), threading.Event(), threading.Event(), []
    monkeypatch.setattr(builder, "_say", lambda text: "waiting for another build" in text and waits.set())

    def make(pins, directory, lock):
        built.append(directory)
        started.set()
        assert proceed.wait(30)
        _finish(pins, directory, lock)

    threads = [threading.Thread(target=builder.interpreter, args=(PINS, tmp_path, make)) for _ in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    assert waits.wait(30)
    proceed.set()
    for thread in threads:
        thread.join(30)

    assert len(built) == 1


def test_interpreter_waits_for_a_child_process_of_a_killed_build(tmp_path):
    """A child process of a killed build may still write to the directory, so it must keep the lock."""
    started = []

    def killed(pins, directory, lock):
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(lock,)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builder.interpreter(PINS, tmp_path, killed)
    thread = threading.Thread(target=builder.interpreter, args=(PINS, tmp_path, _finish))
    thread.start()
    thread.join(0.3)
    waited = thread.is_alive()
    started[0].communicate()
    thread.join(30)

    assert waited
    assert not thread.is_alive()


@pytest.mark.slow
def test_build_creates_an_environment_with_a_driver_stub(tmp_path):
    pins = replace(PINS, requirements=("pip",), driver_stub=("cuInit",))

    python = builder.interpreter(pins, tmp_path)
    code = "import ctypes, sys; print(sys.prefix, ctypes.CDLL('libcuda.so.1').cuInit())"
    prefix, result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert Path(prefix) == python.parents[1]
    assert result == "100"


@pytest.mark.nightly
def test_build_failure_names_the_step_and_is_not_reused(tmp_path):
    pins = replace(PINS, requirements=("pip",), imports=("no_such_module",))

    for _ in range(2):
        with pytest.raises(builder.BuildError, match=r"(?s)-c .*ended with 1.*\.log.*No module named 'no_such_module'"):
            builder.interpreter(pins, tmp_path)


def test_build_without_space_cache_compiler_or_python_raises_error(tmp_path, monkeypatch):
    with pytest.raises(builder.MissingError, match=r"expected 1e\+12 GB of free space .*found \d+\.\d.*--cache"):
        builder.require_space(tmp_path, 1e12)
    (tmp_path / "file").write_text("")
    with pytest.raises(builder.MissingError, match=r"file/servers .*--cache"):
        builder.interpreter(PINS, tmp_path / "file" / "servers")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(builder.MissingError, match=r"expected a C compiler.*install gcc"):
        builder.find_compiler()
    stub = tmp_path / "python3.11"
    stub.write_text("#!/bin/sh\nexit 127\n")
    stub.chmod(0o755)
    with pytest.raises(builder.MissingError, match=r"expected a Python 3\.11 with venv.*no uv to fetch it; install"):
        builder.find_python("3.11")


def test_find_python_missing_on_path_is_fetched_by_uv(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    uv = tmp_path / "uv"
    uv.write_text(f"""#!/bin/sh
fetched={tmp_path / "fetched"}
case "$*" in
"python install "*" {version}") : >$fetched ;;
"python find --managed-python {version}") test -e $fetched && echo {sys.executable} ;;
*) exit 2 ;;
esac
""")
    uv.chmod(0o755)

    assert builder.find_python(version) == sys.executable
    with pytest.raises(builder.MissingError, match=r"expected a Python 3\.9 with venv.*none that uv could fetch"):
        builder.find_python("3.9")


def test_pins_are_exact_and_an_unknown_server_exits_2():
    pins = builder.read_pins()

    assert all(requirement.count("==") == 1 for table in pins.values() for requirement in table.requirements)
    done = subprocess.run([sys.executable, SERVERS / "build.py", "tgi"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected servers of vllm, sglang, found tgi" in done.stderr
