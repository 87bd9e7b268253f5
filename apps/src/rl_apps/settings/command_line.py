"""Command-line parsing: flags and settings, with errors for unknown arguments. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from rl_contracts.errors import ConfigError, did_you_mean
from rl_contracts.runtime.terminal import leave_pipe


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors as `ConfigError`: one sentence, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigError`."""
        raise ConfigError(f"{message}. `{self.prog} --help` lists the arguments.")


def print_all(text: str) -> None:
    """Print the complete output of a command. Exit with the shell's code 141 if the reader closed the pipe, like
    `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.exit(leave_pipe())


def setting(name: str, value: str) -> str:
    """Return a setting in Hydra's grammar, quoted if necessary, so that `compose` reads the same value back."""
    if re.fullmatch(r"[\w./:-]+", value, re.ASCII):
        return f"{name}={value}"
    escaped = value.replace("'", "\\'")
    return f"{name}='{escaped}'"


def parse(argv: list[str], program: str = "rl run") -> argparse.Namespace:
    """Split a command line into its flags and `overrides`, a list of `key=value` in Hydra's grammar.

    Args:
        program: the command, for messages.

    Raises:
        ConfigError: an argument is neither a known flag nor `key=value`, or a flag lacks its value.
    """
    parser = Parser(program, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--help", "-h", nargs="?", const="", metavar="SECTION")
    line, overrides = parser.parse_known_args(argv)
    if "=" in (line.help or ""):  # a setting that follows the flag
        line.help, overrides = "", [line.help, *overrides]
    for argument in overrides:
        if "=" not in argument or argument.startswith(("-", "=")):
            flags = "--config FILE.yaml, --dry-run, --cfg job or --help [SECTION]"
            near = did_you_mean(argument, ("--config", "--dry-run", "--cfg", "--help"))
            spaces = " Leave out the spaces around =." if "=" in overrides else ""
            raise ConfigError(
                f"argument {argument!r}: expected key=value, such as total_steps=20, {flags}.{near}{spaces}"
            )
    line.overrides = overrides
    return line
