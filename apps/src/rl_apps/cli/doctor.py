"""`rl doctor`: whether this machine, and a command with its settings, can do what a run asks of them. Every fault comes
with its remedy."""

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
"""Bytes that must be free: beside the runs, in /dev/shm, and of memory."""
FILES = 4096
"""Files that a process must be allowed to open: one for each answer in flight, and more."""
SKEW = 2.0
"""Seconds by which the clock of the runs' disk may differ from this machine's."""
TRIAL_SECONDS = 1800.0
"""For the one step of a trial; a large model is loaded twice."""
LAST_LINES = 12
"""Of what a trial that failed had said."""
OUTPUT_FORMAT = "change the command as this says."


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found."""

    what: str
    said: str
    remedy: str = ""
    """What to do about it; empty where nothing is wrong."""


def doctor(app: str, settings: Sequence[str], directory: Path) -> int:
    """Look at the machine, and take one small step with a command where one is given; print each finding as it comes.

    Args:
        app: name of an app, or its dotted path; empty: the machine alone.
        settings: of the app, as its command takes them.
        directory: where runs are to be.

    Returns:
        1 where anything is wrong, else 0.

    Raises:
        ConfigError: there is no such app.
    """
    if app:
        registry.load("rl.apps", app)
    faults = 0
    for finding in (*machine(directory), *(trial(app, settings) if app else ())):
        faults += bool(finding.remedy)
        print(f"{'!!' if finding.remedy else 'ok'}  {finding.what:<13} {finding.said}", flush=True)
        if finding.remedy:
            print(f"    {'':<13} -> {finding.remedy}", flush=True)
    print(f"{faults} fault(s)" if faults else "nothing is wrong")
    return 1 if faults else 0


def machine(directory: Path) -> Iterator[Finding]:
    """Findings about this machine and what is installed."""
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
    """What is installed here. Their own requirements bound the versions."""
    names = ("torch", "transformers", "megatron-core", "peft", "vllm", "sglang", "ray")
    there = [f"{name} {version}" for name in names if (version := _version(name))]
    return Finding("environment", f"Python {sys.version.split()[0]}, {', '.join(there)}")


def devices() -> Finding:
    """GPUs that torch and the launcher find, and usable cores."""
    import torch

    cores, listed, count = usable_cores(), visible_gpus(os.environ), torch.cuda.device_count()
    expected = min(len(listed), 1) if "MIG-" in "".join(listed) else len(listed)  # CUDA gives a process one instance
    said = f"{count or 'no'} GPU{'s' if count > 1 else ''}, {cores} cores"
    if shutil.which("nvidia-smi") and not count:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        return Finding(
            "devices",
            f"{said}, though nvidia-smi is here; torch {torch.__version__} is built for {built}",
            "run nvidia-smi: where it lists GPUs, install a torch that is built for its CUDA version or an older one.",
        )
    if count != expected:
        return Finding(
            "devices",
            f"{said} for torch, but {expected} for the launcher ({', '.join(listed)})",
            "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi lists, each once.",
        )
    if count:
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(count)) / GIB
        said = f"{count} x {torch.cuda.get_device_name(0)}, {free:.0f} GiB free; {cores} cores"
    return Finding("devices", said)


def memory() -> Finding:
    """Of the machine; a cgroup may allow less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    remedy = "end what uses it, or take a smaller model." if free < MEMORY else ""
    return Finding("memory", f"{free / GIB:.1f} GiB available (expected {MEMORY // GIB})", remedy)


def shared_memory() -> Finding:
    """Where weights go from trainers to servers on one machine."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", f"cannot be used: {error}", "set publish.route=disk.")
    remedy = "mount it larger (containers: --shm-size=8g), or set publish.route=disk." if free < SHARED else ""
    return Finding("/dev/shm", f"{free / GIB:.1f} GiB free (expected {SHARED // GIB}, or twice the model)", remedy)


def disk(directory: Path) -> Iterator[Finding]:
    """Where runs are to be: room, the right to write, and its clock."""
    there = directory.resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    remedy = "free some, or set run_dir to another disk." if free < DISK else ""
    yield Finding("disk", f"{free / GIB:.0f} GiB free at {there} (expected {DISK // GIB})", remedy)
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            apart = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        yield Finding("runs", f"{there} cannot be written: {error}", "set run_dir to a directory that can be.")
        return
    remedy = "set both clocks by NTP: who lives and who is lost is told by them." if abs(apart) > SKEW else ""
    yield Finding("clock", f"the disk's is {abs(apart):.1f} s from this machine's (at most {SKEW:g})", remedy)


def files() -> Finding:
    """How many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {hard if 0 < hard < 65536 else 65536}, before the run is started." if 0 <= soft < FILES else ""
    return Finding("open files", f"{soft} per process (expected {FILES})", remedy)


def ports() -> Finding:
    """Whether this machine can talk to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return Finding("ports", f"127.0.0.1:{server.getsockname()[1]} could be listened on and reached")
    except OSError as error:
        return Finding("ports", f"127.0.0.1 cannot be listened on or reached: {error}", "allow loopback connections.")


def host_name() -> Finding:
    """Collectives of several trainers look for this machine by its name."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return Finding("host name", f"{name} has no address: {error}", f"add a line `127.0.0.1 {name}` to /etc/hosts.")
    return Finding("host name", f"{name} is {address}; other machines reach this one at {reachable_host('')}")


def proxies() -> Finding:
    """Proxies of the environment, which a run bypasses for its own calls."""
    names = [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]
    bypassed = f"{', '.join(names)}; runs bypass them for {', '.join(LOCAL_HOSTS)} and their own addresses"
    return Finding("proxies", bypassed if names else "none")


def servers() -> Finding:
    """Kinds of inference servers, and which can be started from here."""
    kinds = sorted(registry.available("rl.inference_engines"))
    here = [f"{kind} {version}" if (version := _version(kind)) else kind for kind in kinds]
    apart = [kind for kind in kinds if kind in ("vllm", "sglang") and not _version(kind)]
    said = f"; {' and '.join(apart)} by rollout.server.python, the Python of an environment that has them"
    return Finding("servers", ", ".join(here) + (said if apart else ""))


def clusters() -> Finding:
    """Schedulers whose commands or packages are here."""
    slurm = shutil.which("sbatch")
    there = [
        "local",
        *([f"slurm ({slurm})"] if slurm else []),
        *([f"ray {_version('ray')}"] if _version("ray") else []),
    ]
    return Finding("launchers", ", ".join(there))


def sandbox() -> Finding:
    """Whether programs of a model can be kept in; runs without any need it not."""
    lacking = confine.missing_kernel_features()
    return Finding("sandbox", f"none here: needs {' and '.join(lacking)}" if lacking else "programs can be confined")


def trial(app: str, settings: Sequence[str]) -> Iterator[Finding]:
    """One small step of a command with its own model, servers and trainers: everything is loaded, and in a command with
    servers, what they say of their answers' log-probs is compared with the trainers'."""
    from rl_apps.settings.device_layout import layout_of

    try:
        loaded = registry.load("rl.apps", app)
        trainers = layout_of(loaded.config(settings).allocation, loaded.servers).actor.strategy.world_size
    except RLError as error:
        yield Finding(app, str(error), OUTPUT_FORMAT)
        return
    small = ["total_steps=1", f"data.batch_size={trainers}", "evaluation.rows=0", "trackers=none"]
    if loaded.servers == "required":
        small += ["rollout.group_size=2", "actor.minibatches=1"]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "rl_apps.cli.main", "run", app, *settings, *small, f"run_dir={run}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            yield Finding(
                app, f"no step within {TRIAL_SECONDS:g} s", "run it with total_steps=1, and look at its logs."
            )
            return
        if done.returncode:
            last = "\n      ".join((done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:])
            yield Finding(app, f"one step ended with exit code {done.returncode}:\n      {last}", OUTPUT_FORMAT)
            return
        records = list(json_lines(run / "metrics.jsonl"))
    yield Finding(app, f"one step of {trainers} trainer(s) in {time.monotonic() - begin:.0f} s, with all that starts")
    yield from _agreement(next(record for record in records if "rows" in record))


def _agreement(record: dict[str, Any]) -> Iterator[Finding]:
    """The generate-versus-train check. A gap that is too large has ended the step by itself."""
    if (gap := record.get("gap/max_abs")) is not None:
        yield Finding("gap", f"servers and trainers differ by {gap:.1e} nats at most, within the run's limits")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
