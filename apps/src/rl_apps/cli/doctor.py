"""`rl doctor`: check whether this machine and a command with its settings can run, with a remedy for each fault."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_contracts import registry
from rl_contracts.errors import RLError
from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.machine import LOCAL_HOSTS, reachable_host, usable_cores, visible_gpus
from rl_contracts.sandbox import confine

GIB = 2**30
DISK, SHARED, MEMORY = 5 * GIB, GIB, 4 * GIB
"""Bytes that must be free on the disk of the runs, in /dev/shm, and in memory."""
FILES = 4096
"""Minimum limit of open files per process. Each completion in flight needs at least one."""
SKEW = 2.0
"""Maximum difference in seconds between the clock of the runs' disk and the clock of this machine."""
TRIAL_SECONDS = 1800.0
"""Time limit of the trial step. A large model is loaded twice."""
LAST_LINES = 12
"""Number of output lines to print from a failed trial."""
OUTPUT_FORMAT = "correct the command according to this message."


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    what: str
    message: str
    remedy: str = ""
    """Instructions to fix the fault; empty if the check passed."""


def doctor(app: str, settings: Sequence[str], directory: Path) -> int:
    """Check the machine, run one small step of an app if one is given, and print each finding when it is known.

    Args:
        app: name or dotted path of an app, or an empty string to check the machine only.
        settings: settings of the app, as on its command line.
        directory: directory for runs.

    Returns:
        1 if a check found a fault, else 0.

    Raises:
        ConfigError: the app does not exist.
    """
    if app:
        registry.load("rl.apps", app)
    faults = 0
    for finding in (*machine(directory), *(trial(app, settings) if app else ())):
        faults += bool(finding.remedy)
        print(f"{'!!' if finding.remedy else 'ok'}  {finding.what:<13} {finding.message}", flush=True)
        if finding.remedy:
            print(f"    {'':<13} -> {finding.remedy}", flush=True)
    print(f"{faults} fault(s)" if faults else "no faults")
    return 1 if faults else 0


def machine(directory: Path) -> Iterator[Finding]:
    """Yield the findings about this machine and the installed packages."""
    yield packages()
    yield devices()
    yield memory()
    yield shared_memory()
    yield from disk(directory)
    yield files()
    yield ports()
    yield host_name()
    yield proxies()
    yield servers()
    yield clusters()
    yield sandbox()


def packages() -> Finding:
    """List the versions of Python and of the main packages."""
    names = ("torch", "transformers", "megatron-core", "peft", "vllm", "sglang", "ray")
    versions = [f"{name} {version}" for name in names if (version := _version(name))]
    return Finding("environment", f"Python {sys.version.split()[0]}, {', '.join(versions)}")


def devices() -> Finding:
    """Compare the GPUs that torch and the launcher find, and count usable cores."""
    import torch

    cores, listed, count = usable_cores(), visible_gpus(os.environ), torch.cuda.device_count()
    # CUDA gives each process one MIG instance
    expected = min(len(listed), 1) if "MIG-" in "".join(listed) else len(listed)
    summary = f"{count or 'no'} GPU{'s' if count > 1 else ''}, {cores} cores"
    if shutil.which("nvidia-smi") and not count:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        return Finding(
            "devices",
            f"{summary}, but nvidia-smi is installed; torch {torch.__version__} is built for {built}",
            "run nvidia-smi; if it lists GPUs, install a torch built for its CUDA version or an older one.",
        )
    if count != expected:
        return Finding(
            "devices",
            f"torch finds {summary}; the launcher finds {expected} ({', '.join(listed)})",
            "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi lists, without duplicates.",
        )
    if count:
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(count)) / GIB
        summary = f"{count} x {torch.cuda.get_device_name(0)}, {free:.0f} GiB free; {cores} cores"
    return Finding("devices", summary)


def memory() -> Finding:
    """Check the available memory of the machine; a cgroup may allow less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    remedy = "stop other processes, or use a smaller model." if free < MEMORY else ""
    return Finding("memory", f"{free / GIB:.1f} GiB available (at least {MEMORY // GIB})", remedy)


def shared_memory() -> Finding:
    """Check /dev/shm, which carries weights from trainers to servers on one machine."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", f"cannot be used: {error}", "set publish.route=disk.")
    remedy = "increase its size (containers: --shm-size=8g), or set publish.route=disk." if free < SHARED else ""
    return Finding("/dev/shm", f"{free / GIB:.1f} GiB free (at least {SHARED // GIB}, or twice the model)", remedy)


def disk(directory: Path) -> Iterator[Finding]:
    """Check the disk of the runs: free space, write permission and clock."""
    existing = directory.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    remedy = "free some space, or set run_dir to another disk." if free < DISK else ""
    yield Finding("disk", f"{free / GIB:.0f} GiB free at {existing} (at least {DISK // GIB})", remedy)
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        yield Finding("runs", f"{existing} is not writable: {error}", "set run_dir to a writable directory.")
        return
    remedy = "synchronize both clocks with NTP; heartbeat timeouts depend on them." if abs(skew) > SKEW else ""
    yield Finding("clock", f"the disk clock differs by {abs(skew):.1f} s from this machine (at most {SKEW:g})", remedy)


def files() -> Finding:
    """Check the limit of open files and connections per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = (
        f"run ulimit -n {hard if 0 < hard < 65536 else 65536} before starting the run." if 0 <= soft < FILES else ""
    )
    return Finding("open files", f"{soft} per process (at least {FILES})", remedy)


def ports() -> Finding:
    """Check that this machine can connect to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return Finding("ports", f"127.0.0.1:{server.getsockname()[1]} accepts connections")
    except OSError as error:
        return Finding("ports", f"127.0.0.1 does not accept connections: {error}", "allow loopback connections.")


def host_name() -> Finding:
    """Check that the host name resolves; collectives of several trainers use it."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return Finding(
            "host name", f"{name} has no address: {error}", f"add the line `127.0.0.1 {name}` to /etc/hosts."
        )
    return Finding("host name", f"{name} is {address}; other machines connect to {reachable_host('')}")


def proxies() -> Finding:
    """List the proxy variables of the environment. A run bypasses these proxies for its own calls."""
    names = [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]
    bypassed = f"{', '.join(names)}; runs bypass them for {', '.join(LOCAL_HOSTS)} and their own addresses"
    return Finding("proxies", bypassed if names else "none")


def servers() -> Finding:
    """List the kinds of inference servers, with the versions of those installed here."""
    kinds = sorted(registry.available("rl.inference_engines"))
    installed = [f"{kind} {version}" if (version := _version(kind)) else kind for kind in kinds]
    external_kinds = [kind for kind in kinds if kind in ("vllm", "sglang") and not _version(kind)]
    external = (
        f"; for {' and '.join(external_kinds)}, set rollout.server.python to the Python of an environment with them"
    )
    return Finding("servers", ", ".join(installed) + (external if external_kinds else ""))


def clusters() -> Finding:
    """List the schedulers whose commands or packages are installed."""
    slurm = shutil.which("sbatch")
    schedulers = [
        "local",
        *([f"slurm ({slurm})"] if slurm else []),
        *([f"ray {_version('ray')}"] if _version("ray") else []),
    ]
    return Finding("launchers", ", ".join(schedulers))


def sandbox() -> Finding:
    """Check whether code written by a model can be sandboxed. Runs without such code do not need this."""
    missing = confine.missing_kernel_features()
    return Finding(
        "sandbox",
        f"not available: needs {' and '.join(missing)}" if missing else "available for code written by models",
    )


def trial(app: str, settings: Sequence[str]) -> Iterator[Finding]:
    """Run one small step of a command with its own model, servers and trainers. A command with servers compares the
    log-probs of servers and trainers."""
    from rl_apps.settings.device_layout import layout_of

    try:
        loaded = registry.load("rl.apps", app)
        trainers = layout_of(loaded.config(settings).allocation, loaded.servers).actor.strategy.world_size
    except RLError as error:
        yield Finding(app, str(error), OUTPUT_FORMAT)
        return
    small = ["total_steps=1", f"data.batch_size={trainers}", "evaluation.examples=0", "trackers=none"]
    if loaded.servers == "required":
        small += ["rollout.group_size=2", "actor.minibatches=1"]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "rl_apps.cli.main", "run", app, *settings, *small, f"run_dir={run}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            yield Finding(app, f"no step within {TRIAL_SECONDS:g} s", "run it with total_steps=1 and read its logs.")
            return
        if done.returncode:
            last = "\n      ".join((done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:])
            yield Finding(app, f"one step ended with exit code {done.returncode}:\n      {last}", OUTPUT_FORMAT)
            return
        records = list(json_lines(run / "metrics.jsonl"))
    yield Finding(app, f"one step of {trainers} trainer(s) in {time.monotonic() - begin:.0f} s, including the start")
    yield from _log_prob_gap(next(record for record in records if "sequences" in record))


def _log_prob_gap(record: dict[str, Any]) -> Iterator[Finding]:
    """Report the log-prob gap between servers and trainers. A larger gap than allowed fails the step earlier."""
    if (gap := record.get("gap/max_abs")) is not None:
        yield Finding("gap", f"servers and trainers differ by at most {gap:.1e} nats, within the limits of the run")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
