"""docs/formulas.md lists every built-in component and existing functions, and its formulas convert to MathML."""

import importlib
import re
from importlib.metadata import entry_points
from pathlib import Path

from latex2mathml.converter import convert

from rl_trainers.algorithms.functional.aggregation import AGGREGATIONS
from rl_trainers.algorithms.functional.kl import ESTIMATORS

PAGE = (Path(__file__).parents[2] / "docs" / "formulas.md").read_text()
COMPONENTS = [
    f"`{point.name}`" if group != "rl.advantages" else f"`algorithm.advantage.kind={point.name}`"
    for group in ("rl.advantages", "rl.policy_losses", "rl.corrections", "rl.masks")
    for point in entry_points(group=group)
    if point.value.startswith("rl_trainers.")
]
FORMULAS = re.findall(r"\$\$\n(.*?)\n\$\$|(?<!\$)\$([^$\n]+)\$", PAGE, re.DOTALL)


def test_page_lists_every_component() -> None:
    names = [*COMPONENTS, *(f"`{name}`" for name in (*AGGREGATIONS, *ESTIMATORS))]

    assert len(COMPONENTS) >= 13
    assert [name for name in names if name not in PAGE] == []


def test_functions_on_the_page_exist() -> None:
    modules = re.findall(r"`(rl_trainers\.algorithms\.functional\.\w+)(?:\.(\w+))?`", PAGE)
    loaded = [importlib.import_module(name) for name, _ in modules]
    named = {function for _, function in modules if function}
    named |= set(re.findall(r"`(\w+_(?:loss|weights|mask|outliers|logprobs)|shaped)`", PAGE)) - {"second_moment"}

    assert len(named) > 15
    assert [name for name in sorted(named) if not any(hasattr(module, name) for module in loaded)] == []


def test_formulas_convert_to_mathml() -> None:
    formulas = {display or inline for display, inline in FORMULAS}

    # the converter keeps a command that it does not know
    assert [formula for formula in sorted(formulas) if "\\" in convert(formula)] == []
