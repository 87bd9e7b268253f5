"""Runs between the scheduler and a worker's command: enlists the process with the keeper, then becomes the command.

Called as `python -I -S enlist.py KEEPER_FD CORES COMMAND...`, by path and with the standard library only, so that it
costs a few hundredths of a second. What has to happen in the new process happens here instead of in a `preexec_fn`,
which is unsafe where the launcher has threads.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Enlist, pin to cores, restore what Python changed, exec."""
    keeper, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with suppress(BrokenPipeError):  # a keeper that died is replaced by the scheduler, which enlists everybody again
        os.write(keeper, b"+%d\n" % os.getpid())
    os.close(keeper)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):  # Python ignores the first, an agent the others
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT; a command would inherit all this
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
