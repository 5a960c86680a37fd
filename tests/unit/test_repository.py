"""The rules of this repository that no linter knows."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from llmrecipes import __version__
from tests import prose

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "llmrecipes"
TORCH_CPU = ROOT / "requirements" / "torch-cpu.txt"
VLLM = ROOT / "requirements" / "vllm.txt"  # of an environment without this package
LOCKS = sorted(set((ROOT / "requirements").glob("*.txt")) - {TORCH_CPU, VLLM})

# Imports go from a later line to an earlier or the same one, never back. A new part of the package gets its place here.
LAYERS = (
    (
        "errors",
        "console",
        "loading",
        "commandline",
        "options",
        "units",
        "nested",
        "io",
        "stores",
        "redact",
        "untrusted",
        "files",
        "packages",
        "parent",
        "runfiles",
    ),
    ("figures", "webpage"),
    ("recipe",),
    ("hardware", "diagnosis"),
    ("plan", "tracking"),
    ("launch",),
    ("data", "checkpoint", "faults"),
    ("rundir",),
    ("hf",),
    ("engine",),
    ("evaluation",),
    ("train",),
    ("verify", "doctor", "bench", "dryrun", "scaling"),
    ("workflow",),
    ("report",),
    ("bundle",),
    ("models",),
    ("foreign",),
    ("search",),
    ("api",),
    ("api_commands",),
    ("cli",),
    ("__main__",),
)
LIGHT = (
    *LAYERS[0],
    *LAYERS[1],
    "rundir",
    "recipe",
    "hardware",
    "diagnosis",
    "plan",
    "launch",
    "doctor",
    "api_commands",
    "api",
    "cli",
)
HEAVY = {
    "torch",
    "megatron",
    "mlflow",
    "wandb",
    "datasets",
    "transformers",
    "tokenizers",
    "tensorboard",
    "pandas",
    "pyarrow",
    "optuna",
    "plotly",
    "scipy",
    "matplotlib",
}
PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org", "download.pytorch.org"}


@cache
def tracked() -> tuple[Path, ...]:
    """Text files that are, or would be, in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs git and a git checkout: {error}")
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    found = tuple(path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192])
    assert PACKAGE / "__init__.py" in found
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part(path: Path) -> str:
    """Name of the part of the package that a module belongs to: `plan` for plan/memory.py, `cli` for cli.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def checked_only(nodes: list[ast.AST]) -> set[ast.AST]:
    """Those of nodes that are under `if TYPE_CHECKING`."""
    return {
        child
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }


@cache
def imports(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """(line, absolute module, whether it is executed) of every import in a file, wherever it stands."""
    package = ("llmrecipes", *path.relative_to(PACKAGE).parts[:-1]) if path.is_relative_to(PACKAGE) else ()
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))
    unexecuted = checked_only(nodes)
    imported: list[tuple[int, str, bool]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            imported += ((node.lineno, alias.name, node not in unexecuted) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            module = ".".join(base) if node.level else (node.module or "")
            # `from llmrecipes import show` imports the module llmrecipes.show
            imported += ((node.lineno, f"{module}.{alias.name}", node not in unexecuted) for alias in node.names)
    return tuple(imported)


def imported_modules(path: Path, *, running: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in a file; of those that `running` executes."""
    return ((line, module) for line, module, runs in imports(path) if runs or not running)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_go_one_way() -> None:
    rank = {name: number for number, names in enumerate(LAYERS) for name in names}
    wrong, homeless, edges = [], set(), set()
    for path in sources():
        importer = part(path)
        if importer == "__init__":
            continue
        for line, module in imported_modules(path):
            names = module.split(".")
            if names[0] != "llmrecipes" or len(names) == 1:
                continue
            if not ((PACKAGE / names[1]).is_dir() or (PACKAGE / f"{names[1]}.py").is_file()):
                continue
            imported = names[1]
            homeless |= {importer, imported} - set(rank)
            if imported != importer:
                edges.add((importer, imported))
            if not homeless and rank[imported] > rank[importer]:
                wrong.append(f"{relative(path)}:{line}: {importer} must not import {imported}")
    assert edges, "no import was seen: this test has gone blind"
    assert not homeless, f"give these parts a place in LAYERS: {sorted(homeless)}"
    assert not wrong, "\n".join(wrong)
    both_ways = sorted(edge for edge in edges if edge[::-1] in edges)
    assert not both_ways, f"parts that import each other: {both_ways}"


def module_name(path: Path) -> str:
    names = ("llmrecipes", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_modules_do_not_import_each_other() -> None:
    """No cycles, those of imports inside functions among them; a name for the type checker alone is no import."""
    modules = {module_name(path): path for path in sources()}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = (module for _, module in imported_modules(path, running=True))
        # `from a.b import c` is the module a.b.c, or a name of a.b.
        nearest = (each if each in modules else each.rpartition(".")[0] for each in imported)
        found[name] = {each for each in nearest if each in modules and each != name}
    assert sum(map(len, found.values())) > len(found), "no import was seen: this test has gone blind"
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_engine_alone_imports_megatron() -> None:
    """And data/, for megatron-core's datasets."""
    wrong = [
        f"{relative(path)}:{line}: {module}"
        for path in sources()
        if part(path) != "engine"
        for line, module in imported_modules(path)
        if module.split(".")[0] == "megatron"
        and not (part(path) == "data" and module.startswith("megatron.core.datasets"))
    ]
    assert not wrong, "\n".join(wrong)


def test_engines_stand_beside_each_other() -> None:
    """`core` has what they share and imports neither; `upcycle` writes its checkpoint without partitions."""
    allowed = {"core": {"core"}, "megatron": {"core", "megatron"}, "deepspeed": {"core", "deepspeed"}}
    wrong = {
        (module_name(path), module)
        for engine, others in allowed.items()
        for path in sorted((PACKAGE / "engine" / engine).rglob("*.py"))
        for _, module in imported_modules(path)
        if module.startswith("llmrecipes.engine.") and module.split(".")[2] in allowed.keys() - others
    }
    backend = "llmrecipes.engine.megatron.backend.MegatronBackend"
    assert wrong == {("llmrecipes.engine.deepspeed.backend", backend)}


HOMES = {
    r"\b[KMG]IB = |1 << 30\b|2 ?\*\* ?30\b": ("units",),
    r'"nvidia-smi"': ("hardware.nvidia",),
    r"sched_getaffinity|cpu\.max": ("hardware.cluster",),
    r"os\.fsync\(": ("io", "tracking.jsonl", "doctor.examine"),  # both on a file they go on writing
    r"\|SECRET\|": ("redact",),
}
"""What is written down in one place, and the modules that may."""


@pytest.mark.parametrize("pattern", HOMES)
def test_what_is_written_down_once(pattern: str) -> None:
    text = re.compile(pattern)
    found = {module_name(path) for path in sources() if text.search(path.read_text(encoding="utf-8"))}
    assert found == {f"llmrecipes.{name}" for name in HOMES[pattern]}


RUN_PATHS = re.compile(
    r"""/ \(?f?"(?:recipe\.yaml|plan\.json|env\.json|metrics\.jsonl|status\.json|evaluations\.jsonl)"
    | / \(?f?"(?:checkpoints|logs)["/]
    | runs_dir(?:\.resolve\(\))?\ /\ f?["\w]+(?:\.\w+)*["}\w-]*\ /
    | \b(?:run|run_dir|path|folder|checkpoint|directory)(?:\.parents\[|\.parent\.(?:parent|name)\b)
    | \bCheckpointStore\(""",
    re.VERBOSE,
)


def test_one_module_knows_the_directory_of_a_run() -> None:
    """Names and places in it are `runfiles.RunFiles`; its checkpoints come from `rundir.Run`."""
    wrong = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in sources()
        if module_name(path) not in ("llmrecipes.runfiles", "llmrecipes.rundir", "llmrecipes.checkpoint.store")
        if part(path) not in ("untrusted", "hardware", "hf", "data", "engine")  # they have no runs
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if RUN_PATHS.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_code_asks_for_megatrons_version() -> None:
    """One release is supported: pyproject.toml names it."""
    asking = re.compile(r"package_info|\bMAJOR\b|\bMINOR\b|megatron\.core\.__version__|hasattr\([^)]*\).*#.*0\.\d\d")
    found = {
        f"{relative(path)}:{number}"
        for path in sources()
        if part(path) == "engine"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if asking.search(line)
    }
    assert not found, sorted(found)


def heavy_after(code: str) -> set[str]:
    """Heavy libraries that a fresh interpreter has loaded after running the code."""
    report = "print('LOADED', *sys.modules, file=sys.stderr)"
    script = f"import sys\nsys.argv[1:] = ['list']\ntry:\n    {code}\nfinally:\n    {report}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.rpartition("LOADED")[2].split()
    assert any(name.startswith("llmrecipes.") for name in loaded)
    return {name.partition(".")[0] for name in loaded} & HEAVY


def test_list_loads_no_heavy_library() -> None:
    assert not heavy_after("from llmrecipes.cli.app import main; sys.exit(main())")


def test_light_parts_load_no_heavy_library() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if part(path) in LIGHT
    ]
    assert not heavy_after(f"import {', '.join(modules)}")


def test_no_module_of_the_tests_hides_a_package() -> None:
    """pytest puts folders of tests on the path, and rank processes inherit it."""
    packages = {"benchmarks", "tools", *(path.parent.name for path in ROOT.glob("*/__init__.py"))}
    hiding = {path for path in (ROOT / "tests").rglob("*.py") if path.stem in packages}
    # Its name is part of the record of the last image; make test-system alone collects it, and has no need of lab.
    assert hiding == {ROOT / "tests/system/containers/lab.py"} and {"lab", "llmrecipes"} <= packages


def test_modules_are_small() -> None:
    found = [*sources(), *(ROOT / "tools").glob("*.py")]
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in found}
    limits = {"llmrecipes/train/loop.py": 300}
    assert not {name: length for name, length in lengths.items() if length > limits.get(name, 500)}


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in every if argument is not None}


def documented(docstring: str) -> list[str]:
    """Names in the section `Args:`; a line may have several, with commas."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    heads = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1], re.MULTILINE) if section else []
    return [name.strip(" *") for head in heads for name in head.split(",")]


def test_documented_arguments_exist() -> None:
    """Of functions in their signature, of classes among their fields or the parameters of `__init__`."""
    wrong, number = [], 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = parameters_of(node)
            elif isinstance(node, ast.ClassDef):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                names = {field.id for field in fields if isinstance(field, ast.Name)}
                methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
                names |= {name for method in methods if method.name == "__init__" for name in parameters_of(method)}
            else:
                continue
            listed = documented(ast.get_docstring(node) or "")
            number += len(listed)
            wrong += [f"{relative(path)}:{node.lineno}: {node.name}: {name}" for name in listed if name not in names]
    assert number > 100, "no section was seen: this test has gone blind"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("lock", [*LOCKS, VLLM], ids=lambda path: path.stem)
def test_lock_pins_and_hashes_everything(lock: Path) -> None:
    text = lock.read_text()
    entries = re.split(r"^(?=[a-z0-9])", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]
    assert len(entries) > (100 if lock.stem == "lock" else 10)
    whole = re.compile(r"[a-z0-9.-]+==[^\s;]+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    bad = [entry for entry in entries if not whole.fullmatch(entry)]
    assert not bad, bad
    assert not re.search(r"://|^-", text, re.MULTILINE), "a lock file names no index, folder or address"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_answers_pyproject(lock: Path) -> None:
    """A dependency added without `make lock` is noticed here, not by the first user."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    wanted = declared("ray") - declared() if lock.stem == "ray" else declared(*extras - {"ray"})
    assert wanted - {"llmrecipes"} <= pins(lock).keys()


def test_lock_files_agree() -> None:
    lock, ray = LOCKS
    assert pins(TORCH_CPU) == {"torch": f"{pins(lock)['torch']}+cpu"}
    added = pins(ray).keys() - pins(lock).keys()
    assert "ray" in added and len(added) < 20
    assert pins(ray).items() <= (pins(lock) | {name: pins(ray)[name] for name in added}).items()


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Normal names of the dependencies in pyproject.toml, with those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}  # type: ignore[index]


def test_every_dependency_has_its_reason() -> None:
    table = (ROOT / "docs" / "development" / "architecture.md").read_text().partition("\n## Dependencies\n")[2]
    explained = {normal(name) for name in re.findall(r"^\| `([^`\[]+)[^`]*` \|", table, re.MULTILINE)}
    assert explained == declared(
        "corpora",
        "dev",
        "energy",
        "eval",
        "gpu",
        "prometheus",
        "quantize",
        "ray",
        "runtimes",
        "search",
        "serve",
        "server",
        "wandb",
        "zero",
    )


def test_every_import_is_declared() -> None:
    providers = packages_distributions()
    known = declared(
        "corpora",
        "energy",
        "eval",
        "gpu",
        "prometheus",
        "quantize",
        "ray",
        "runtimes",
        "search",
        "wandb",
        "zero",
    )
    shipped_with = {"pydantic_core": "pydantic", "pynvml": "nvidia-ml-py"}
    optional = {"transformer_engine", "apex", "pandas", "llama_cpp"}  # used where the user's machine has them
    missing = []
    for path in sources():
        for line, module in imported_modules(path):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names | {"llmrecipes"} | optional:
                continue
            names = {normal(name) for name in providers.get(top, [])} | {shipped_with.get(top, normal(top))}
            if not names & known:
                missing.append(f"{relative(path)}:{line}: {top}")
    assert not missing, missing


def machine_marks() -> set[str]:
    """Strings that only this machine knows: where the checkout lies, whose home it is, where its packages come from."""
    marks = {str(ROOT), str(Path(sys.base_prefix))} - {"/", "/usr", "/usr/local", "/app", "/workspace"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    values = re.findall(r"(?:index-url|find-links|trusted-host|proxy)='(.*)'", done.stdout)
    values += [os.environ.get(name, "") for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")]
    for value in " ".join(values).replace("\\n", " ").split():
        url = urlsplit(value)
        mark = url.hostname or url.path.rstrip("/")
        if len(mark) > 4 and mark not in PUBLIC_HOSTS | {"localhost", "127.0.0.1"}:
            marks.add(mark)
    return marks


def test_no_trace_of_this_machine() -> None:
    here = re.compile("|".join(rf"{re.escape(mark)}(?![\w-])" for mark in sorted(machine_marks())))
    homes = re.compile(r"/(?:home|Users)/(?!kubernetes/bin)[a-z][\w.-]*/")  # where GKE's nodes keep drivers
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            match = here.search(line) or homes.search(line)
            if match:
                found.append(f"{relative(path)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    found = [
        f"{relative(path)}:{number}"
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if marks.search(line) and path.parent != ROOT / "requirements"
    ]
    assert not found, found


def test_tests_do_not_repeat_the_words_of_errors() -> None:
    """They assert key, tokens and exit code (`tests.refusals`), so that a message can be improved without them."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        wrong += [f"{relative(path)}:{line}: {text!r}" for line, text in prose.in_file(path)]
        if path.name != "refusals.py":
            wrong += [f"{relative(path)}:{line}: refused() instead" for line in prose.own_raises(path)]
    assert not wrong, "\n".join(wrong)


def test_words_of_errors_are_noticed(tmp_path: Path) -> None:
    source = tmp_path / "test_x.py"
    source.write_text(
        """
def message(run):
    with pytest.raises(UserError, match="no such file") as caught:
        run()
    return str(caught.value)

@pytest.mark.parametrize(("change", "says"), [(1, "not a multiple"), (2, "model.num_layers 8")])
def test_a(change, says, capsys):
    assert says in message(change)
    text = capsys.readouterr().err
    assert "cannot be read" in text and "--nproc 3" in text
    assert text.startswith("error: wrong number")
    assert load().fix == "leave it out"
    assert "a plain string" in other
"""
    )
    words = ["no such file", "not a multiple", "cannot be read", "error: wrong number", "leave it out"]
    assert sorted(text for _, text in prose.in_file(source)) == sorted(words)
    assert list(prose.own_raises(source)) == [3]


@cache
def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    pages = [path for path in tracked() if path.suffix == ".md"]
    assert pages
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            if "://" in name or name.startswith("mailto:"):
                continue
            linked = page.parent / name if name else page
            if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
                broken.append(f"{relative(page)}: {target}")
    assert not broken, broken


def test_changelog_has_an_open_section() -> None:
    assert re.search(r"^## \[Unreleased\]$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_package_the_changelog_and_tags_have_the_same_versions() -> None:
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == __version__
    assert tracked()  # skips where there is no git

    def tags(*words: str) -> set[str]:
        command = ["git", "tag", "--list", "v*", *words]
        return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())

    assert tags() <= {f"v{version}" for version in released}
    assert tags("--points-at", "HEAD") <= {f"v{__version__}"}


def test_every_make_target_is_listed() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert phony == set(re.findall(r"^  make ([\w-]+)  +\S", listed, re.MULTILINE))


def test_the_wheel_is_marked_as_typed(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "llmrecipes").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(PACKAGE / name, tmp_path / "llmrecipes")
    code = "import setuptools.build_meta as build; print(build.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        assert "llmrecipes/py.typed" in wheel.namelist()
