"""Measures of the package's structure, for comparing two commits: `python tools/house.py [ROOT]`.

An import is an edge between modules, also inside a function or for the type checker. Packages are the folders and
modules directly in `llmrecipes`, in the order of LAYERS in tests/unit/test_repository.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "llmrecipes"
PAGES = ("README.md", "CHANGELOG.md", "benchmarks/RESULTS.md")
CODE_BUDGET = {
    ".": 1449,
    "bench": 867,
    "bundle": 491,
    "checkpoint": 1173,
    "cli": 3725,
    "data": 7910,
    "diagnosis": 1016,
    "doctor": 1233,
    "dryrun": 600,
    "engine": 8839,
    "evaluation": 1714,
    "faults": 600,
    "files": 50,
    "foreign": 1643,
    "hardware": 1112,
    "hf": 2445,
    "launch": 3218,
    "models": 4120,
    "plan": 5694,
    "recipe": 8934,
    "report": 1824,
    "scaling": 400,
    "search": 2499,
    "tracking": 2585,
    "train": 3298,
    "verify": 650,
    "workflow": 3795,
}
"""Most lines of code of each package; `.` are the modules beside the packages. Whoever needs more removes something, or
raises the number and says in the commit why."""
WORD_BUDGET = {"README.md": 770, "docs/": 79_700}
Function = ast.FunctionDef | ast.AsyncFunctionDef
LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.comprehension)
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


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines that have code: no blank line, comment, docstring or import."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        constant = node.value if isinstance(node, ast.Expr) else None
        docstring = isinstance(constant, ast.Constant) and isinstance(constant.value, str)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Expr) and docstring):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def inside(node: ast.AST, *, nested: bool) -> Iterator[ast.AST]:
    """What is in a node; with nested=False, without the functions in it."""
    for child in ast.iter_child_nodes(node):
        if nested or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from inside(child, nested=nested)


def decisions(node: ast.AST, *, nested: bool = True) -> int:
    """Branches, loops, conditions and boolean operators."""
    found = 0
    for part in inside(node, nested=nested):
        if isinstance(part, BRANCHES):
            found += 1
        elif isinstance(part, ast.BoolOp):
            found += len(part.values) - 1
    return found


def functions(trees: Iterable[ast.AST]) -> list[Function]:
    """All functions and methods."""
    return [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def parameters(function: Function) -> int:
    """How many parameters a function has, without `self` and `cls`."""
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in named)


def style(modules: Mapping[str, tuple[Path, ast.Module]]) -> dict[str, object]:
    """Density and length of functions, and forms that are hard to read."""
    texts = {name: path.read_text("utf-8") for name, (path, _) in modules.items()}
    trees = [tree for _, tree in modules.values()]
    code = sum(len(code_lines(texts[name], tree)) for name, (_, tree) in modules.items())
    nodes = [node for tree in trees for node in ast.walk(tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    tuples = sum(
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
        for node in nodes
    )
    nested = sum(
        isinstance(node, LOOPS) and any(isinstance(e, LOOPS) for e in ast.walk(node) if e is not node) for node in nodes
    )
    all_functions = functions(trees)
    branched = [1 + decisions(each, nested=False) for each in all_functions]
    docstrings = [
        ast.get_docstring(node) or "" for node in [*all_functions, *(n for n in nodes if isinstance(n, ast.ClassDef))]
    ]
    return {
        "lines of code": f"{code:,}",
        "decisions in 100 lines of code": round(100 * sum(decisions(tree) for tree in trees) / code, 1),
        "functions": f"{len(all_functions):,}",
        "... with a complexity over 15": sum(each > 15 for each in branched),
        "... over 60 lines": sum((each.end_lineno or 0) - each.lineno >= 60 for each in all_functions),
        "... with 10 parameters or more": sum(parameters(each) >= 10 for each in all_functions),
        "tuples assigned to tuples in 1,000 statements": round(1000 * tuples / statements, 1),
        "nested comprehensions in 1,000 statements": round(1000 * nested / statements, 1),
        "lines that are not formatted": sum(text.count("# fmt: skip") for text in texts.values()),
        "docstrings that begin with Of": sum(text.startswith("Of ") for text in docstrings),
    }


def code_by_package(root: Path) -> dict[str, int]:
    """Lines of code of each package; modules beside the packages count together, as `.`."""
    sizes: Counter[str] = Counter()
    for name, (path, tree) in parsed(root).items():
        parts = name.split(".")
        inner = len(parts) > 2 or path.name == "__init__.py"
        sizes[parts[1] if inner and len(parts) > 1 else "."] += len(code_lines(path.read_text("utf-8"), tree))
    return dict(sorted(sizes.items()))


def word_count(text: str) -> int:
    """The words in `text`. The bars and rules of a table, and marks that stand alone, are not words."""
    return sum(any(character.isalnum() for character in token) for token in text.split())


def words(root: Path) -> dict[str, int]:
    """Words of docs/ and of the longest pages outside it."""
    found = {"docs/": sum(word_count(path.read_text("utf-8")) for path in sorted((root / "docs").rglob("*.md")))}
    found |= {name: word_count((root / name).read_text("utf-8")) for name in PAGES}
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    found["longest version in CHANGELOG.md"] = max(word_count(section) for section in sections)
    return found


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
        **style(modules),
        **{f"words in {name}": f"{count:,}" for name, count in words(root).items()},
        **{f"code in {name}": f"{count:,}" for name, count in code_by_package(root).items()},
    }


def main() -> None:
    """Print a Markdown table."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    print("| measure | value |\n|---|---|")
    for name, value in measures(root).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
