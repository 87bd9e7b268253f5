"""How many files a process may have open: each connection is one, and a client has one per open request."""

from __future__ import annotations

import contextlib
import errno
import resource

from rl_contracts.errors import InferenceError

NO_FILE_LEFT = (errno.EMFILE, errno.ENFILE)
"""Numbers of an OSError that says so: of this process, and of the machine."""


class TooManyFilesError(InferenceError):
    """This process has no file left for a connection. The server that it wanted to ask may well be healthy."""

    def __init__(self, where: str, error: OSError) -> None:
        super().__init__(
            f"{where}: no connection, because this process has no file left: {error.strerror or error}. It may have "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open (`ulimit -n`), and each open request takes one: "
            "group_size for each of rollout.max_concurrent groups (null: (max_staleness + 1) * batch size), divided by "
            "the trainer's replicas, with rollout.eval_concurrent and about 200 more. Raise the hard limit "
            "(`ulimit -Hn`, LimitNOFILE of a service, --ulimit nofile of a container) or lower rollout.max_concurrent."
        )


def raise_file_limit() -> None:
    """Take all the files that this process may have: the soft limit becomes the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse a limit that is called unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
