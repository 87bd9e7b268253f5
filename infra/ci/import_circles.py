"""An import-linter contract: no modules import each other, directly or through other modules.

Imports inside functions and imports for type checkers count too, because files in such a circle cannot be understood,
moved or tested separately. `lint-imports` runs the contract ([tool.importlinter] in pyproject.toml).
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.application import contract_utils
from importlinter.application.contract_utils import AlertLevel


class NoCirclesContract(Contract):
    """The import graph of the root packages has no circles.

    Configuration options:
        - ignore_imports: Imports to remove from the graph.
        - unmatched_ignore_imports_alerting: How to report an ignored import that does not exist: "none", "warn" or
          "error".
    """

    type_name = "no_circles"

    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)
    unmatched_ignore_imports_alerting = fields.EnumField(AlertLevel, default=AlertLevel.ERROR)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the circles; the contract is kept if there is none."""
        removal = contract_utils.remove_ignored_imports_and_report(
            graph=graph,
            ignore_imports=self.ignore_imports,
            unmatched_alerting=self.unmatched_ignore_imports_alerting,
        )
        imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        circles = find_circles(imports)
        lines = {
            (importer, imported): graph.get_import_details(importer=importer, imported=imported)[0]["line_number"]
            for circle in circles
            for importer in circle
            for imported in sorted(imports[importer] & set(circle))
        }
        return ContractCheck(
            kept=not circles, warnings=list(removal.warnings), metadata={"circles": circles, "lines": lines}
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each circle with the imports that close it."""
        for circle in check.metadata["circles"]:
            output.print_error(f"{len(circle)} modules import each other:")
            for (importer, imported), line in check.metadata["lines"].items():
                if importer in circle:
                    output.indent_cursor()
                    output.print_error(f"{importer} -> {imported} (l. {line})", bold=False)
            output.print_error("Move the shared code to a separate module, or merge the modules.", bold=False)
            output.new_line()


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972), each in alphabetical order.

    Args:
        imports: Imported modules by module; every imported module is a key too.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in sorted(imports[module]):
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            first = stack.index(module)
            if len(stack) - first > 1:
                circles.append(sorted(stack[first:]))
            del stack[first:]

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return circles
