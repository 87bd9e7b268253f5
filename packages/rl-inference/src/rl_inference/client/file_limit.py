"""Limit of open files of a process. A client needs one connection, and so one file, per open request."""

from __future__ import annotations

import contextlib
import errno
import resource

from rl_contracts.errors import InferenceError

NO_FILE_LEFT = (errno.EMFILE, errno.ENFILE)
"""Error numbers of an OSError at the limit of open files of this process, and at the limit of the machine."""


class TooManyFilesError(InferenceError):
    """Connection that failed because this process reached its limit of open files. The server may be healthy.

    A trainer process needs about 200 files, plus one per concurrent evaluation request (256),
    plus one per episode in progress (`group_size` per group). Its number of groups is `rollout.max_concurrent` divided
    by the number of replicas. If `max_concurrent` is null, (max_staleness + 1) * batch size takes its place.
    """

    def __init__(self, where: str, error: OSError) -> None:
        super().__init__(
            f"{where}: cannot connect: {error.strerror or error}. This process reached its limit of "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files (`ulimit -n`), and each open request needs "
            "one. Raise the hard limit (`ulimit -Hn`, LimitNOFILE of a service, --ulimit nofile of a container) or "
            "lower rollout.max_concurrent."
        )


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems reject an unlimited soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
