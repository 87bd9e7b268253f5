"""Script of a sandbox process: confine the process, then run the untrusted code.

Run as `confine.py SETTINGS`, where SETTINGS is the JSON object that `main` reads. The script imports no other module of
this project. The code is `program.py` in the working directory. The script writes one byte to the status descriptor
once the process is confined. If confinement fails, the code is neither compiled nor run.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
import traceback
import types
from typing import Any

LANDLOCK_VERSION = 3
"""First Landlock version that restricts truncation (Linux 6.2)."""

ENTRY_BYTES = 4096
"""Bytes that each file name counts toward the limit on files."""

# Numbers of Linux on x86-64 (include/uapi/linux and arch/x86/entry/syscalls/syscall_64.tbl).
_SECCOMP, _CAPSET = 317, 126
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE = (1 << n for n in (0, 1, 2, 3, 5))
_MAKE_REG, _TRUNCATE, _IOCTL = (1 << n for n in (8, 14, 15))
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 1, 38, 41

_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_X86_64 = 0xC000003E
_FIRST_UNKNOWN_CALL = 440
"""Lowest system call number that fails with ENOSYS. All higher numbers fail too, including the x32 interface."""
_NEW_NAMESPACES, _MOUNT_FLAGS = 0x10020000, 14  # CLONE_NEWUSER | NEWNS; MS_NOSUID | NODEV | NOEXEC
_CLONE, _CLONE3, _CLONE_THREAD, _CLONE_FILES = 56, 435, 0x10000, 0x400
_FCNTL, _F_SETFL, _O_ASYNC = 72, 4, 0x2000
_MMAP, _MAP_SHARED, _MAP_ANONYMOUS = 9, 0x1, 0x20
_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 0x2
_SOCKETPAIR, _AF_UNIX, _SOCK_STREAM = 53, 1, 1
_IOCTL_CALL, _PRLIMIT = 16, 302

DENIED = {
    "network": {"socket": 41, "connect": 42, "bind": 49},
    "file descriptors in messages, which the owner's poll cannot count": {
        "sendmsg": 46,
        "recvmsg": 47,
        "recvmmsg": 299,
        "sendmmsg": 307,
    },
    "file space reserved without a write": {"fallocate": 285},
    "file activity of other processes": {"inotify_init": 253, "inotify_add_watch": 254, "inotify_init1": 294},
    "new processes": {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322},
    "other processes": {
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "pidfd_open": 434,
        "pidfd_send_signal": 424,
        "pidfd_getfd": 438,
        "tkill": 200,
        "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297,
        "setpriority": 141,
        "ioprio_set": 251,
        "sched_setparam": 142,
        "sched_setscheduler": 144,
        "sched_setaffinity": 203,
        "sched_setattr": 314,
        "migrate_pages": 256,
        "move_pages": 279,
    },
    "modes, owners and times of files, which Landlock does not restrict": {
        "chmod": 90,
        "fchmod": 91,
        "fchmodat": 268,
        "chown": 92,
        "fchown": 93,
        "lchown": 94,
        "fchownat": 260,
        "utime": 132,
        "utimes": 235,
        "futimesat": 261,
        "utimensat": 280,
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "removexattr": 197,
        "lremovexattr": 198,
        "fremovexattr": 199,
    },
    "memory that process limits do not count": {
        "shmget": 29,
        "shmat": 30,
        "shmctl": 31,
        "semget": 64,
        "semop": 65,
        "semctl": 66,
        "semtimedop": 220,
        "msgget": 68,
        "msgsnd": 69,
        "msgrcv": 70,
        "msgctl": 71,
        "mq_open": 240,
        "mq_unlink": 241,
        "memfd_create": 319,
    },
    "limits": {"setrlimit": 160},
    "the kernel": {
        "mount": 165,
        "umount2": 166,
        "pivot_root": 155,
        "chroot": 161,
        "unshare": 272,
        "setns": 308,
        "open_tree": 428,
        "move_mount": 429,
        "fsopen": 430,
        "fsconfig": 431,
        "fsmount": 432,
        "fspick": 433,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "perf_event_open": 298,
        "bpf": 321,
        "userfaultfd": 323,
        "fanotify_init": 300,
        "open_by_handle_at": 304,
        "sync": 162,
        "syncfs": 306,
    },
}
"""Denied system calls, by the resource that they would access."""
_SELF_ONLY = {"kill": 62, "tgkill": 234}
_DENIED_VALUES = {157: (0, (_PR_SET_PDEATHSIG, 4, _PR_SET_THP_DISABLE)), _FCNTL: (1, (8, 10, 15, 1024))}
"""Denied argument values: system call number to (argument index, values).

prctl: PR_SET_PDEATHSIG lets the code outlive the owner, PR_SET_DUMPABLE hides it from the owner, and PR_SET_THP_DISABLE
enables huge pages. fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX send signals to other processes, and F_SETLEASE blocks
other processes that open the file.
"""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed ioctl requests: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX.

Other requests can send signals to other processes (FIOSETOWN, SIOCSPGRP) or reserve file space (FS_IOC_RESVSP).
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: Any) -> int:
    """Run a system call and return its result, or the negated error number."""
    c_arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *c_arguments))
    return result if result >= 0 else -ctypes.get_errno()


def _check_call(call: str, result: int) -> int:
    if result < 0:
        raise OSError(-result, f"{call}: {os.strerror(-result)}")
    return result


def landlock_version() -> int:
    """Return the Landlock version of this kernel, or a negated error number."""
    return _call(_LANDLOCK_CREATE, None, 0, 1)


def missing_kernel_features() -> list[str]:
    """Return the kernel features that a sandbox needs and this kernel lacks; empty if code can be confined."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return [f"Linux on x86-64 (this is {sys.platform} on {platform.machine()})"]
    missing, version = [], landlock_version()
    if version < LANDLOCK_VERSION:
        actual = f"version {version}" if version > 0 else os.strerror(-version)
        missing.append(f"Landlock version {LANDLOCK_VERSION} or later, from Linux 6.2 (found: {actual})")
    if (seccomp := _call(_SECCOMP, 2, 0, ctypes.byref(ctypes.c_uint32(_REFUSE)))) < 0:
        missing.append(f"seccomp filters (found: {os.strerror(-seccomp)})")
    return missing


def set_resource_limits(settings: dict[str, Any]) -> None:
    """Limit CPU time, address space, file size and open files, and disable core files and huge pages.

    Huge pages would evade the memory limit: 4 KiB that stay mapped keep a whole huge page of 2 MiB.
    """
    _libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    seconds = settings["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for limit, value in (
        (resource.RLIMIT_AS, settings["memory"]),
        (resource.RLIMIT_FSIZE, settings["file"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def give_up_privileges() -> None:
    """Drop all capabilities, for root too, and prevent executed programs from gaining any."""
    _check_call("capset", _call(_CAPSET, struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)))
    _check_call("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def bound_files(size: int) -> None:
    """Mount a tmpfs of `size` bytes on the working directory, and copy `program.py` to it.

    The file system exists as long as this process. Each file takes one of `size / ENTRY_BYTES` inodes. If the user may
    not create namespaces, the polling by `Sandbox` is the only limit.
    """
    directory, user, group = os.getcwd(), os.getuid(), os.getgid()
    with open("program.py", "rb") as file:
        program = file.read()
    with contextlib.suppress(OSError):
        _check_call("unshare", _libc.unshare(_NEW_NAMESPACES))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        options = f"size={size},nr_inodes={size // ENTRY_BYTES + 2},mode=700".encode()
        _check_call("mount", _libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", _MOUNT_FLAGS, options))
    os.chdir(directory)
    with open("program.py", "wb") as file:
        file.write(program)


def restrict_filesystem(rights: dict[str, int], alone: bool = True) -> None:
    """Restrict this process with Landlock to the given paths, and deny signals to other processes.

    Restrictions on signals, TCP and abstract sockets apply only if the kernel's Landlock version supports them.

    Args:
        rights: access rights for each path and the files below it. Missing paths are ignored.
        alone: whether to deny TCP and abstract sockets too.
    """
    version = _check_call("Landlock", landlock_version())
    handled = (1 << (16 if version >= 5 else 15)) - 1
    scope = 3 if alone else 2
    attributes = struct.pack("3Q", handled, 3 if alone and version >= 4 else 0, scope if version >= 6 else 0)
    ruleset = _check_call("landlock_create_ruleset", _call(_LANDLOCK_CREATE, attributes, len(attributes), 0))
    for path, right in rights.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            right &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL
        right &= handled
        _check_call(
            f"landlock_add_rule {path}", _call(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", right, descriptor), 0)
        )
        os.close(descriptor)
    _check_call("landlock_restrict_self", _call(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def write_only_below(directory: str, shared_memory: bool = False) -> None:
    """Allow this process and its descendants to write files below `directory` only, and deny further privileges.

    From Linux 6.12 on, they can send signals only to each other. Reading files, computing and network connections stay
    unrestricted.

    Args:
        directory: directory that stays writable.
        shared_memory: whether /dev/shm stays writable too; a run keeps weights there while servers load them.

    Raises:
        OSError: the kernel has no Landlock.
    """
    _check_call("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    all_rights, read = (1 << 16) - 1, _EXECUTE | _READ_FILE | _READ_DIR | _IOCTL
    rights = {"/": read, "/dev/shm": all_rights if shared_memory else read, directory: all_rights}
    restrict_filesystem(
        rights | dict.fromkeys(("/dev/null", "/dev/zero", "/dev/full", "/dev/tty"), read | _WRITE_FILE), alone=False
    )


def install_seccomp_filter() -> None:
    """Install a seccomp filter that denies sockets, new processes and the rest of `DENIED`, also in later threads."""
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    not_implemented = (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)
    refuse, allow = (_RETURN, 0, 0, _REFUSE | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    program += [(_AT_LEAST, 0, 1, _FIRST_UNKNOWN_CALL), not_implemented]
    # a filter cannot read the flags of clone3; libc falls back to clone
    program += [(_EQUAL, 0, 1, _CLONE3), not_implemented]
    for calls in DENIED.values():
        for number in calls.values():
            program += [(_EQUAL, 0, 1, number), refuse]
    self_only = [_load_argument(0), (_EQUAL, 1, 0, os.getpid()), refuse]
    cases = dict.fromkeys(_SELF_ONLY.values(), self_only) | {
        # all threads must share one table of open files, because the owner polls a single one
        _CLONE: [_load_argument(0), (_HAS_BITS, 0, 2, _CLONE_THREAD), (_HAS_BITS, 0, 1, _CLONE_FILES), allow, refuse],
        _CLOSE_RANGE: [_load_argument(2), (_HAS_BITS, 0, 1, _CLOSE_RANGE_UNSHARE), refuse],
        # one mapped page keeps an entire shared mapping in memory, but the memory limit counts only that page
        _MMAP: [_load_argument(3), (_HAS_BITS, 0, 2, _MAP_SHARED), (_HAS_BITS, 0, 1, _MAP_ANONYMOUS), refuse],
        _PRLIMIT: [_load_argument(2), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, 36), (_EQUAL, 0, 1, 0), allow, refuse],
        # asyncio uses pairs of Unix stream sockets; a datagram socket could send to any socket in the file system
        _SOCKETPAIR: [
            *(_load_argument(0), (_EQUAL, 0, 4, _AF_UNIX)),
            *(_load_argument(1), (_HAS_BITS, 2, 0, 0xE), (_HAS_BITS, 0, 1, _SOCK_STREAM), allow, refuse),
        ],
        _IOCTL_CALL: [
            _load_argument(1),
            *(line for value in _IOCTLS for line in ((_EQUAL, 0, 1, value), allow)),
            refuse,
        ],
    }
    for number, (argument, values) in _DENIED_VALUES.items():
        cases[number] = [
            _load_argument(argument),
            *(line for value in values for line in ((_EQUAL, 0, 1, value), refuse)),
        ]
    cases[_FCNTL] += [(_EQUAL, 0, 3, _F_SETFL), _load_argument(2), (_HAS_BITS, 0, 1, _O_ASYNC), refuse]
    for number, case in cases.items():
        program += [(_EQUAL, 0, len(case) + 1, number), *case, allow]
    program.append(allow)
    install(program)


def _load_argument(index: int) -> tuple[int, int, int, int]:
    """Return the instruction that loads the lower 32 bits of a system call argument."""
    return _LOAD, 0, 0, 16 + 8 * index


def install(program: list[tuple[int, int, int, int]]) -> None:
    """Install a seccomp filter program in this process."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_program = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    _check_call("seccomp", _call(_SECCOMP, 1, 0, filter_program))


def main() -> None:
    """Confine this process, report success to the owner, and run the code."""
    settings = json.loads(sys.argv[1])
    bound_files(settings["files"])
    _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != settings["owner"]:
        os._exit(1)
    read_only = _READ_FILE | _READ_DIR
    working_directory_rights = read_only | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    rights = dict.fromkeys(settings["readable"], read_only) | {
        "/dev/null": read_only | _WRITE_FILE,
        os.getcwd(): working_directory_rights,
    }
    set_resource_limits(settings)
    give_up_privileges()
    restrict_filesystem(rights)
    install_seccomp_filter()
    os.write(settings["status_fd"], b"1")
    os.close(settings["status_fd"])
    sys.argv, sys.path = ["program.py"], [*sys.path, *settings["packages"]]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # usually defined by `site`, which `-S` disables
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with open("program.py", encoding="utf-8") as file:
            exec(compile(file.read(), "program.py", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the traceback of any error is the output for the author of the code
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        sys.exit(1)


if __name__ == "__main__":
    main()
