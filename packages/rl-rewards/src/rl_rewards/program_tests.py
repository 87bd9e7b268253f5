"""Tests of programs, in the formats of published data sets, and the comparison of results.

The tests of an example are a list of `{"input": ..., "output": ...}` (LiveCodeBench), `{"inputs": [...], "outputs":
[...]}` (APPS, TACO, CodeContests), or the JSON text of either (PRIME). Tests call a function if the example, the tests
or a single test has its name: `fn_name`, or `func_name` in `metadata`. Otherwise a program reads stdin and prints.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from typing import Any

from rl_contracts.errors import RewardError

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Tolerances for numbers, from the checker of APPS (`numpy.allclose`)."""

# The program runs as a module, so that its block under `if __name__ == "__main__"` does not run. It gets the imports
# that the judges of these data sets provide. Its output to stdout is not part of the result.
_CALL = """\
import json, os, sys, types
arguments, real = json.load(sys.stdin), sys.stdout
sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")
sys.setrecursionlimit(50000)
# JSON writes integer keys as text
arguments = [
    {{int(k): v for k, v in a.items()}} if isinstance(a, dict) and all(k.isdigit() for k in a) else a for a in arguments
]
module = sys.modules["solution"] = types.ModuleType("solution")
for name in ("typing", "collections", "itertools", "functools", "heapq", "bisect", "math", "string", "builtins"):
    exec(f"from {{name}} import *\\nimport {{name}}", module.__dict__)
exec("import copy, datetime, operator, random, re, statistics, sys", module.__dict__)
module.__dict__.pop({name!r}, None)  # the program has to define it
exec(compile({code!r}, "solution.py", "exec"), module.__dict__)
owner = module.Solution() if hasattr(getattr(module, "Solution", None), {name!r}) else module
result = getattr(owner, {name!r})(*arguments)
real.write("\\n" + json.dumps(result, default=list))
real.flush()
"""


@dataclass(frozen=True)
class ProgramTest:
    """Single test of a program."""

    arguments: Any
    """Text for stdin, or the list of arguments."""
    expected: Any
    """Expected text on stdout, or expected result of the function."""
    function: str | None = None
    """Name of the function, or of the method of `class Solution`, that the test calls."""
    listed: bool = False
    """True if an expected list of one value also accepts that value without the list, as in APPS."""

    def script(self, code: str) -> tuple[str, str]:
        """Return the script to run for a program, and its stdin."""
        if self.function is None:
            return code, self.arguments
        return _CALL.format(code=code, name=self.function), json.dumps(self.arguments)

    def accepts(self, output: str) -> bool:
        """Return whether the stdout of a completed script is right."""
        if self.function is None:
            return same_output(self.expected, output)
        try:
            result = json.loads(output.rpartition("\n")[2])
        except ValueError:
            return False
        in_list = self.listed and isinstance(self.expected, list) and len(self.expected) == 1
        return same_value(self.expected, result) or (in_list and same_value(self.expected[0], result))


def read_tests(tests: Any, function: str | None = None, metadata: Any = None) -> list[ProgramTest]:
    """Return the tests of an example.

    Args:
        tests: tests in one of the formats of this module.
        function: `fn_name` of the example.
        metadata: `metadata` of the example, an object with `func_name` or its JSON text.

    Raises:
        RewardError: there are no tests, or they have another format.
    """
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if not isinstance(tests, dict):
            cases = list(tests)
        else:
            function = tests.get("fn_name") or function
            inputs, outputs = (tests[name] if name in tests else tests[name[:-1]] for name in ("inputs", "outputs"))
            # a single test may have texts instead of lists
            inputs, outputs = ([value] if isinstance(value, str) else value for value in (inputs, outputs))
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
            cases = [{"input": text, "output": output} for text, output in zip(inputs, outputs, strict=True)]
        function = function or _function(metadata)
        program_tests = [
            _test(case, case.get("fn_name") or _function(case.get("metadata")) or function) for case in cases
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(f"{type(error).__name__}: {error}") from error
    if not program_tests:
        raise _unreadable("none")
    return program_tests


def same_output(expected: str, output: str) -> bool:
    """Return whether two texts have the same words in the same lines, ignoring blank lines.

    Numbers are compared within the tolerances.
    """
    expected_lines, output_lines = (
        [line.split() for line in text.splitlines() if line.strip()] for text in (expected, output)
    )
    return len(expected_lines) == len(output_lines) and all(
        len(one) == len(other) and all(map(_same_word, one, other))
        for one, other in zip(expected_lines, output_lines, strict=True)
    )


def same_value(expected: Any, result: Any) -> bool:
    """Return whether two JSON values are equal, with floats compared within the tolerances."""
    if isinstance(expected, list) and isinstance(result, list):
        return len(expected) == len(result) and all(map(same_value, expected, result))
    if isinstance(expected, dict) and isinstance(result, dict):
        return expected.keys() == result.keys() and all(same_value(expected[key], result[key]) for key in expected)
    if isinstance(expected, float) or isinstance(result, float):
        return (
            isinstance(expected, int | float)
            and isinstance(result, int | float)
            and math.isclose(expected, result, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        )
    return bool(expected == result)


def _unreadable(problem: str) -> RewardError:
    return RewardError(
        "code: expected `tests` as a list of {input, output}, as {inputs, outputs}, or as the JSON text of either, "
        f"found {problem:.200}; correct `tests` of the example"
    )


def _test(case: dict[str, Any], function: str | None) -> ProgramTest:
    if function is None:
        if case.get("testtype") == "functional":
            raise ValueError("a functional test without the name of its function in `fn_name`")
        value = case.get("input")
        return ProgramTest("" if value is None else _text(value), _text(case["output"]))
    value, expected = case["input"], case["output"]
    if isinstance(value, str):  # one JSON value per line, and the result as JSON
        value = [_json(line) for line in value.split("\n") if line.strip()]
        expected = _json(expected)
    return ProgramTest(
        value if isinstance(value, list) else [value], expected, function, not isinstance(case["output"], str)
    )


def _json(value: Any) -> Any:
    """Return the value of a JSON text, or any other value unchanged."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _function(metadata: Any) -> str | None:
    """Return the `func_name` in the metadata of a test or example, or None."""
    metadata = _json(metadata)
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _text(value: Any) -> str:
    if value is None:
        raise ValueError("a test without an output")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_word(expected: str, word: str) -> bool:
    if expected == word:
        return True
    if _is_integer(expected) and _is_integer(word):
        return False
    try:
        return math.isclose(float(expected), float(word), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except ValueError:
        return False


def _is_integer(word: str) -> bool:
    return word.lstrip("+-").isdigit()
