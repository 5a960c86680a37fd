"""Measures of the package's structure, for comparing two commits: `python tools/house.py [ROOT]`.

An import is an edge between modules, also inside a function or for the type checker. Packages are the folders and
modules directly in `llmrecipes`, in the order of LAYERS in tests/unit/test_repository.py.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "llmrecipes"
Graph = dict[str, set[str]]


def parsed(root: Path) -> dict[str, tuple[Path, ast.Module]]:
    """Path and syntax tree of each module by its dotted name."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = path, ast.parse(path.read_text("utf-8"))
    return modules


def imported(tree: ast.AST, modules: Mapping[str, object]) -> Iterator[str]:
    """Modules of the package that a module imports; `from a.b import c` is a.b.c where that is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules or node.module in modules:
                    yield name if name in modules else node.module


def import_lines(tree: ast.AST) -> int:
    """Lines of import statements."""
    statements = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in statements)


def layers(root: Path) -> dict[str, int]:
    """Position of each package in LAYERS."""
    tree = ast.parse((root / "tests" / "unit" / "test_repository.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LAYERS":
            return {name: rank for rank, names in enumerate(ast.literal_eval(node.value)) for name in names}
    raise SystemExit("tests/unit/test_repository.py has no LAYERS")


def cycle(graph: Graph) -> str:
    """One cycle, as text; `none` without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return "none"


def measures(root: Path) -> dict[str, object]:
    """Each measure by its name."""
    modules = parsed(root)
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, (path, _) in modules.items()}
    graph: Graph = {name: set(imported(tree, modules)) - {name} for name, (_, tree) in modules.items()}
    users: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            users[target].add(name)
    single = [name for name in modules if len(users[name]) == 1 and modules[name][0].name != "__init__.py"]
    beside = [name for name in single if next(iter(users[name])).rpartition(".")[0] == name.rpartition(".")[0]]
    folders: dict[str, set[Path]] = defaultdict(set)
    classes: Counter[str] = Counter()
    for path, tree in modules.values():
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.name].add(path.parent)
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    rank = layers(root)
    packages: Graph = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            one, other = (f"{module}.".split(".")[1] for module in (name, target))
            if one and other and one != other:
                packages[one].add(other)
    arrows = [(one, other) for one, others in packages.items() for other in others]
    lines = sum(lengths.values())
    return {
        "production lines": f"{lines:,}",
        "modules": len(modules),
        "mean lines of a module": round(lines / len(modules)),
        "lines of imports": f"{sum(import_lines(tree) for _, tree in modules.values()) / lines:.1%}",
        "modules with one importer": len(single),
        "... in their own folder": len(beside),
        "file names in several packages": sum(len(places) > 1 for places in folders.values()),
        "class names defined several times": sum(count > 1 for count in classes.values()),
        "imports between packages": len(arrows),
        "... of a later layer": sum(rank.get(other, 0) > rank.get(one, 0) for one, other in arrows),
        "cycle of packages": cycle(packages),
        "longest module": "{} ({})".format(*max(lengths.items(), key=lambda item: item[1])),
    }


def main() -> None:
    """Print a Markdown table."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    print("| measure | value |\n|---|---|")
    for name, value in measures(root).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
