"""`python -m rl_apps`: the command `rl`. Modules are imported in the block, so that Ctrl-C works from the start."""

import sys

if __name__ == "__main__":
    try:
        from rl_apps.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
