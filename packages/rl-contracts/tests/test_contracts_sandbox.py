"""Sandbox: ordinary programs work, and attempts to reach anything outside fail."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_contracts.errors import ConfigError
from rl_contracts.sandbox import confine
from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits

OUTCOMES = """
import json
def outcomes(**attempts):
    results = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            results[name] = "done"
        except OSError as error:
            results[name] = type(error).__name__
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


OLD_KERNEL = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("confine", {confine.__file__!r})
confine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(confine)
confine.landlock_version = lambda: min(%d, {confine.landlock_version()})
%s
confine.main()
"""
NO_NAMESPACES = "confine._libc.unshare = lambda flags: -1"


class OldKernel:
    """Sandbox whose process sees the given Landlock version, and runs the code `patch` before it confines itself."""

    def __init__(self, sandbox, directory, version, patch=""):
        self.sandbox = sandbox
        self.script = directory / "old_kernel.py"
        self.script.write_text(OLD_KERNEL % (version, patch))

    def run(self, code):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(confine, "__file__", str(self.script))
            return self.sandbox.run(code)


@pytest.fixture(params=["native", "landlock 5", "landlock 3 without namespaces"])
def any_kernel(request, sandbox, tmp_path_factory):
    """Sandbox on this kernel, and on two simulated kernels with fewer restrictions."""
    if request.param == "native":
        return sandbox
    patch = NO_NAMESPACES if "without" in request.param else ""
    return OldKernel(sandbox, tmp_path_factory.mktemp("kernel"), int(request.param.split()[1]), patch)


def outcomes(sandbox, code):
    """Return the outcome of each attempt of `outcomes(name=attempt)` in the code."""
    run = sandbox.run(OUTCOMES + textwrap.dedent(code))
    assert run.code == 0, run
    return json.loads(run.output)


def test_sandbox_program_with_stdin_imports_and_files_runs(sandbox):
    run = sandbox.run(
        "import dataclasses, decimal, pathlib, sys, tempfile, random, datetime\n"
        "@dataclasses.dataclass\nclass Point:\n    x: 'int'\n"
        "pathlib.Path('a.txt').write_text('saved')\n"
        "tempfile.TemporaryFile().write(b'1')\n"
        "print(sum(map(int, input().split())), Point(3), pathlib.Path('a.txt').read_text(), __name__)\n"
        "print('to stderr', file=sys.stderr)\nsys.exit(3)",
        stdin="2 3\n",
    )

    assert (run.output, run.errors, run.code, run.stopped) == ("5 Point(x=3) saved __main__\n", "to stderr\n", 3, "")


@pytest.mark.parametrize(("call", "code"), [("exit()", 0), ("quit(3)", 3)])
def test_sandbox_exit_or_quit_ends_the_program(sandbox, call, code):
    run = sandbox.run(f"print(1)\n{call}\nprint(2)")

    assert (run.output, run.errors, run.code) == ("1\n", "", code)


def test_sandbox_error_traceback_has_only_lines_of_the_program(sandbox):
    run = sandbox.run("def f():\n    return 1 / 0\nf()")

    assert run.code == 1
    assert run.errors.startswith('Traceback (most recent call last):\n  File "program.py", line 3, in <module>')
    assert run.errors.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in sandbox.run("def").errors
    assert sandbox.run("print('\udc80')").code == 0


def test_sandbox_network_is_denied(any_kernel):
    with socket.create_server(("127.0.0.1", 0)) as server:
        results = outcomes(
            any_kernel,
            f"""
            import asyncio, socket
            outcomes(
                tcp=lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5),
                udp=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
                raw=lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
                unix=lambda: socket.socket(socket.AF_UNIX),
                server=lambda: socket.create_server(("127.0.0.1", 0)),
            )
            """,
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()

    assert set(results.values()) == {"PermissionError"}


def test_sandbox_files_outside_its_directory_are_denied(any_kernel, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o640)
    results = outcomes(
        any_kernel,
        f"""
        import os
        secret, directory = {str(secret)!r}, {str(tmp_path)!r}
        outcomes(
            read=lambda: open(secret),
            read_password_file=lambda: open("/etc/shadow"),
            read_by_relative_path=lambda: open("/usr/lib/../.." + secret),
            read_own_environment=lambda: open("/proc/self/environ"),
            read_owners_environment=lambda: open(f"/proc/{{os.getppid()}}/environ"),
            read_owners_memory=lambda: open(f"/proc/{{os.getppid()}}/mem", "rb"),
            list=lambda: os.listdir(directory),
            list_root=lambda: os.listdir("/"),
            write=lambda: open(secret, "a"),
            truncate=lambda: os.truncate(secret, 0),
            create=lambda: open(directory + "/new", "w"),
            create_in_tmp=lambda: open("/tmp/new", "w"),
            create_in_memory=lambda: open("/dev/shm/new", "w"),
            write_library=lambda: open(os.__file__, "a"),
            delete=lambda: os.remove(secret),
            rename=lambda: os.rename(secret, directory + "/other"),
            move=lambda: os.rename(secret, "local"),
            link=lambda: os.link(secret, "local"),
            symlink=lambda: os.symlink(secret, "local"),
            mkdir=lambda: os.mkdir("deeper"),
            mode=lambda: os.chmod(secret, 0o777),
            owner=lambda: os.chown(secret, 0, 0),
            times=lambda: os.utime(secret, (0, 0)),
            root=lambda: os.chroot("."),
            device=lambda: open("/dev/tty", "rb"),
        )
        """,
    )

    # Landlock rejects link, and the separate file system rejects move, with "invalid cross-device link"
    assert {results.pop("link"), results.pop("move")} <= {"OSError", "PermissionError"}
    assert {name: outcome for name, outcome in results.items() if outcome != "PermissionError"} == {}
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("secret", 0o640)
    assert os.listdir(tmp_path) == ["secret"]


def test_sandbox_hides_owner_environment_and_removes_directory(sandbox, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    run = sandbox.run("import os\nprint(os.getcwd(), 'A_KEY' in os.environ)")

    directory, has_key = run.output.split()
    assert has_key == "False"
    assert not Path(directory).exists()


def test_sandbox_memory_above_limit_raises_memory_error(sandbox):
    run = sandbox.run("blocks = []\nwhile True:\n    blocks.append(bytearray(10 << 20))")

    assert run.code == 1
    assert run.errors.endswith("MemoryError\n")


def test_sandbox_huge_pages_are_denied(sandbox):
    run = sandbox.run(
        "import ctypes\nprctl = ctypes.CDLL(None, use_errno=True).prctl\n"
        "print(prctl(42, 0, 0, 0, 0), prctl(41, 0, 0, 0, 0), ctypes.get_errno())"
    )

    assert run.output == "1 -1 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "stopped"),
    [
        ("import time\nprint('before')\ntime.sleep(60)", "it did not end within 4 s"),
        ("print('before')\nwhile True: pass", "it used more than 1 s of CPU time"),
        (
            "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nprint('before')\nwhile 1: print(end='')",
            "it used more than 1 s of CPU time",
        ),
    ],
)
def test_sandbox_time_above_limit_kills_the_program(code, stopped):
    begin = time.monotonic()
    run = Sandbox(SandboxLimits(seconds=4 if "sleep" in code else 30, cpu_seconds=1)).run(code, stdin="\n")

    assert run.code < 0
    assert (run.stopped, run.output, run.timed_out) == (stopped, "before\n", True)
    assert time.monotonic() - begin < 25


def test_sandbox_run_with_shorter_timeout_ends_at_it(sandbox):
    run = sandbox.run("import time\ntime.sleep(60)", seconds=0.5)

    assert (run.stopped, run.timed_out) == ("it did not end within 0.5 s", True)


def test_sandbox_fork_bomb_is_contained(any_kernel):
    results = outcomes(
        any_kernel,
        """
        import multiprocessing, os, subprocess
        def bomb():
            while True:
                os.fork()
        outcomes(
            bomb=bomb,
            spawn=lambda: os.posix_spawn("/bin/true", ["true"], {}),
            subprocess=lambda: subprocess.run(["true"]),
            multiprocessing=lambda: multiprocessing.get_context("fork").Process(target=print).start(),
            exec=lambda: os.execv("/bin/true", ["true"]),
        )
        """,
    )

    assert set(results.values()) == {"PermissionError"}


@pytest.mark.slow
def test_sandbox_threads_work_and_a_thread_bomb_is_contained():
    code = """
        import threading
        threading.Thread(target=print, args=("works",)).start()
        while True:
            threading.Thread(target=threading.Event().wait).start()
    """
    run = Sandbox(SandboxLimits(seconds=5)).run(textwrap.dedent(code))

    assert run.output.startswith("works\n")
    assert run.code != 0 or run.stopped


def test_sandbox_output_flood_is_limited():
    run = Sandbox(SandboxLimits(file=1 << 20, output=1000)).run("while True:\n    print('x' * 999)")

    assert run.code == 1
    assert "File too large" in run.errors
    assert run.output.startswith("xxx")
    assert run.output.endswith("[1,047,576 more bytes]")


FLOOD = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for n in range(1, 41):
    file = os.open(str(n), os.O_CREAT | os.O_RDWR)
    assert os.write(file, bytes(1 << 20)) == 1 << 20
    {hide}
    print(n, flush=True)
    time.sleep(0.01)
time.sleep(60)
"""
HIDES = {
    "open": "",
    "deleted": "os.remove(str(n))",
    "mapped": "libc.mmap(None, 4096, 1, 2, file, 0); os.close(file); os.remove(str(n))",
    "shared": "libc.mmap(None, 4096, 3, 1, file, 0); os.close(file); os.remove(str(n))",
}
FLOOD_LIMITS = SandboxLimits(files=20 << 20, file=2 << 20, seconds=30)


@pytest.fixture
def namespaces(sandbox):
    """Skip a test if this user may not create namespaces: the limit on files is then enforced by polling."""
    run = sandbox.run("import os\nspace = os.statvfs('.')\nprint(space.f_blocks * space.f_frsize)")
    if int(run.output) != sandbox.limits.files:
        pytest.skip("needs user namespaces")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("hide", HIDES)
def test_sandbox_flood_of_files_stays_within_its_limit(hide):
    run = Sandbox(FLOOD_LIMITS).run(FLOOD.format(hide=HIDES[hide]))

    assert run.code != 0
    assert int(run.output.split()[-1]) <= 20


@pytest.mark.parametrize("hide", HIDES)
def test_sandbox_flood_of_files_without_namespaces_is_killed(hide, tmp_path):
    sandbox = OldKernel(Sandbox(FLOOD_LIMITS), tmp_path, 3, NO_NAMESPACES)
    run = sandbox.run(FLOOD.format(hide=HIDES[hide]))

    assert (run.stopped, run.timed_out) == ("its files exceeded 20,971,520 bytes", False)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("create", ["open(str(n), 'w').close()", "os.link('program.py', str(n))"])
def test_sandbox_flood_of_empty_files_stays_within_its_limit(create):
    code = f"import os\nfor n in range(100_000):\n    {create}\n    os.write(1, b'.')"
    run = Sandbox(SandboxLimits(files=1 << 20)).run(code)

    assert run.code != 0
    assert len(run.output) <= 256


@pytest.mark.parametrize("create", ["open(str(n), 'w').close()", "os.link('program.py', str(n))"])
def test_sandbox_flood_of_empty_files_without_namespaces_is_killed(create, tmp_path):
    sandbox = OldKernel(Sandbox(SandboxLimits(files=1 << 20)), tmp_path, 3, NO_NAMESPACES)
    run = sandbox.run(f"import os\nfor n in range(20_000):\n    {create}\nimport time\ntime.sleep(60)")

    assert (run.stopped, run.timed_out) == ("its files exceeded 1,048,576 bytes", False)


def test_sandbox_files_work_if_mount_in_namespace_fails(sandbox, tmp_path):
    kernel = OldKernel(sandbox, tmp_path, 5, "confine._libc.mount = lambda *_: -1")

    assert kernel.run("open('a', 'w').write('1')\nprint(open('a').read())").output == "1\n"


def test_sandbox_file_space_outside_the_limits_is_denied(any_kernel):
    results = outcomes(
        any_kernel,
        """
        import fcntl, mmap, os, socket
        one, other = socket.socketpair()
        file = os.open("a", os.O_CREAT | os.O_RDWR)
        outcomes(
            allocate=lambda: os.posix_fallocate(file, 0, 1 << 20),
            reserve=lambda: fcntl.ioctl(file, 0x40305828, bytes(48)),
            reserve64=lambda: fcntl.ioctl(file, 0x4030582A, bytes(48)),
            send_descriptor=lambda: socket.send_fds(one, [b"x"], [file]),
            send_message=lambda: one.sendmsg([b"x"]),
            receive_message=lambda: other.recvmsg(1),
            shared_memory=lambda: mmap.mmap(-1, 4096),
        )
        """,
    )

    assert set(results.values()) == {"PermissionError"}


def test_sandbox_threads_with_separate_file_tables_are_denied(any_kernel):
    run = any_kernel.run(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "stack = ctypes.create_string_buffer(1 << 16)\n"
        "top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64)\n"
        "def refused(result):\n    os.write(1, b'%d %d\\n' % (result, ctypes.get_errno()))\n"
        "refused(libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, 0x10900, None))\n"
        "refused(libc.syscall(436, 1000, 1000, 2))\n"
        "refused(libc.syscall(436, 1000, 1000, 6))\n"
        "os.closerange(1000, 1001)\nos._exit(0)"
    )

    assert run.output == "-1 1\n" * 3


def test_sandbox_threads_end_with_the_main_thread(any_kernel):
    run = any_kernel.run(
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"
    )

    assert (run.code, run.stopped, run.timed_out) == (-9, "", False)


def test_sandbox_signals_through_sockets_are_denied(any_kernel):
    results = outcomes(
        any_kernel,
        """
        import fcntl, os, socket, struct
        one, other = socket.socketpair()
        owner = struct.pack("i", os.getppid())
        outcomes(
            FIOSETOWN=lambda: fcntl.ioctl(one, 0x8901, owner),
            SIOCSPGRP=lambda: fcntl.ioctl(one, 0x8902, owner),
            FIOASYNC=lambda: fcntl.ioctl(one, 0x5452, struct.pack("i", 1)),
            F_SETOWN_EX=lambda: fcntl.fcntl(one, 15, struct.pack("ii", 1, os.getppid())),
            O_ASYNC=lambda: fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK),
            O_NONBLOCK=lambda: fcntl.fcntl(one, fcntl.F_SETFL, os.O_NONBLOCK),
            FIONBIO=lambda: os.set_blocking(one.fileno(), False),
        )
        """,
    )

    assert (results.pop("O_NONBLOCK"), results.pop("FIONBIO")) == ("done", "done")
    assert set(results.values()) == {"PermissionError"}


def test_sandbox_sockets_to_other_processes_are_denied(any_kernel, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(tmp_path / "daemon"))
        results = outcomes(
            any_kernel,
            f"""
            import socket
            path = {str(tmp_path / "daemon")!r}
            def send(kind):
                socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", path)
            outcomes(
                datagram=lambda: send(socket.SOCK_DGRAM),
                datagram_with_flags=lambda: send(socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC),
                packets=lambda: send(socket.SOCK_SEQPACKET),
                raw=lambda: send(socket.SOCK_RAW),
                tipc=lambda: socket.socketpair(socket.AF_TIPC, socket.SOCK_STREAM),
                connect=lambda: socket.socketpair()[0].connect(path),
                bind=lambda: socket.socketpair()[0].bind("local"),
                stream=lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK),
            )
            """,
        )
        daemon.settimeout(0)
        with pytest.raises(BlockingIOError):
            daemon.recv(1)

    assert results.pop("stream") == "done"
    assert set(results.values()) == {"PermissionError"}


ORDINARY = """
import asyncio, ctypes, mmap, pathlib, sqlite3, tempfile, threading
async def work():
    return sum(await asyncio.gather(*(asyncio.to_thread(pow, n, 2) for n in range(4))))
base = sqlite3.connect("a.db")
base.execute("pragma journal_mode=wal")
base.execute("create table numbers as select 7 as n")
base.commit()
file = tempfile.TemporaryFile()
file.write(b"mapped")
file.flush()
print(asyncio.run(work()), base.execute("select n from numbers").fetchone(), mmap.mmap(file.fileno(), 0)[:])
print(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(abs)(-3))
"""


def test_sandbox_ordinary_programs_work(any_kernel):
    run = any_kernel.run(ORDINARY)

    assert (run.output, run.errors) == ("14 (7,) b'mapped'\n3\n", "")


def test_write_only_below_allows_signals_to_descendants_only(tmp_path):
    if confine.landlock_version() < 6:
        pytest.skip("Landlock restricts signals from version 6 on")
    code = f"""
import os, subprocess, sys
from rl_contracts.sandbox import confine
confine.write_only_below({str(tmp_path)!r})
child = subprocess.Popen(["sleep", "60"])
child.kill()
print(child.wait())
os.kill(os.getppid(), 0)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert process.stdout == "-9\n"
    assert "PermissionError" in process.stderr


def test_sandbox_signals_reach_only_the_process_itself(any_kernel):
    results = outcomes(
        any_kernel,
        """
        import fcntl, os, resource, signal
        read, write = os.pipe()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        outcomes(
            kill=lambda: os.kill(os.getppid(), signal.SIGTERM),
            all=lambda: os.kill(-1, signal.SIGTERM),
            by_file=lambda: fcntl.fcntl(read, fcntl.F_SETOWN, os.getppid()),
            priority=lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
            limits=lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)),
            itself=lambda: os.kill(os.getpid(), signal.SIGUSR1),
            own_limits=lambda: resource.prlimit(os.getpid(), resource.RLIMIT_AS),
        )
        """,
    )

    assert (results.pop("itself"), results.pop("own_limits")) == ("done", "done")
    assert set(results.values()) == {"PermissionError"}
    assert (
        "ValueError"
        in any_kernel.run("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))").errors
    )


def test_sandbox_each_denied_system_call_fails(any_kernel):
    numbers = [number for calls in confine.DENIED.values() for number in calls.values()]
    run = any_kernel.run(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for number in {numbers} + [435, 440, 444, 467, 0x40000000 + 41]:\n"
        "    assert libc.syscall(number, -1, -1, -1, -1, -1, -1) == -1, number\n"
        "    print(ctypes.get_errno())\n"
        "print(libc.prctl(1, 0), ctypes.get_errno())"
    )

    *errors, prctl = run.output.splitlines()
    assert errors == ["1"] * len(numbers) + ["38"] * 5
    assert prctl == "-1 1"


@pytest.mark.slow
def test_sandbox_process_ends_with_its_owner(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", "from rl_contracts.sandbox.sandbox import Sandbox\nSandbox().run('while True: pass')"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
    deadline = time.monotonic() + 60
    while not (child := _busy_child(children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    owner.kill()
    owner.wait()

    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert child


def _busy_child(children):
    """Return the child with enough CPU time to be the program; the first child is only the trial run of the sandbox."""
    for pid in children.read_text().split():
        try:
            ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if ticks > 50:
            return pid
    return None


def test_sandbox_concurrent_runs_are_isolated(sandbox):
    code = "import os\nopen('own', 'x').write(input())\nprint(os.listdir('.') and open('own').read())"
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda n: sandbox.run(code, f"{n}\n"), range(8)))

    assert [run.output for run in runs] == [f"{n}\n" for n in range(8)]


def test_sandbox_imports_only_the_given_packages(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 7")

    assert Sandbox(packages=[tmp_path]).run("import helper\nprint(helper.VALUE)").output == "7\n"
    assert "ModuleNotFoundError" in Sandbox().run("import numpy").errors


WITH_BLOCKED_CALLS = """
from rl_contracts.sandbox import confine, sandbox
MISSING = [(confine._LOAD, 0, 0, 0)]
for number in {numbers}:
    MISSING += [(confine._EQUAL, 0, 1, number), (confine._RETURN, 0, 0, confine._REFUSE | 38)]
confine._libc.prctl(38, 1, 0, 0, 0)
confine.install([*MISSING, (confine._RETURN, 0, 0, confine._ALLOW)])
{patch}
try:
    created = sandbox.Sandbox()
    print("created", created.run("open('/etc/hosts')"))
except sandbox.ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("numbers", "patch", "message"),
    [
        (
            [317, 444],
            "",
            "Landlock version 3 or later, from Linux 6.2 (found: Function not implemented) and seccomp",
        ),
        ([317], "", "expected seccomp filters (found: Function not implemented)"),
        ([444], "", "expected Landlock"),
        # the failure appears only in the sandbox process
        ([444], "confine.missing_kernel_features = lambda: []", "could not confine its process"),
        ([446], "", "landlock_restrict_self"),
        ([317], "confine.missing_kernel_features = lambda: []", "seccomp: Function not implemented"),
        ([126], "", "capset"),
    ],
)
def test_sandbox_kernel_without_features_raises_config_error(numbers, patch, message):
    code = WITH_BLOCKED_CALLS.format(numbers=numbers, patch=patch)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert process.stdout.startswith("refused:"), process
    assert message in process.stdout


def test_sandbox_other_platforms_raise_config_error(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(confine.platform, "machine", lambda: "aarch64")
        with pytest.raises(ConfigError, match=r"Linux on x86-64 \(this is linux on aarch64\)"):
            Sandbox()
    monkeypatch.setattr(confine.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux on x86-64"):
        Sandbox()


def test_sandbox_invalid_limits_raise_config_error():
    with pytest.raises(ConfigError, match=r"sandbox.memory: expected more than 0"):
        SandboxLimits(memory=0)
    with pytest.raises(ConfigError, match="empty program"):
        Sandbox(SandboxLimits(memory=1 << 20))


AS_A_USER = """
set -e
repository=$1 interpreter=$2 scratch=$3; shift 3
i=0
for visible in "$repository" "$interpreter"; do
    mkdir "$scratch/$i"; mount --bind "$visible" "$scratch/$i"; i=$((i + 1))
done
for hidden in /root "${repository%/*}"; do
    [ -d "$hidden" ] && mount -t tmpfs -o mode=755 tmpfs "$hidden"
done
i=0
for visible in "$repository" "$interpreter"; do
    mkdir -p "$visible"; mount --bind "$scratch/$i" "$visible"; i=$((i + 1))
done
mkdir "$scratch/tmp"; chown 65534:65534 "$scratch/tmp"
export HOME="$scratch/tmp" TMPDIR="$scratch/tmp"
cd "$repository"
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to switch to another user")
@pytest.mark.parametrize("file", ["test_contracts_sandbox.py", "test_contracts_reward_faults.py"])
def test_sandbox_and_rewards_pass_the_same_tests_as_a_user(file):
    """Run the tests as a user, in a mount namespace where the user can read an interpreter installed below /root."""
    repository = Path(__file__).parents[3]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "--all",
        "-p",
        "no:cacheprovider",
        Path(__file__).parent / file,
    ]
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        process = subprocess.run(
            [
                "unshare",
                "--mount",
                "bash",
                "-c",
                AS_A_USER,
                "as_a_user",
                repository,
                sys.base_prefix,
                scratch,
                *command,
            ],
            capture_output=True,
            text=True,
            timeout=600,
        )

    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout
