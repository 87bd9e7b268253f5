"""Command-line parsing: flags and settings, with errors for unknown arguments. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from rl_contracts.errors import ConfigError, did_you_mean
from rl_contracts.runtime.terminal import leave_pipe

FLAG_NAMES = ("--config", "--dry-run", "--cfg", "--help")
"""Flags of an app."""


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


def parse(
    argv: list[str], program: str = "rl run", nearest: Callable[[str], str] = lambda name: ""
) -> argparse.Namespace:
    """Split a command line into its flags and `overrides`, a list of `key=value` in Hydra's grammar.

    Args:
        program: the command, for messages.
        nearest: returns the setting that the name of an unknown flag probably means, or "".

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
    for number, argument in enumerate(overrides):
        if "=" not in argument or argument.startswith(("-", "=")):
            raise ConfigError(f"argument {argument!r}: expected key=value{_remedy(overrides[number:], nearest)}")
    line.overrides = overrides
    return line


def _remedy(arguments: list[str], nearest: Callable[[str], str]) -> str:
    """Return how to write the first argument, which is neither a flag nor a setting: with `=`, or as another flag."""
    argument, following = arguments[0], arguments[1:2]
    if argument.startswith("-") and not get_close_matches(argument, FLAG_NAMES, cutoff=0.8):
        name, _, value = argument.lstrip("-").partition("=")
        if not value and following and not following[0].startswith("-") and "=" not in following[0]:
            value = following[0]
        if setting_name := nearest(name.replace("-", "_")):
            assignment = setting_name if "=" in setting_name else f"{setting_name}={value or 'VALUE'}"
            return f"; use {assignment}."
    flags = "--config FILE.yaml, --dry-run, --cfg job or --help [SECTION]"
    spaces = " Leave out the spaces around =." if "=" in arguments else ""
    return f", such as total_steps=20, {flags}.{did_you_mean(argument, FLAG_NAMES)}{spaces}"
