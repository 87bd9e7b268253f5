"""Program that registers a new worker process with the reaper and then executes the worker's command.

Usage: `python -I -S exec_worker.py REAPER_FD COMMAND...`. It runs by path and imports only the standard library, so
that it takes a few hundredths of a second. It replaces a `preexec_fn`, which is unsafe if the launcher has threads.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Register with the reaper, restore default signal handling, execute the command."""
    reaper_fd, command = int(sys.argv[1]), sys.argv[2:]
    with suppress(BrokenPipeError):  # the scheduler replaces a dead reaper and registers all workers with the new one
        os.write(reaper_fd, b"+%d\n" % os.getpid())
    os.close(reaper_fd)
    for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):  # Python ignores SIGPIPE, a node agent the others
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT, and the command would inherit the mask
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
